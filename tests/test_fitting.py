"""inspect --model and --against, convert --fit: a file against a model, torch being the judge."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from fixtures.make_fixtures import absent
from torch import nn
from verbs_support import cli

import ckptool
from ckptool.errors import CkptError, DoesNotFit, UsageError

NET = """
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3)
        self.norm = nn.BatchNorm2d(width)


class Net(nn.Module):
    def __init__(self, num_classes=5, blocks=2):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layers = nn.Sequential(*[Block(4) for _ in range(blocks)])
        self.fc = nn.Linear(4, num_classes)
        self.tied = nn.Linear(4, num_classes)
        self.tied.weight = self.fc.weight


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.head = nn.Linear(4, 5)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.head.weight
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(**words):
    space = {"__name__": "net"}
    exec(NET, space)
    name = words.pop("name", "Net")
    torch.manual_seed(0)
    return space[name](**words)


def saved(name, net=None, *, entries=None, prefix=""):
    """A file with the state_dict of `net` and an epoch; the state_dict."""
    state = (net or model()).state_dict()
    weights = type(state)((prefix + key, value) for key, value in state.items())
    weights._metadata = {
        f"{prefix}{key}".rstrip("."): value for key, value in state._metadata.items()
    }
    torch.save({"epoch": 7, "state_dict": weights, **(entries or {})}, name)
    return state


def torch_says(net, file, at="state_dict"):
    """torch's own sets, and the keys of other shapes."""
    state = torch.load(file, weights_only=True)
    try:
        found = net.load_state_dict(state[at] if at else state, strict=False)
    except RuntimeError as error:
        wrong = [key for key in net.state_dict() if f"size mismatch for {key}:" in str(error)]
        return None, None, wrong
    return found.missing_keys, found.unexpected_keys, []


def loads(net, file, at="state_dict"):
    """The net with the file's weights, strictly."""
    state = torch.load(file, weights_only=True)
    net.load_state_dict(state[at] if at else state, strict=True)
    return net


def equal(one, two):
    one, two = one.state_dict(), two.state_dict()
    return list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)


CASES = {
    "as it is": {},
    "DataParallel": {"prefix": "module."},
    "backbone": {"prefix": "backbone."},
    "wrapped twice": {"prefix": "module._orig_mod."},
}


@pytest.mark.parametrize("case", CASES)
def test_the_sets_are_torchs_and_the_command_mends(here, capsys, case):
    net = model()
    saved("net.pth", net, **CASES[case])
    status, out, _ = cli(capsys, "inspect", "net.pth", "--model", "net.py:Net", "--json")
    match = json.loads(out)["match"]

    missing, unexpected, wrong = torch_says(model(), "net.pth")
    assert match["missing_keys"] == missing
    assert match["unexpected_keys"] == unexpected
    assert [row["key"] for row in match["mismatched"]] == wrong
    assert match["fits"] == (case == "as it is") == (status == 0)
    assert match["wanted_count"] == len(net.state_dict())
    if match["fits"]:
        assert match["fix"] is None
        return
    assert match["after"]["missing_keys"] == match["after"]["unexpected_keys"] == []
    words = shlex.split(match["fix"])
    assert words[:2] == ["ckptool", "convert"]
    assert cli(capsys, *words[1:])[0] == 0
    assert equal(loads(model(), words[-1]), net)
    assert cli(capsys, "inspect", words[-1], "--model", "net.py:Net")[0] == 0


def test_the_screen(here, capsys):
    saved("net.pth", prefix="module.")
    status, out, err = cli(
        capsys, "inspect", "net.pth", "--model", "net.py:Net", "--model-arg", "num_classes=10"
    )
    lines = out.splitlines()
    assert (status, err) == (1, "")
    assert lines[0] == "net.pth at 'state_dict' against net.Net(num_classes=10): does not fit"
    assert lines[1] == "  matched 0 of 20, missing_keys 18, unexpected_keys 20, mismatched 0"
    assert lines[2].startswith("cause   ")
    assert "after removing 'module.'" in lines[2]
    rows = [line.split() for line in lines if line.startswith("  mismatched")]
    assert rows[0][:2] == ["mismatched", "fc.{weight,bias}"]
    assert "file [5, 4], [5]" in out
    assert "model [10, 4], [10]" in out
    assert 'ckptool.load_into(net, "net.pth", mismatched="skip")' in out
    assert "--strip-module" in out
    assert "saved from DataParallel" not in out  # the cause has said it


