"""convert's key rules, with torch's own nets and functions as the oracle."""

from __future__ import annotations

import pytest
import torch
from fixtures.make_fixtures import Net, save
from torch import nn
from verbs_support import (
    CONVERTIBLE,
    FIXTURES,
    TRUTHS,
    assert_same,
    at,
    cli,
    devices,
    keys,
    left_alone,
    load,
)

import ckptool
from ckptool.errors import (
    CkptError,
    KeyCollision,
    RuleMatchesNothing,
)

# -- names -------------------------------------------------------------------------------------
STRIPPED = sorted(n for n, t in TRUTHS.items() if t.get("keys_after_strip") and n in CONVERTIBLE)
UNWRAPPED = sorted(n for n, t in TRUTHS.items() if t.get("keys_after_unwrap"))


def first_keys(path, name):
    return keys(path, ".".join(TRUTHS[name]["tables"][0]["path"]) or ".")


@pytest.mark.parametrize("name", STRIPPED)
def test_strip_module(name, tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / name, out, strip_module=True)

    assert first_keys(out, name) == TRUTHS[name]["keys_after_strip"]
    assert devices(out) == devices(FIXTURES / name)


@pytest.mark.parametrize("name", UNWRAPPED)
def test_unwrap(name, tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / name, out, unwrap=True)

    assert first_keys(out, name) == TRUTHS[name]["keys_after_unwrap"]
    before, after = load(FIXTURES / name), load(out)
    path = tuple(TRUTHS[name]["tables"][0]["path"])
    old = list(at(before, path))
    assert_same(before, after, {path: dict(zip(old, at(after, path), strict=True))})


@pytest.mark.parametrize("name", [n for n in STRIPPED if n != "partial_prefix.pth"])
def test_add_module_after_strip_restores_the_keys(name, tmp_path):
    if name == "ema.pth":
        pytest.skip("its second table had no module. before")
    bare, back = tmp_path / "bare.pth", tmp_path / "back.pth"
    ckptool.convert(FIXTURES / name, bare, strip_module=True)
    ckptool.convert(bare, back, add_module=True)

    for table in TRUTHS[name]["tables"]:
        where = ".".join(table["path"]) or "."
        assert keys(back, where) == keys(FIXTURES / name, where)


def test_add_module_makes_what_data_parallel_has(tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / "net_plain.pth", out, add_module=True)
    sd = load(out)
    wrapped = nn.DataParallel(Net(3))

    assert wrapped.load_state_dict(sd, strict=True)
    assert [k for k in sd._metadata if k] == [k for k in wrapped.state_dict()._metadata if k]


def test_add_module_at_is_the_inverse_of_unwrap_at(tmp_path):
    plain, back = tmp_path / "plain.pth", tmp_path / "back.pth"
    name = FIXTURES / "features_module.pth"
    ckptool.convert(name, plain, unwrap_at=["features"])
    ckptool.convert(plain, back, add_module_at=["features"])

    assert keys(plain) == TRUTHS["features_module.pth"]["keys_after_unwrap"]
    before, after = load(name)["state_dict"], load(back)["state_dict"]
    assert list(after._metadata) == [path for path in before._metadata if path != "features"]
    before._metadata = after._metadata  # the wrapper's own entry has no keys to come back with
    assert_same(before, after)


def test_rules_run_in_the_order_of_the_line(tmp_path, capsys):
    save({"a.w": torch.ones(1), "b.w": torch.ones(1)}, tmp_path / "net.pth")
    first = ["--add-module-at", "a", "--add-module"]
    second = ["--add-module", "--add-module-at", "module.a"]
    for i, flags in enumerate((first, second)):
        out = tmp_path / f"{i}.pth"
        assert cli(capsys, "convert", tmp_path / "net.pth", *flags, "-o", out)[0] == 0
        assert keys(out) == ["module.a.module.w", "module.b.w"]


