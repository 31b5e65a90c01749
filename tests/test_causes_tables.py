"""Which state_dict of a file, and the flags that are true for the whole file."""

from __future__ import annotations

import shlex

import pytest
import torch
from causes_support import (
    VGG,
    Inside,
    ResNet,
    Transformer,
    loads,
    mended,
    prefixed,
    randomized,
    rekeyed,
    table_of,
    wanted_of,
)  # fmt: skip
from torch import nn
from verbs_support import cli, load

import ckptool
from ckptool.causes import explain
from ckptool.checkpoint import Match
from ckptool.keynames import Rule

A, B = randomized(VGG(), 1), randomized(VGG(), 2)
OTHER = randomized(Transformer(), 3)


def asked(model, weights=0, at=None, **tables):
    rows = [table_of(state, (name,)) for name, state in tables.items()]
    return explain(wanted_of(model), rows, weights, at=at)


def plain(model):
    return model.state_dict()


def wrapped(model):
    return prefixed(model.state_dict(), "module.")


def test_the_default_table_is_taken_where_it_fits():
    cause = asked(A, state_dict=plain(A), ema=plain(B))
    assert (cause.table, cause.rules, cause.options) == (("state_dict",), (), "")
    assert cause.choices == ()
    assert cause.match.fits
    assert cause.match.cause == cause.sentence == "all 41 keys match"


def test_the_default_table_with_a_rule_comes_before_another_without():
    """The EMA of timm: it is not what one asked for, whatever its names are."""
    cause = asked(A, state_dict=wrapped(A), ema=plain(B))
    assert (cause.table, cause.options) == (("state_dict",), "--strip-module")
    assert asked(A, state_dict=wrapped(A), ema=wrapped(B)).options == "--strip-module"
    gan = asked(A, state_dict=wrapped(A), discriminator=wrapped(OTHER))
    assert gan.options == "--at state_dict --strip-module"  # asked of the one alone


def test_the_table_that_fits_is_taken_where_the_default_one_does_not():
    cause = asked(OTHER, generator=plain(A), discriminator=plain(OTHER))
    assert (cause.table, cause.options) == (("discriminator",), "--select discriminator")
    assert cause.sentence == "all 52 keys match in the state_dict at 'discriminator'"
    assert cause.rules == ()
    assert cause.after.fits
    assert not cause.match.fits
    assert cause.match.loaded == ()


def test_another_table_and_a_rule():
    cause = asked(OTHER, generator=plain(A), discriminator=wrapped(OTHER))
    assert cause.table == ("discriminator",)
    assert cause.options == "--select discriminator --strip-module"
    assert loads(OTHER, mended(cause, wrapped(OTHER)))


def test_two_other_tables_that_fit_alike_are_not_guessed_between():
    cause = asked(A, generator=plain(OTHER), student=wrapped(A), teacher=wrapped(B))
    assert (cause.rules, cause.options, cause.table) == ((), "", ("generator",))
    assert (
        cause.sentence
        == "the state_dicts at 'student', 'teacher' fit equally well: name the one to take"
    )
    assert cause.choices == (
        "--select student --strip-module: all 41 keys match after removing 'module.'",
        "--select teacher --strip-module: all 41 keys match after removing 'module.'",
    )
    assert cause.after == cause.match


def test_a_table_that_is_named_is_the_only_one():
    tables = {"state_dict": wrapped(A), "ema": plain(B)}
    assert asked(A, at=("ema",), **tables).sentence == "all 41 keys match"
    named = asked(A, at=("state_dict",), **tables)
    assert named.table == ("state_dict",)
    assert named.rules == (Rule("strip-module"),)
    gone = asked(A, at=("nothing", 3), **tables)
    assert gone.sentence == "the file holds no state_dict at 'nothing.3'"
    assert len(gone.match.missing_keys) == 36  # torch forgives five counters


def test_a_file_without_weights():
    cause = explain(wanted_of(A), [], None)
    assert cause.sentence == "the file holds no state_dict"
    assert (cause.rules, cause.table, cause.after) == ((), (), cause.match)


def test_two_parts_of_one_table_are_not_guessed_between():
    state = {**prefixed(plain(A), "student."), **prefixed(plain(B), "teacher.")}
    cause = asked(A, state_dict=state)
    assert (cause.rules, cause.options) == ((), "")
    assert cause.choices == (
        "--only 'student.**' --strip-prefix student.: 41 of 41 keys match",
        "--only 'teacher.**' --strip-prefix teacher.: 41 of 41 keys match",
    )
    assert "name the one to take" in cause.sentence


