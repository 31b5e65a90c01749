"""What `expect` says of each key, and what becomes of hooks that read, raise, print or count."""

from __future__ import annotations

import time

import pytest
import torch
from expected_nets import NETS, Counting, Reading, Tied
from expected_support import fingerprint, quietly, shapes_of, trained, versions_of
from torch import nn

import ckptool
from ckptool import compare
from ckptool.checkpoint import Mismatched, Wanted
from ckptool.errors import ModelError
from ckptool.models.expected import expect

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_kind_of_key():
    model = nn.Sequential(
        nn.Linear(2, 3, dtype=torch.bfloat16), nn.BatchNorm1d(3), Counting(), nn.LazyLinear(1)
    )

    assert expect(model).wanted == (
        Wanted("0.weight", (3, 2), "bfloat16", "parameter"),
        Wanted("0.bias", (3,), "bfloat16", "parameter"),
        Wanted("1.weight", (3,), "float32", "parameter"),
        Wanted("1.bias", (3,), "float32", "parameter"),
        Wanted("1.running_mean", (3,), "float32", "buffer"),
        Wanted("1.running_var", (3,), "float32", "buffer"),
        Wanted("1.num_batches_tracked", (), "int64", "buffer"),
        Wanted("2.weight", (2, 2), "float32", "parameter"),
        Wanted("2.bias", (2,), "float32", "parameter"),
        Wanted("2._extra_state", None, None, "extra"),
        Wanted("3.weight", None, "float32", "parameter"),
        Wanted("3.bias", None, "float32", "parameter"),
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ties_name_the_first_key(device):
    with torch.device(device):
        model = nn.ModuleDict({"net": Tied(), "view": nn.Embedding(7, 4), "part": nn.Linear(4, 3)})
    table = model["net"].emb.weight
    model["view"].weight = nn.Parameter(table.data)
    model["part"].weight = nn.Parameter(table.data[:3])

    ties = {row.key: row.tie for row in expect(model).wanted if row.tie}

    assert ties == {"net.head.weight": "net.emb.weight", "view.weight": "net.emb.weight"}


def test_quantized_layers_have_keys_without_shapes():
    rows = {row.key: row[1:4] for row in expect(quietly(NETS["quantized_static"])).wanted}

    assert rows["conv.weight"] == ((2, 1, 3, 3), "qint8", "tensor")
    assert rows["fc.scale"] == ((), "float32", "tensor")
    assert rows["fc._packed_params._packed_params"] == (None, None, "extra")
    assert rows["fc._packed_params.dtype"] == (None, None, "extra")


def test_a_renaming_hook_counts_what_it_loads():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))
    have = {"0.bias": (3,), "0.weight_g": (3, 1), "0.weight_v": (3, 2)}

    match = expect(model).match(None, have)

    assert match.fits
    assert match.loaded == (
        "0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"
    )  # fmt: skip


def test_a_counter_that_torch_starts_itself_is_not_loaded():
    match = expect(nn.BatchNorm1d(2, affine=False)).match(
        None, {"running_mean": (2,), "running_var": (2,)}
    )

    assert match.fits
    assert match.loaded == ("running_mean", "running_var")


def test_an_initialised_file_fits_a_lazy_model():
    lazy = expect(nn.Sequential(nn.LazyLinear(4)))
    plain = expect(nn.Sequential(nn.Linear(7, 4)))

    assert lazy.match(None, {"0.weight": (4, 7), "0.bias": (9,)}).loaded == ("0.weight", "0.bias")
    assert lazy.match(None, {"0.weight": None, "0.bias": None}).fits
    assert plain.match(None, {"0.weight": None, "0.bias": (4,)}).mismatched == (
        Mismatched("0.weight", None, (4, 7)),
    )


def test_a_value_that_is_no_tensor_is_a_complaint():
    found = expect(nn.Linear(2, 2)).compare({"weight": None, "bias": (2,)})

    assert found.match.mismatched == (Mismatched("weight", None, (2, 2)),)
    assert not found.match.fits
    assert [text[:45] for text in found.complaints] == [
        'While copying the parameter named "weight", e'
    ]