def test_against_a_file_a_list_and_json_say_the_same(here, capsys):
    net = model(num_classes=9)
    saved("net.pth", prefix="module.")
    saved("want.pth", net)
    state = net.state_dict()
    (here / "keys.json").write_text(json.dumps({k: list(v.shape) for k, v in state.items()}))
    (here / "names.json").write_text(json.dumps(list(state)))
    (here / "seen.json").write_text(cli(capsys, "inspect", "want.pth", "--json")[1])

    def sets(*words):
        status, out, _ = cli(capsys, "inspect", "net.pth", *words, "--json")
        match = json.loads(out)["match"]
        assert status == 1
        after = match["after"]
        return (
            match["missing_keys"], match["unexpected_keys"], after["mismatched"], match["cause"],
        )  # fmt: skip

    asked = sets("--model", "net.py:Net", "--model-arg", "num_classes=9")
    for file in ("want.pth", "keys.json", "seen.json"):
        found = sets("--against", file)
        forgiven = {key for key in found[0] if key.endswith("num_batches_tracked")}
        assert [key for key in found[0] if key not in forgiven] == asked[0], file
        assert found[1:3] == asked[1:3], file
    assert sets("--against", "names.json")[2] == []


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"a": "b"}', '{"a": [1.5]}', "3", '{"tables": 3}', "null"]
)
def test_json_without_keys_is_refused(here, text):
    saved("net.pth")
    (here / "keys.json").write_text(text)
    with pytest.raises(UsageError, match="no keys in it"):
        ckptool.inspect("net.pth", against="keys.json")


def test_index_is_the_models_own(here):
    net = model()
    saved("net.pth", net, prefix="module.")
    found = ckptool.inspect("net.pth", model="net.py:Net", index=True)
    places = {id(p): str(i) for i, p in enumerate(net.parameters())}
    wanted = {
        f"module.{key}": places[id(p)] for key, p in net.named_parameters(remove_duplicate=False)
    }
    assert found.index == wanted
    assert found.index["module.tied.weight"] == found.index["module.fc.weight"]


def test_python_takes_the_model_itself_and_leaves_it_alone(here):
    net = model(num_classes=3)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    saved("net.pth", prefix="module.")
    found = ckptool.inspect("net.pth", model=net)
    assert not found.fit.fits
    assert found.match.missing_keys == tuple(torch_says(model(num_classes=3), "net.pth")[0])
    assert "removing 'module.'" in found.match.cause
    assert "--strip-module" in found.match.fix
    assert [row.key for row in found.fit.cause.after.mismatched] == [
        "fc.weight", "fc.bias", "tied.weight", "tied.bias",
    ]  # fmt: skip
    assert str(found).startswith("net.pth at 'state_dict' against Net: does not fit")
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


# -- convert --fit -----------------------------------------------------------------------------
FITS = {
    "module": ({"prefix": "module."}, "Net"),
    "subtree": ({"prefix": "model.encoder."}, "Net"),
    "other names": ({}, "Renamed"),
}


@pytest.mark.parametrize("out", ["out.pth", "out.safetensors", "in place"])
@pytest.mark.parametrize("case", FITS)
def test_fit_makes_it_load(here, capsys, case, out):
    words, name = FITS[case]
    state = saved("net.pth", **words)
    place = ["--in-place"] if out == "in place" else ["-o", out]
    file = "net.pth" if out == "in place" else out
    status, _, err = cli(capsys, "convert", "net.pth", "--fit", f"net.py:{name}", *place)
    assert status == 0, err
    net = model(name=name)
    if file.endswith(".safetensors"):
        from safetensors.torch import load_model

        assert load_model(net, file, strict=True) == (set(), [])
    else:
        loads(net, file)
        assert torch.load(file, weights_only=True)["epoch"] == 7
    for (_, wanted), (_, got) in zip(state.items(), net.state_dict().items(), strict=True):
        assert torch.equal(wanted, got)