def test_two_places_in_the_model_are_not_guessed_between():
    model = Inside("encoder_q", VGG(), encoder_k=VGG())
    cause = asked(model, state_dict=plain(A))
    assert cause.rules == ()
    assert [choice.split(":")[0] for choice in cause.choices] == [
        "--add-prefix encoder_q.", "--add-prefix encoder_k.",
    ]  # fmt: skip


def test_no_table_is_touched_that_is_not_meant():
    """The backbone's prefix is the discriminator's too; the part that is taken would empty it."""
    detector = prefixed(plain(A), "backbone.")
    detector["neck.weight"] = torch.ones(3)
    cause = asked(A, state_dict=detector, discriminator=plain(OTHER))
    assert cause.options == "--at state_dict --only 'backbone.**' --strip-prefix backbone."
    alone = asked(A, state_dict=detector)
    assert alone.options == "--only 'backbone.**' --strip-prefix backbone."


def test_two_tables_of_one_dotted_path_cannot_be_named():
    rows = [table_of(plain(A), ("net",)), table_of(plain(OTHER), ("a.b",)),
            table_of(plain(A), ("a", "b"))]  # fmt: skip
    cause = explain(wanted_of(OTHER), rows, 0)
    assert cause.table == ("a.b",)
    assert cause.options == ""


def test_a_path_for_a_shell():
    cause = asked(OTHER, **{"generator": plain(A), "my nets; ls": plain(OTHER)})
    assert shlex.split(cause.options) == ["--select", "my nets; ls"]


def test_hundreds_of_tables():
    rows = [
        table_of(prefixed(plain(nn.Linear(2, i % 7 + 1)), f"{i}."), (f"t{i}",)) for i in range(300)
    ]
    rows.append(table_of(wrapped(OTHER), ("right",)))
    cause = explain(wanted_of(OTHER), rows, 0)
    assert cause.table == ("right",)


def test_tensors_without_a_state_dict_are_no_other_table():
    rows = [table_of(plain(A), ("net",)), table_of(plain(OTHER))._replace(kind="tensors")]
    assert explain(wanted_of(OTHER), rows, 0).table == ("net",)


# -- through the command -----------------------------------------------------------------------
def files(case):
    """What the file holds, the model, and where the result stands."""
    detector = prefixed(plain(A), "backbone.")
    detector["neck.weight"] = torch.ones(3)
    counters = rekeyed(plain(A), str)
    for name, _ in A.named_modules():
        counters[f"{name}.total_ops".lstrip(".")] = torch.zeros(1, dtype=torch.float64)
    fine = randomized(ResNet())
    bare = ResNet()
    bare.fc = nn.Identity()
    return {
        "default": ({"state_dict": wrapped(A), "ema": plain(B)}, A, ("state_dict",)),
        "twins": ({"state_dict": wrapped(A), "ema": wrapped(B)}, A, ("state_dict",)),
        "other": ({"generator": plain(A), "discriminator": wrapped(OTHER)}, OTHER, ()),
        "detector": ({"state_dict": detector, "ema": plain(OTHER)}, A, ("state_dict",)),
        "counters": (counters, A, ()),
        "head less": ({"net": plain(fine), "epoch": 3}, bare, ("net",)),
        "adding": ({"net": plain(fine), "gan": plain(A)}, Inside("x", fine), ("net",)),
        "averaged": (torch.optim.swa_utils.AveragedModel(A).state_dict(), A, ()),
    }[case]


CASES = ("default", "twins", "other", "detector", "counters", "head less", "adding", "averaged")


@pytest.mark.parametrize("case", CASES)
def test_the_flags_make_a_file_that_loads(case, tmp_path, capsys):
    data, model, place = files(case)
    torch.save(data, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as file:
        cause = explain(wanted_of(model), file.tables, file._checkpoint.weights)
        untouched = {
            t.path: [x.key for x in t.tensors] for t in file.tables if t.path != cause.table
        }
    assert cause.after.fits
    words = shlex.split(cause.options)
    status, _, err = cli(capsys, "convert", tmp_path / "in.pth", *words, "-o", tmp_path / "out.pth")
    assert status == 0, err
    made = load(tmp_path / "out.pth")
    state = made
    for name in place:
        state = state[name]
    assert loads(model, state)
    assert list(state) == list(cause.after.loaded)
    if case in ("default", "detector", "adding"):
        for (name,), keys in untouched.items():
            assert list(made[name]) == keys


def test_a_match_says_its_cause_and_leaves_the_command_to_others():
    cause = asked(A, state_dict=wrapped(A))
    assert isinstance(cause.match, Match)
    assert cause.match.cause == cause.sentence
    assert cause.match.fix is None
    assert cause.after.cause == ""
