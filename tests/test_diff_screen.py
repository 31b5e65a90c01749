"""What `ckptool diff` prints, as text, as JSON and as an exit status; nothing heavy for it."""

from __future__ import annotations

import json
import os
from collections import OrderedDict

import pytest
import torch
from diff_support import (
    cast,
    diff,
    prefixed,
    training,
    tuned_pair,
    write_package,
    write_safetensors,
    write_zip,
)
from verbs_support import FIXTURES, cli, run

import ckptool
from ckptool import journals
from ckptool.places import open_source
from ckptool.render.diff import diff_text
from ckptool.render.diff_rollup import rows

BASE, TUNED = tuned_pair()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("screen")
    return (
        write_zip(folder / "base", training(prefixed(BASE, "module."), 90, 0.1), "cuda:0"),
        write_zip(folder / "tuned", training(TUNED, 12, 0.1)),
    )


# -- the screen --------------------------------------------------------------------------------
def test_the_screen_of_a_fine_tune(pair, capsys):
    status, out, err = cli(capsys, "diff", *pair)
    assert (status, err) == (1, "")
    assert (
        out
        == """\
compared after: strip 'module.' from base.pth; device cuda:0 -> cpu
  = conv1, bn1, layer1-2, layer3.0.weight, layer3.1, emb, out  20 tensors, equal
  ! layer3.0.bias  [6] differs from [2] on, NaN on one side there
  ! layer4.*       4 tensors drifted
  ! fc.weight      [10, 6] -> [3, 6], replaced
  ! fc.bias        [10] -> [3], replaced
  + extra.scale    [2] float32
  ! epoch          90 -> 12
differ: 20 same, 5 changed, 2 reshaped, 1 added, 0 removed, 1 value (20 by stored checksums, not read; --bytes proves it)
"""
    )


def test_distances_on_the_screen(pair, capsys):
    _, out, _ = cli(capsys, "diff", *pair, "--values", "--bytes")
    lines = out.splitlines()
    assert (
        lines[2]
        == "  ! layer3.0.bias  [6] drifted, 1 of 6 elements, NaN 0 -> 1 (on one side only at [2])"
    )
    gap = max(float((BASE[k] - TUNED[k]).abs().max()) for k in BASE if k.startswith("layer4."))
    cosines = [float(torch.cosine_similarity(BASE[k].double().flatten(), TUNED[k].double().flatten(), dim=0))
               for k in BASE if k.startswith("layer4.") and BASE[k].norm()]  # fmt: skip
    mean = sum(cosines) / len(cosines)
    assert (
        lines[3]
        == f"  ! layer4.*       4 tensors drifted, max |d| {gap:.1e}, mean cosine {mean:.6f}"
    )
    assert lines[-1] == "differ: 20 same, 5 changed, 2 reshaped, 1 added, 0 removed, 1 value"


def test_one_tensor_with_its_distances(tmp_path, capsys):
    same = {"x": torch.ones(1)}
    a = write_zip(tmp_path / "a", {"w": torch.tensor([1.0, 2, 4]), "n": torch.tensor([3]), **same})
    b = write_zip(
        tmp_path / "b", {"w": torch.tensor([1.0, 2.5, 4]), "n": torch.tensor([5]), **same}
    )
    _, out, _ = cli(capsys, "diff", a, b, "--values")
    assert out.splitlines()[2:4] == [
        "  ! w  [3] drifted, 1 of 3 elements, max |d| 5.0e-01, rel 2.0e-01, cosine 0.995638, L2 5.0e-01",
        "  ! n  [1] drifted, 1 of 1 element, max |d| 2, rel 4.0e-01, cosine 1.000000, L2 2.0e+00",
    ]


def test_same_by_checksums_and_by_bytes(pair, tmp_path, capsys):
    clone = write_zip(tmp_path / "clone", training(BASE, 90, 0.1))
    status, out, _ = cli(capsys, "diff", pair[0], clone)
    assert status == 0
    assert out == (
        "same tensors after: strip 'module.' from base.pth; device cuda:0 -> cpu\n"
        "  = all  27 tensors, equal\n"
        "same by stored checksums (not read; --bytes proves it): 27 tensors, 3 values\n"
    )
    status, out, _ = cli(capsys, "diff", pair[0], clone, "--bytes")
    assert (status, out.splitlines()[-1]) == (0, "same: 27 tensors, 3 values")
    status, out, _ = cli(capsys, "diff", pair[0], clone, "--strict")
    assert status == 1
    assert "  ! all  27 tensors cuda:0 -> cpu" in out
    assert out.splitlines()[-1].startswith(
        "differ: 0 same, 27 changed, 0 reshaped, 0 added, 0 removed, other names"
    )


