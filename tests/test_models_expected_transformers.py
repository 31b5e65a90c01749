"""The same against the architectures of transformers, made small, from configs alone."""

from __future__ import annotations

import pytest
import torch
from expected_support import (
    SPOILS,
    DDPStyle,
    fingerprint,
    quietly,
    shapes_of,
    torch_says,
    trained,
    versions_of,
)

from ckptool.models.expected import expect

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
IMAGE = {**TEXT, "image_size": 8, "patch_size": 4}
MODELS = {
    "BertForMaskedLM": TEXT,
    "RobertaForSequenceClassification": TEXT,
    "ElectraModel": {**TEXT, "embedding_size": 8},
    "AlbertModel": {**TEXT, "embedding_size": 8},
    "DistilBertForQuestionAnswering": {"vocab_size": 32, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 8},
    "DebertaV2Model": {**TEXT, "relative_attention": True, "pos_att_type": ["p2c"]},
    "GPT2LMHeadModel": {"vocab_size": 32, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8},
    "GPTNeoXForCausalLM": TEXT,
    "OPTForCausalLM": {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 8, "word_embed_proj_dim": 8},
    "LlamaForCausalLM": {**TEXT, "num_key_value_heads": 1},
    "MistralForCausalLM": {**TEXT, "num_key_value_heads": 1, "head_dim": 4},
    "MixtralForCausalLM": {**TEXT, "num_key_value_heads": 1, "num_local_experts": 2},
    "Qwen2ForCausalLM": {**TEXT, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "GemmaForCausalLM": {**TEXT, "num_key_value_heads": 1, "head_dim": 4},
    "MambaForCausalLM": {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 2},
    "T5ForConditionalGeneration": {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2},
    "BartForConditionalGeneration": {"vocab_size": 32, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "pad_token_id": 1},
    "ViTForImageClassification": IMAGE,
    "ConvNextModel": {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2},
    "ResNetForImageClassification": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]},
    "SwinModel": {"image_size": 8, "patch_size": 2, "embed_dim": 4, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2},
    "Wav2Vec2Model": {**TEXT, "conv_dim": [4, 4], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    "HubertModel": {**TEXT, "conv_dim": [4, 4], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    "WhisperModel": {"vocab_size": 32, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8, "pad_token_id": 1},
}  # fmt: skip
WRAPS = {"plain": lambda net: net, "DataParallel": torch.nn.DataParallel, "DDP": DDPStyle}


def old_norms(state):
    """As weight_norm named its halves before parametrizations."""
    rows = type(state)()
    for key, value in state.items():
        for new, old in (("original0", "g"), ("original1", "v")):
            key = key.replace(f"parametrizations.weight.{new}", f"weight_{old}")
        rows[key] = value
    rows._metadata = versions_of(state)
    return rows


def maker(name, wrap):
    kind = getattr(transformers, name)
    config = kind.config_class(**MODELS[name])

    def make():
        torch.manual_seed(0)
        return WRAPS[wrap](kind(config))

    return make


@pytest.mark.parametrize("name", MODELS)
def test_sets_are_those_of_torch(name):
    for wrap in WRAPS:
        make = maker(name, wrap)
        real = quietly(make)
        before, expected = fingerprint(real), expect(real)
        with torch.device("meta"):
            meta = expect(quietly(make))
        state = quietly(trained, real)
        for spoil in [*SPOILS, old_norms] if wrap == "plain" else SPOILS[:5]:
            spoiled = spoil(state)
            says = torch_says(make, spoiled)
            match = expected.match(None, shapes_of(spoiled), versions_of(spoiled))
            label = f"{wrap} {spoil.__name__}"
            assert list(match.missing_keys) == says.missing, label
            assert list(match.unexpected_keys) == says.unexpected, label
            assert [row[:2] for row in match.mismatched] == [row[:2] for row in says.mismatched], (
                label
            )
            out = {*says.missing, *(row[0] for row in says.mismatched), *says.unseen}
            assert set(match.loaded) - set(says.unseen) == {*says.loaded} - out, label
            assert meta.match(None, shapes_of(spoiled), versions_of(spoiled)) == match, label
        assert fingerprint(real) == before