class Unlucky(nn.Module):
    """Its hook needs more than zeros, once it has changed all there is to change."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.seen = []
        self.register_load_state_dict_pre_hook(Unlucky._hook)

    def _hook(self, state, prefix, *_):
        self.seen.append(prefix)
        self.fc = nn.Linear(3, 3)
        self.more = 1
        del self._modules["fc"]
        self.__class__ = nn.Module
        raise self.error


@pytest.mark.parametrize("error", [ValueError("wrong version\nof a file"), KeyboardInterrupt()])
def test_the_model_is_put_back_whatever_a_hook_raises(error):
    model = Unlucky()
    model.error = error
    before, expected, have = fingerprint(model), expect(model), {"fc.weight": (2, 2), "x": (1,)}

    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            expected.compare(have)
    else:
        found = expected.compare(have)
        assert found.match == compare.match(expected.wanted, have)
        assert found.match.missing_keys == ("fc.bias",)
        (note,) = found.notes
        assert note.slug == "hooks-not-run"
        assert "raises ValueError: wrong version (tests" in note.text
        assert "test_models_expected_hooks.py, line " in note.text

    assert fingerprint(model) == before
    assert list(model.state_dict()) == ["fc.weight", "fc.bias"]


def test_a_hook_that_fails_is_not_taken_for_torchs_list_of_errors():
    """A mismatch before it would be all there is to say, and the keys after it unsaid."""
    model = nn.Sequential(nn.Linear(2, 2), Unlucky(), nn.Linear(2, 2))
    model[1].error = RuntimeError("not this file")

    found = expect(model).compare({"0.weight": (3, 2), "0.bias": (2,)})

    assert found.match.missing_keys == ("1.fc.weight", "1.fc.bias", "2.weight", "2.bias")
    assert [row.key for row in found.match.mismatched] == ["0.weight"]
    assert "raises RuntimeError: not this file" in found.notes[0].text


def test_a_hook_that_reads_numbers_gets_zeros_and_a_note():
    model = Reading()
    found = expect(model).compare({"weight": (2,), "depth": (), "y": (1,)})

    assert (found.match.loaded, found.match.unexpected_keys) == (("weight", "depth"), ("y",))
    (note,) = found.notes
    assert note.slug == "hooks-on-zeros"
    assert "expected_nets.py, line " in note.text
    assert not hasattr(model, "last")


def test_torch_itself_raises_where_a_quantized_layer_misses_a_key():
    model = quietly(NETS["quantized_dynamic"])
    state = quietly(trained, model)
    versions = versions_of(state)
    del state["0.scale"]
    with pytest.raises(KeyError, match=r"0\.scale"):
        model.load_state_dict(state, strict=False)

    found = expect(model).compare(shapes_of(state), versions)

    assert found.match.missing_keys == ("0.scale",)
    assert "raises KeyError: '0.scale'" in found.notes[0].text


def test_no_extra_state_is_handed_over():
    model = Counting()
    have = {"weight": (2, 2), "bias": (2,), "_extra_state": None}

    assert expect(model).match(None, have).fits
    assert expect(model).match(None, {**have, "_extra_state": (3,)}).fits
    assert model.seen == {"steps": 0}


def test_an_absurd_shape_is_a_mismatch_and_no_more():
    found = expect(nn.Linear(2, 2)).compare({"weight": (1 << 40, 1 << 40), "bias": (1 << 60,)})

    assert [row.key for row in found.match.mismatched] == ["weight", "bias"]
    assert found.match.mismatched[0].file_shape == (1 << 40, 1 << 40)
    assert "no tensor can have the shape" in found.notes[0].text


class Chatty(nn.Linear):
    devices: list = []  # noqa: RUF012

    def _load_from_state_dict(self, state, prefix, *rest):
        print("loading", prefix)
        self.devices += [self.weight.device.type, state["weight"].device.type]
        super()._load_from_state_dict(state, prefix, *rest)


def test_hooks_meet_no_numbers_and_print_to_stderr(capfd):
    model = Chatty(2, 2)
    expect(model).match(None, {"weight": (2, 2), "bias": (2,)})

    assert Chatty.devices == ["meta", "meta"]
    assert capfd.readouterr() == ("", "loading \n")


class Odd(nn.Module):
    """A state_dict that takes no words, or fails; a load that fails before torch's."""

    def __init__(self, fails=False):
        super().__init__()
        self.fc, self.fails = nn.Linear(2, 2), fails

    def state_dict(self):
        if self.fails:
            raise RuntimeError("not now")
        return {key: value.detach() for key, value in self.fc.state_dict().items()}

    def load_state_dict(self, state_dict):
        raise NotImplementedError("use from_checkpoint")


def test_overridden_methods_are_the_ones_that_are_asked():
    expected = expect(Odd())
    assert expected.wanted == (Wanted("weight", (2, 2), "float32"), Wanted("bias", (2,), "float32"))

    found = expected.compare({"weight": (2, 2)})
    assert found.match.missing_keys == ("bias",)
    assert "raises NotImplementedError: use from_checkpoint" in found.notes[0].text

    with pytest.raises(ModelError, match=r"Odd.state_dict\(\) raised RuntimeError: not now"):
        expect(Odd(fails=True))


class Strict(nn.Module):
    """Knows no `strict`, and is."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def load_state_dict(self, state_dict):
        return super().load_state_dict({f"fc.{key}": value for key, value in state_dict.items()})


def test_an_override_without_strict_gives_the_same_sets():
    found = expect(Strict()).compare({"weight": (3, 2), "x": ()})

    assert found.match.missing_keys == ("fc.bias",)
    assert found.match.unexpected_keys == ("fc.x",)
    assert found.match.mismatched == (Mismatched("fc.weight", (3, 2), (2, 2)),)
    assert (found.notes, found.complaints) == ((), ())


def test_the_versions_of_spectral_norm_come_from_the_file(tmp_path):
    """They stand one level down in `_metadata`; without them torch would ask for other keys."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 3)))
    state = model.state_dict()
    del state["0.weight_u"]
    says = model.load_state_dict(state, strict=False)
    torch.save(state, tmp_path / "net.pth")
    ckptool.convert(tmp_path / "net.pth", tmp_path / "net.safetensors")

    for name in ("net.pth", "net.safetensors"):
        with ckptool.open(tmp_path / name) as file:
            (table,) = file.tables
        assert table.metadata["0"] == {"version": 1, "spectral_norm": {"weight.version": 1}}
        have = {tensor.key: tensor.shape for tensor in table.tensors}
        match = expect(model).match(None, have, table.metadata)
        assert list(match.missing_keys) == says.missing_keys == ["0.weight_u"]


def test_a_thousand_keys_take_a_fifth_of_a_second():
    def layer():
        return nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), nn.ReLU()])

    with torch.device("meta"):
        model = nn.Sequential(*(layer() for _ in range(143)))
    state = model.state_dict()
    have, versions = shapes_of(state), versions_of(state)
    took = []
    for _ in range(5):
        start = time.process_time()
        match = expect(model).match(None, have, versions)
        took.append(time.process_time() - start)

    assert len(match.loaded) == len(state) == 1001
    assert min(took) < 0.2