def test_two_precisions_on_the_screen(pair, tmp_path, capsys):
    half = write_zip(tmp_path / "half", training(cast(BASE, torch.float16), 90, 0.1))
    status, out, _ = cli(capsys, "diff", pair[0], half)
    first, equal, cast_line, last = out.splitlines()
    assert status == 1
    assert (
        first
        == "same tensors up to float16 rounding, after: strip 'module.' from base.pth; device cuda:0 -> cpu"
    )
    assert equal == "  = bn1.num_batches_tracked  1 tensor, equal"
    assert cast_line.endswith(
        " and 1 more  26 tensors float32 -> float16 (same up to float16 rounding)"
    )
    assert last.startswith("differ: 1 same, 26 changed")


def test_a_container_of_tensors_alone_and_the_way_to_leave_the_rest_out(pair, tmp_path, capsys):
    b = write_safetensors(tmp_path / "net", training(BASE, 90, 0.1))
    status, out, _ = cli(capsys, "diff", pair[0], b)
    assert status == 1
    assert "  - epoch  90\n  - args   2 values\n" in out
    command = out.splitlines()[-1].strip()
    assert command == f"ckptool diff {pair[0]} {b} --at state_dict"
    status, out, _ = cli(capsys, *command.split()[1:])
    assert status == 0
    assert "container PyTorch zip -> safetensors" in out


def test_limit_and_verbose(pair, capsys):
    _, out, _ = cli(capsys, "diff", *pair, "--limit", "2")
    assert out.splitlines()[3:5] == [
        "  … 5 more rows",
        "differ: 20 same, 5 changed, 2 reshaped, 1 added, 0 removed, 1 value (20 by stored checksums, not read; --bytes proves it)",
    ]
    _, out, _ = cli(capsys, "diff", *pair, "-v")
    assert [line.split()[1] for line in out.splitlines()[1:-3]].count("layer4.1.bias") == 1
    assert sum(line.startswith("  = ") for line in out.splitlines()) == 20


@pytest.mark.parametrize("flags", [[], ["--bytes"], ["--values"]])
def test_quiet_says_it_by_the_exit_status_alone(flags, pair, capsys):
    assert cli(capsys, "diff", "-q", *pair, *flags) == (1, "", "")
    assert cli(capsys, "diff", "-q", pair[0], pair[0], *flags) == (0, "", "")


def test_quiet_stops_at_the_first_difference(tmp_path, monkeypatch, capsys):
    from ckptool.verbs.diff_values import Comparer

    asked = []
    before = Comparer.compare
    monkeypatch.setattr(
        Comparer,
        "compare",
        lambda self, a, b, *more: asked.append(a.key) or before(self, a, b, *more),
    )
    one = {f"l{n}.w": torch.zeros(3) for n in range(9)}
    a = write_zip(tmp_path / "a", one)
    b = write_zip(tmp_path / "b", {key: t + (key > "l3") for key, t in one.items()})
    assert cli(capsys, "diff", "-q", a, b)[0] == 1
    assert asked == ["l0.w", "l1.w", "l2.w", "l3.w"]
    asked.clear()
    c = write_zip(tmp_path / "c", {**one, "more": torch.ones(1)})
    assert cli(capsys, "diff", "-q", a, c)[0] == 1
    assert asked == []


def test_trouble_is_two(tmp_path, pair, capsys):
    for args in (
        ("gone.pth", pair[0]), (pair[0], FIXTURES / "html.pth"), (pair[0], pair[1], "--atol", "-1"),
        (pair[0], pair[1], "--at", "nowhere"), (pair[0],),
    ):  # fmt: skip
        status, out, err = cli(capsys, "diff", *args)
        assert (status, out) == (2, "")
        assert err
    status, out, err = cli(capsys, "diff", pair[0], pair[1], "--unwrap", "--strip-prefix", "no.")
    assert (status, out) == (1, "")
    assert "--strip-prefix no. matches no key" in err
    status, out, _ = cli(capsys, "diff", pair[0], FIXTURES / "lfs.pth", "--json")
    assert (status, json.loads(out)["error"]["slug"]) == (2, "not-a-checkpoint")