def test_fit_leaves_out_what_the_model_has_not_and_says_it(here, capsys):
    saved("net.pth", model(blocks=3), prefix="module.")
    status, _, err = cli(capsys, "convert", "net.pth", "--fit", "net.py:Net", "-o", "out.pth")
    assert status == 0
    assert "dropped   7: module.layers.2.conv.weight" in err
    assert "another variant" in err
    loads(model(), "out.pth")
    status, _, err = cli(capsys, "convert", "net.pth", "--fit", "net.py:Net", "--in-place")
    assert status == 2
    assert "in place nothing can be left out" in err


def test_fit_says_that_the_optimizer_is_of_the_whole_net(here, capsys):
    net = model(blocks=3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    saved("net.pth", net, entries={"optimizer": optimizer.state_dict()})
    words = ["convert", "net.pth", "--fit", "net.py:Net", "-o", "out.pth", "-f"]
    assert "--drop-entry optimizer" in cli(capsys, *words)[2]
    assert "--drop-entry" not in cli(capsys, *words, "--drop-entry", "optimizer")[2]
    assert "optimizer" not in torch.load("out.pth", weights_only=True)


def test_fit_refuses_what_stays_different_unless_partial(here, capsys):
    state = saved("net.pth", prefix="module.")
    words = ["convert", "net.pth", "--fit", "net.py:Net", "--model-arg", "num_classes=10"]
    status, _, err = cli(capsys, *words, "-o", "out.pth")
    assert status == 1
    assert "4 mismatched (fc.weight, fc.bias, tied.weight and 1 more); nothing written" in err
    assert not (here / "out.pth").exists()

    status, _, err = cli(capsys, *words, "-o", "out.pth", "--partial")
    assert status == 0
    assert "fc.weight [5, 4] (model [10, 4])" in err
    kept = torch.load("out.pth", weights_only=True)["state_dict"]
    assert list(kept) == [key for key in state if not key.startswith(("fc.", "tied."))]
    net = model(num_classes=10)
    found = net.load_state_dict(kept, strict=False)
    assert found.unexpected_keys == []
    assert found.missing_keys == ["fc.weight", "fc.bias", "tied.weight", "tied.bias"]


def test_fit_with_something_missing(here, capsys):
    net = model()
    state = net.state_dict()
    del state["stem.weight"]
    torch.save(state, "net.pth")
    status, _, err = cli(capsys, "convert", "net.pth", "--fit", "net.py:Net", "-o", "out.pth")
    assert status == 1
    assert "1 missing (stem.weight)" in err
    status, _, err = cli(
        capsys, "convert", "net.pth", "--fit", "net.py:Net", "-o", "out.pth", "--partial"
    )
    assert status == 0
    assert "1 of its keys are not in the output: stem.weight" in err


def test_fit_of_nothing_at_all(here):
    torch.save({"other": torch.zeros(77)}, "net.pth")
    for partial in (False, True):
        with pytest.raises(DoesNotFit):
            ckptool.convert("net.pth", "out.pth", fit=model(), partial=partial)
    assert not (here / "out.pth").exists()


def test_fit_takes_the_table_that_fits(here):
    """A GAN: the generator's weights are renamed where they stand; the other net is untouched."""
    other = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).state_dict()
    net = model()
    wrapped = nn.DataParallel(net).state_dict()
    torch.save({"netD": other, "netG": wrapped}, "gan.pth")
    found = ckptool.inspect("gan.pth", model="net.py:Net")
    assert found.fit.cause.table == ("netG",)
    ckptool.convert("gan.pth", "out.pth", fit="net.py:Net")
    assert equal(loads(model(), "out.pth", at="netG"), net)
    kept = torch.load("out.pth", weights_only=True)["netD"]
    assert list(kept) == list(other)
    assert all(torch.equal(other[key], value) for key, value in kept.items())


def test_fit_brings_another_table_out_bare(here):
    """The weights are of another net; what fits are the averaged ones beside them."""
    net = model()
    entries = {"ema": nn.DataParallel(net).state_dict()}
    torch.save({"state_dict": model(blocks=3, num_classes=7).state_dict(), **entries}, "net.pth")
    ckptool.convert("net.pth", "out.pth", fit="net.py:Net")
    assert equal(loads(model(), "out.pth", at=None), net)


