"""Nets that run, saved in one way and loaded in another: the sets are torch's, and the command
that is printed, `convert --fit` and `load_into` give the original back, bit for bit.
"""

from __future__ import annotations

import pytest
from expected_nets import PACKED
from fit_nets import CASES
from fit_spoiled import (
    check_a_missing_layer,
    check_another_head,
    owners,
    quietly,
    spoiled,
    without_a_layer,
)
from fit_support import (
    VARIANTS,
    cells,
    check_variant,
    fresh,
    inspected,
    original,
    outputs,
    same,
    save,
    spec,
)
from verbs_support import cli

import ckptool
from ckptool.errors import DoesNotFit, ModelError, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore")
KEPT_AS_CODE = "quantized_lstm"
"""Its state_dict has an object of torch's own that only unpickling can make."""
NAMES = [name for name in CASES if name != KEPT_AS_CODE]
IN_PARTS = [name for name in NAMES if name not in PACKED and owners(original(name))]
UNMENDED = {
    "missing": (check_a_missing_layer, "plain"),
    "missing under DataParallel": (check_a_missing_layer, "DataParallel"),
    "head": (check_another_head, "plain"),
    "head under DataParallel": (check_another_head, "DataParallel"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "variant", "number"), cells(NAMES, VARIANTS, 11))
def test_the_fix_gives_the_original_back(capsys, name, variant, number):
    check_variant(capsys, name, VARIANTS[variant], number)


@pytest.mark.parametrize(("name", "kind", "number"), cells(IN_PARTS, UNMENDED, 4))
def test_what_no_rule_mends_is_said_exactly(capsys, name, kind, number):
    """A layer is missing, or the head has another size."""
    check, wrap = UNMENDED[kind]
    check(capsys, name, wrap, number)


# -- quantized ---------------------------------------------------------------------------------
def test_a_quantized_net_without_a_layer_is_refused(capsys):
    """Torch's own layers raise KeyError on it, with strict=False too."""
    name = "quantized_static"
    saved, keys = spoiled(name, "DataParallel", without_a_layer, 1)
    found = inspected(capsys, saved, name, "plain")
    assert found["after"]["missing_keys"] == keys
    words = ["convert", saved.file, "--fit", *spec(name, "plain"), "-o", "fit.pth"]
    status, _, err = cli(capsys, *words)
    assert status == 1
    assert f"{len(keys)} missing ({keys[0]}" in err
    for strict, error in ((True, DoesNotFit), (False, ModelError)):
        model = fresh(name)
        before = outputs(name, model)
        with pytest.raises(error, match=r"3 missing" if strict else r"KeyError: 'conv\.bias'"):
            quietly(ckptool.load_into, model, saved.file, strict=strict)
        assert same(outputs(name, model), before)


@pytest.mark.parametrize("wrap", ["plain", "DataParallel"])
def test_a_layer_that_torch_keeps_as_code(capsys, wrap):
    """The names can be mended, the object not be read: that is said, nothing is touched."""
    saved = save(VARIANTS[wrap].save(original(KEPT_AS_CODE)).state_dict(), 1)
    status, out, _ = cli(capsys, "inspect", saved.file, "--model", *spec(KEPT_AS_CODE, "plain"))
    assert status == 1
    assert "could run code: torch.ScriptObject" in out
    assert ("fits" if wrap == "plain" else "all 5 keys match after removing 'module.'") in out
    assert "ckptool convert net.pth --strip-module" not in out
    model = fresh(KEPT_AS_CODE)
    before = outputs(KEPT_AS_CODE, model)
    with pytest.raises(Unsupported, match=r"torch\.ScriptObject, which ckptool does not unpickle"):
        quietly(ckptool.load_into, model, saved.file)
    assert same(outputs(KEPT_AS_CODE, model), before)
    words = ["convert", saved.file, "--fit", *spec(KEPT_AS_CODE, "plain"), "-o", "fit.pth"]
    status, _, err = cli(capsys, *words)
    assert status == 2
    assert "could run code when loaded: torch.ScriptObject; nothing written" in err
    assert cli(capsys, *words, "--keep-unknown")[0] == 0
    quietly(model.load_state_dict, saved.state("fit.pth"), strict=True)
    assert same(outputs(KEPT_AS_CODE, model), outputs(KEPT_AS_CODE, original(KEPT_AS_CODE)))