def test_names_from_a_file_are_shown_safely(tmp_path, capsys):
    evil = "a\x1b[31m\u202eb"
    a = write_zip(tmp_path / "a", {evil: torch.ones(2), f"{evil}.x.w": torch.ones(1), "note": evil})
    b = write_zip(tmp_path / "b", {evil: torch.ones(3), "c": torch.ones(2), "note": "x\ny"})
    for flags in ([], ["-v"], ["--values"], ["--strict"], ["--json"]):
        status, out, _ = cli(capsys, "diff", a, b, *flags)
        assert status == 1
        assert "\x1b" not in out
        assert "\u202e" not in out


# -- rollup ------------------------------------------------------------------------------------
def told(*states, alone=()):
    """[(name, how many, state)] of keys given as `name=state`."""
    found = rows([tuple(word.split("=")) for word in states], alone)
    return [(row.name, len(row.keys), row.state) for row in found]


def test_whole_modules_of_one_state_are_one_row():
    assert told("a.w=s", "a.b=s", "b.w=s", "b.b=d") == [
        ("a", 2, "s"),
        ("b.w", 1, "s"),
        ("b.b", 1, "d"),
    ]
    assert told("a.w=s", "b=s") == [("all", 2, "s")]
    assert told("a=s") == [("a", 1, "s")]
    assert told() == []


def test_numbered_siblings_of_one_state_are_a_range():
    states = [f"l{n}.w={'s' if n < 4 else 'd'}" for n in range(6)]
    assert told(*states) == [("l0-3", 4, "s"), ("l4-5", 2, "d")]
    assert told("h.0.w=s", "h.1.w=s", "h.2.w=d", "h.3.w=s") == [
        ("h.0-1", 2, "s"),
        ("h.2", 1, "d"),
        ("h.3", 1, "s"),
    ]
    assert told("x1.w=s", "x3.w=s", "y=d") == [("x1", 1, "s"), ("x3", 1, "s"), ("y", 1, "d")]
    assert told("a1.w=s", "b2.w=s", "y=d") == [("a1", 1, "s"), ("b2", 1, "s"), ("y", 1, "d")]


def test_states_that_stand_alone_are_never_folded():
    assert told("fc.w=r", "fc.b=r", alone="r") == [("fc.w", 1, "r"), ("fc.b", 1, "r")]
    assert told("f0.w=r", "f1.w=r", "g=s", alone="r") == [
        ("f0", 1, "r"),
        ("f1", 1, "r"),
        ("g", 1, "s"),
    ]


def test_a_key_that_is_a_module_too_and_names_without_end():
    assert told("a=s", "a.b=d", "a.c=d") == [("a", 1, "s"), ("a.b", 1, "d"), ("a.c", 1, "d")]
    deep = ".".join("x" * 5000)
    assert [row.keys for row in rows([(deep, "s"), (deep + "y", "d")])] == [(deep,), (deep + "y",)]
    assert told("=s", ".=d", "..=d")[0] == ("", 1, "s")


def test_every_key_is_in_one_row():
    keys = [f"{a}{n}.{b}" for a in "xyz" for n in range(5) for b in ("w", "b", "c.d")]
    states = [(key, hash(key) % 3) for key in keys]
    found = rows(states)
    assert sorted(key for row in found for key in row.keys) == sorted(keys)
    assert all(dict(states)[key] == row.state for row in found for key in row.keys)


# -- JSON and Python ---------------------------------------------------------------------------
def test_json_has_the_promised_keys(pair, capsys):
    status, out, _ = cli(capsys, "diff", *pair, "--values", "--json")
    found = json.loads(out)
    assert status == 1
    assert (found["schema"], found["same"], found["evidence"]) == (1, False, "crc")
    assert found["explained_by"] == ["strip 'module.' from base.pth", "device cuda:0 -> cpu"]
    assert (found["equal_count"], found["added"], found["removed"]) == (20, ["extra.scale"], [])
    rows_by_key = {row["key"]: row for row in found["changed"]}
    assert rows_by_key["fc.bias"]["what"] == ["shape"]
    assert rows_by_key["fc.bias"]["max_abs"] is None
    one = rows_by_key["layer4.0.bias"]
    gap = (BASE["layer4.0.bias"] - TUNED["layer4.0.bias"]).abs()
    assert one["what"] == ["value"]
    assert one["max_abs"] == pytest.approx(float(gap.max()), rel=1e-6)
    assert one["max_rel"] == pytest.approx(
        float((gap / TUNED["layer4.0.bias"].abs()).max()), rel=1e-5
    )
    assert one["differing_count"] == 6
    assert rows_by_key["layer3.0.bias"]["nan_at"] == [[2]]
    (extra,) = found["extras"]
    assert (extra["path"], extra["change"], extra["a"], extra["b"]) == (
        ["epoch"],
        "changed",
        90,
        12,
    )
    assert found["notes"] == []