def test_a_partial_prefix_is_left_alone_and_named(copy):
    path = copy("partial_prefix.pth")
    done = ckptool.convert(path, to_cpu=True)
    (note,) = (note for note in done.notes if note.slug == "partial-prefix")

    assert "2 of 4 keys" in note.text
    assert "--strip-module" in note.command
    assert done.renames == {}
    assert keys(done.output) == keys(path)


def test_two_keys_that_become_one_are_refused(copy, tmp_path):
    path = copy("collision.pth")
    for options in ({"strip_module": True}, {"unwrap": True, "strip_module": True}):
        with pytest.raises(KeyCollision) as caught:
            ckptool.convert(path, tmp_path / "out.pth", **options)
    assert "'module.w' and 'w' would both become 'w'" in str(caught.value)
    assert "--drop 'module.w'" in (caught.value.hint or "")
    left_alone(tmp_path, path.name)


def test_the_hint_names_only_flags_that_convert_has(copy, tmp_path, capsys):
    path = copy("collision.pth")
    help_text = cli(capsys, "convert", "--help")[1]
    _, _, err = cli(capsys, "convert", path, "--strip-module", "-o", tmp_path / "out.pth")

    flags = {word.strip("',;:.") for word in err.split() if word.startswith("--")}
    assert {flag for flag in flags if flag not in help_text} == set()


NO_MATCH = [
    ["--strip-module"],
    ["--unwrap"],
    ["--unwrap-at", "features"],
    ["--add-module-at", "nowhere"],
    ["--to-cpu", "--strip-module"],
    ["--map-location", "cuda:9", "cpu"],
]


@pytest.mark.parametrize("flags", NO_MATCH, ids=" ".join)
def test_an_explicit_rule_that_matches_nothing_says_no(flags, tmp_path, capsys):
    out = tmp_path / "out.pth"
    status, stdout, err = cli(capsys, "convert", FIXTURES / "net_plain.pth", *flags, "-o", out)

    assert (status, stdout) == (1, "")
    assert "nothing written" in err
    left_alone(tmp_path)


def test_rules_of_two_only_one_of_which_matches_say_no(tmp_path):
    with pytest.raises(RuleMatchesNothing, match="unwrap-at nowhere"):
        ckptool.convert(
            FIXTURES / "features_module.pth", tmp_path / "o", unwrap_at=["features", "nowhere"]
        )
    left_alone(tmp_path)


def test_at_limits_the_names(tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / "gan.pth", out, strip_module=True, at=["netG"])

    assert keys(out, "netG") == TRUTHS["gan.pth"]["keys_after_strip"]
    assert keys(out, "netD") == keys(FIXTURES / "gan.pth", "netD")
    with pytest.raises(CkptError, match="no state_dict at 'netX'"):
        ckptool.convert(FIXTURES / "gan.pth", tmp_path / "o", strip_module=True, at=["netX"])


def test_each_table_is_judged_by_its_own_keys(tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / "ema.pth", out, to_cpu=True)

    assert keys(out, "state_dict") == keys(out, "state_dict_ema")


def test_names_of_an_optimizer_follow(tmp_path):
    net = nn.DataParallel(Net())
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "module.conv.weight"
    path = tmp_path / "net.pth"
    save({"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(),
          "others": ["module.conv.weight"]}, path)  # fmt: skip
    ckptool.convert(path, to_cpu=True)
    made = load(tmp_path / "net.cpu.pth")

    names = [name for name, _ in Net().named_parameters()]
    assert made["optimizer"]["param_groups"][0]["param_names"] == names
    assert made["others"] == ["module.conv.weight"]


def test_entries_that_do_not_count_go_along(tmp_path):
    path = tmp_path / "net.pth"
    save({"n_averaged": torch.tensor(3), "module.w": torch.ones(2)}, path)
    ckptool.convert(path, to_cpu=True)

    assert keys(tmp_path / "net.cpu.pth") == ["n_averaged", "w"]