def test_fit_keeps_other_options(here):
    net = model()
    saved("net.pth", net, prefix="module.")
    ckptool.convert("net.pth", "out.pth", fit=net, dtype="float16", drop_entry="epoch", to_cpu=True)
    found = torch.load("out.pth", weights_only=True)
    assert list(found) == ["state_dict"]
    assert list(found["state_dict"]) == list(net.state_dict())
    assert found["state_dict"]["fc.weight"].dtype is torch.float16


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "net.pth", "--fit", "net.py:Net", "--strip-module", "-o", "o.pth"],
        ["convert", "net.pth", "--partial", "-o", "o.pth"],
        ["convert", "net.pth", "--model-arg", "a=1", "-o", "o.pth"],
        ["convert", "net.pth", "--fit", "net.py:Net", "--model-arg", "a", "-o", "o.pth"],
        ["convert", "net.pth", "--fit", "net.py:Nix", "-o", "o.pth"],
        ["inspect", "net.pth", "--model", "net.py:Net", "--against", "net.pth"],
        ["inspect", "net.pth", "--model-arg", "a=1"],
        ["inspect", "net.pth", "--model", "nix.py:Net"],
        ["inspect", "net.pth", "--model", "net.py:Net", "--at", "nix"],
    ],
)
def test_wrong_words_are_exit_2(here, capsys, words):
    saved("net.pth")
    status, out, err = cli(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("ckptool: ")
    assert "Traceback" not in err


def test_several_files_are_asked_by_one_model(here, capsys):
    saved("a.pth")
    saved("b.pth", prefix="module.")
    status, out, _ = cli(capsys, "inspect", "a.pth", "b.pth", "--model", "net.py:Net", "--json")
    assert status == 1
    assert [row["match"]["fits"] for row in json.loads(out)] == [True, False]


def test_hostile_names_reach_no_screen(here, capsys):
    torch.save({"\x1b[31mred": torch.zeros(1), "\u202ex": torch.zeros(1)}, "net.pth")
    _, out, err = cli(capsys, "inspect", "net.pth", "--model", "net.py:Net")
    assert "\x1b" not in out + err
    assert "\u202e" not in out + err


def test_errors_name_the_file(here):
    (here / "bad.pth").write_bytes(b"nothing")
    with pytest.raises(CkptError) as caught:
        ckptool.inspect("bad.pth", model=model())
    assert caught.value.path == "bad.pth"


STRANGE = """
from net import Net


class Raises(Net):
    def _load_from_state_dict(self, state_dict, *rest):
        raise LookupError("asks a server")


class Reads(Net):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        float(state_dict[prefix + "fc.bias"].sum())
        super()._load_from_state_dict(state_dict, prefix, *rest)
"""


def test_hooks_that_cannot_be_run_are_said_and_never_called_a_fit(here, capsys):
    (here / "strange.py").write_text(STRANGE)
    saved("a.pth")
    saved("b.pth", prefix="module.")
    status, out, _ = cli(capsys, "inspect", "a.pth", "--model", "strange.py:Raises")
    assert status == 1
    assert out.splitlines()[0] == "a.pth at 'state_dict' against strange.Raises(): not known"
    assert "asks a server" in out
    status, out, _ = cli(
        capsys, "inspect", "b.pth", "a.pth", "--model", "strange.py:Reads", "--json"
    )
    found = json.loads(out)
    assert status == 1
    assert [row["match"]["fits"] for row in found] == [False, True]
    assert all("hooks-on-zeros" in [n["slug"] for n in row["notes"]] for row in found)


def test_objects_of_a_package_that_is_not_here_can_be_left_behind(here, capsys):
    net = model()
    kind = type("Hparams", (), {})
    with absent("acme.lightning", Hparams=kind):
        hparams = kind()
        hparams.lr = 0.1
        saved("net.pth", net, entries={"hparams": hparams}, prefix="module.")
    _, out, _ = cli(capsys, "inspect", "net.pth", "--model", "net.py:Net", "--json")
    note = next(n for n in json.loads(out)["notes"] if n["slug"] == "foreign-beside")
    assert "acme.lightning.Hparams" in note["text"]
    words = shlex.split(note["command"])
    assert cli(capsys, *words[1:])[0] == 0
    assert equal(loads(model(), words[-1], at=None), net)