def test_the_python_function_says_the_same(pair, capsys):
    found = ckptool.diff(*pair, values=True)
    _, out, _ = cli(capsys, "diff", *pair, "--values")
    assert str(found) + "\n" == out
    assert isinstance(found, ckptool.Diff)
    assert not found.same
    assert found._repr_html_() == f"<pre>{out[:-1]}</pre>".replace("'", "&#x27;").replace(
        "->", "-&gt;"
    )
    with open(pair[0], "rb") as one, open(pair[1], "rb") as two:
        assert [row.key for row in ckptool.diff(one, two).changed] == [
            row.key for row in found.changed
        ]
    with pytest.raises(ckptool.CkptError):
        ckptool.diff(pair[0], "gone.pth")


def test_progress_counts_every_byte(pair):
    told = []
    ckptool.diff(*pair, progress=lambda done, total: told.append((done, total)))
    assert (
        told[-1][0]
        == told[-1][1]
        == sum(t.numel() * t.element_size() for k, t in BASE.items() if t.shape == TUNED[k].shape)
    )
    assert told == sorted(told)


def test_a_text_of_bare_data(pair):
    data = json.loads(json.dumps(diff(*pair).to_dict()))
    assert diff_text(data) == str(diff(*pair))


# -- folders and files that change -------------------------------------------------------------
def test_a_folder_and_its_index_are_files(tmp_path):
    a = write_zip(tmp_path / "a", BASE)
    ckptool.convert(a, tmp_path / "shards", to="shards", max_shard_size=400, fsync=False)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    assert len(os.listdir(tmp_path / "shards")) == 6
    for place in (tmp_path / "shards", index):
        assert diff(a, place).same
        assert diff(place, place, values=True, bytes=True).same
        assert not diff(place, write_package(tmp_path / "t", TUNED)).same


def test_a_file_that_changes_meanwhile_is_no_answer(tmp_path):
    one = OrderedDict(a=torch.zeros(4), b=torch.zeros(5))
    a, b = (
        write_zip(tmp_path / "a", one),
        write_zip(tmp_path / "b", {"a": torch.ones(4), "b": torch.zeros(5)}),
    )
    stamp = os.stat(b)

    def touch(done, total):
        os.utime(b, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))

    with pytest.raises(ckptool.CkptError, match="changed while it was read"):
        diff(a, b, progress=touch)


def test_a_pending_edit_is_read_up_to_the_former_end_and_said(tmp_path):
    a, b = (write_zip(tmp_path / name, BASE) for name in "ab")
    with open_source(str(b)) as source:
        made = journals.Journal(str(b), journals.facts(source, source.size))
    made.place(fsync=False)
    with open(b, "ab") as f:
        f.write(b"half of an edit")
    for options in ({}, {"bytes": True}, {"values": True}):
        found = diff(a, b, **options)
        assert found.same
        assert [note.slug for note in found.notes] == ["pending-journal"]
        assert found.notes[0].text.startswith("b.pth: an in-place edit was interrupted")


# -- what it costs -----------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [[], ["--json"], ["-q"], ["--bytes"]])
def test_no_numpy_and_no_torch_where_nothing_differs(flags, pair):
    code = (
        "import sys; from ckptool.cli.main import main\n"
        f"assert main(['diff', {str(pair[0])!r}, {str(pair[0])!r}, *{flags!r}]) == 0\n"
        "assert not {'torch', 'numpy', 'pickle', 'zipfile', 'safetensors', 'tabulate'} & sys.modules.keys()"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_in_a_process_of_its_own(pair):
    done = run("diff", *pair, "--values")
    assert done.returncode == 1
    assert done.stderr == b""
    assert done.stdout.startswith(b"compared after: strip 'module.'")
