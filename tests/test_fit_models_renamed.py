"""Files of other versions of a net: names that libraries or authors changed, entries that came
and went. What can be mended gives the original back.
"""

from __future__ import annotations

import re

import pytest
import torch
from causes_support import rekeyed
from expected_support import with_metadata
from fit_spoiled import check_partial
from fit_support import (
    check_fit,
    check_mended,
    check_sets,
    fresh,
    inspected,
    is_the_original,
    original,
    save,
)
from torch import nn

import ckptool
from ckptool.errors import DoesNotFit

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def renamed(*rows):
    """Names by regular expressions, one after another."""

    def change(key):
        for old, new in rows:
            key = re.sub(old, new, key)
        return key

    return change


P = r"parametrizations\.(\w+)\."
TO_OLD_NORM = renamed((rf"{P}original0$", r"\1_g"), (rf"{P}original1$", r"\1_v"))
TO_NEW_NORM = renamed(
    (r"(\w+)_g$", r"parametrizations.\1.original0"), (r"(\w+)_v$", r"parametrizations.\1.original1")
)
TO_OLD_SPECTRAL = renamed(
    (rf"{P}original$", r"\1_orig"), (rf"{P}0\._u$", r"\1_u"), (rf"{P}0\._v$", r"\1_v")
)
TO_DOTS = renamed((r"(denselayer\d+\.(?:norm|relu|conv))([12])\.", r"\1.\2."))
CASES = {
    "DenseNet of torch 0.3": ("densenet", TO_DOTS, "norm.1 is norm1"),
    "weight_norm before 2.1": ("lstm_new_weight_norm", TO_OLD_NORM, "all 8 keys match"),
    "weight_norm, convolution": ("conv_weight_norm", TO_OLD_NORM, "all 8 keys match"),
    "weight_norm from 2.1 on": ("lstm_old_weight_norm", TO_NEW_NORM, "weight_g and weight_v"),
    "spectral_norm before 1.9": ("discriminator", TO_OLD_SPECTRAL, "weight_orig, weight_u"),
    "gamma and beta": (
        "gammabeta",
        renamed((r"layer_norm\.weight$", "layer_norm.gamma"), (r"layer_norm\.bias$", "layer_norm.beta")),
        "renaming gamma and beta to weight and bias",
    ),
    "other words": (
        "resnet",
        renamed((r"^layer", "stage"), (r"downsample", "shortcut"), (r"^fc\.", "head.")),
        "all 82 keys match",
    ),
    "other numbers": (
        "vgg_plain",
        renamed((r"^features\.(\d)", lambda m: f"features.{2 * int(m[1])}")),
        "all 13 keys match",
    ),
    "a level between": ("vit", renamed((r"^blocks\.", "encoder.blocks.")), "all 40 keys match"),
}  # fmt: skip


@pytest.mark.parametrize("lead", ["", "module."])
@pytest.mark.parametrize("case", CASES)
def test_names_of_another_version(capsys, case, lead):
    name, change, said = CASES[case]
    net = original(name)
    state = (nn.DataParallel(net) if lead else net).state_dict()
    found = check_mended(capsys, save(rekeyed(state, change), len(case)), name)
    if not found["fits"]:  # torch's own hook knows weight_norm
        assert said in found["cause"]


def more(state, rows):
    return with_metadata([*state.items(), *rows], state._metadata)


SURPLUS = {
    "counters of a profiler": (
        "resnet",
        lambda keys: {f"{key.rpartition('.')[0]}.total_ops": torch.zeros(1, dtype=torch.float64) for key in keys if "conv" in key},
        "counters left by a FLOP profiler (total_ops)",
    ),
    "positions": (
        "gpt", lambda _: {"position_ids": torch.arange(8)[None]}, "1 buffer that newer versions",
    ),
    "another part": (
        "cnn", lambda _: {"aux.weight": torch.ones(2, 3), "aux.bias": torch.ones(2)}, "aux",
    ),
    "what is no tensor": ("cnn", lambda _: {"classes": ["cat", "dog"]}, "no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("lead", ["", "module."])
@pytest.mark.parametrize("case", SURPLUS)
def test_entries_that_are_too_many(capsys, case, lead):
    name, rows, said = SURPLUS[case]
    net = original(name)
    state = (nn.DataParallel(net) if lead else net).state_dict()
    extra = {lead + key: value for key, value in rows(list(net.state_dict())).items()}
    saved = save(more(state, extra.items()), len(case))
    found = inspected(capsys, saved, name, "plain")
    check_sets(found, saved, name, "plain")
    assert said in " ".join([found["cause"], *found["findings"]])
    assert set(extra) <= set(found["unexpected_keys"])
    if case != "what is no tensor":
        check_mended(capsys, saved, name)
        return
    check_fit(capsys, saved, name, "plain")
    model = fresh(name)
    with pytest.raises(DoesNotFit, match=r"1 unexpected \((module\.)?classes\)"):
        ckptool.load_into(model, saved.file)
    report = ckptool.load_into(model, saved.file, strict=False)
    assert report.unexpected_keys == (("classes",))
    assert is_the_original(name, model)


VERSIONS = {"no versions": None, "version 1": 1, "version 2": 2}


@pytest.mark.parametrize("version", VERSIONS)
def test_batch_norm_without_its_counter(capsys, version):
    """Torch forgives it where the file says no version of the layer, or one below 2."""
    state = original("cnn").state_dict()
    layers = {path: {"version": VERSIONS[version]} for path in state._metadata}
    rows = [row for row in state.items() if not row[0].endswith("num_batches_tracked")]
    saved = save(with_metadata(rows, layers if VERSIONS[version] else None), 1)
    if version != "version 2":
        assert check_mended(capsys, saved, "cnn")["fits"]
        return
    wanted = ["1.num_batches_tracked"]
    found = inspected(capsys, saved, "cnn", "plain")
    check_sets(found, saved, "cnn", "plain")
    assert found["missing_keys"] == wanted
    assert "such a counter matters only where momentum is None" in found["findings"][0]
    check_partial(capsys, saved, "cnn", wanted, f"1 missing ({wanted[0]})")
