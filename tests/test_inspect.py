"""inspect: exact facts, notes whose commands mend, every way to select and to print."""

from __future__ import annotations

import shlex

import pytest
import torch
from fixtures.make_fixtures import Net, save
from torch import nn
from verbs_support import FIXTURES, TRUTHS, cli

import ckptool
from ckptool.errors import UsageError

DP_CUDA = FIXTURES / "dp_cuda.pth"
OPENS = sorted(name for name, truth in TRUTHS.items() if not truth.get("error"))
BROKEN = {name: truth["error"] for name, truth in TRUTHS.items() if truth.get("error")}


def slugs(found):
    return [note.slug for note in found.notes]


def note(found, slug):
    (one,) = (note for note in found.notes if note.slug == slug)
    return one


# -- exact facts -------------------------------------------------------------------------------
def test_the_tutorials_file():
    found = ckptool.inspect(DP_CUDA).to_dict()

    assert (found["format"], found["tensor_count"], found["weights"]) == (
        "torch-zip",
        9,
        ["state_dict"],
    )
    assert found["size_bytes"] == DP_CUDA.stat().st_size
    # conv, bn and fc; the running statistics and the counter are no parameters
    assert found["parameter_count"] == sum(p.numel() for p in Net().parameters())
    assert found["dtypes"] == {"float32": 8, "int64": 1}
    assert found["devices"] == {"cuda:0": 9}
    assert found["wrappers"] == [{"name": "module.", "count": 9, "of": 9}]
    extras = {tuple(row["path"]): row for row in found["extras"]}
    assert extras["epoch",]["value"] == 7
    assert extras["best_acc1",]["value"] == 71.3
    assert extras["args",]["value"] == TRUTHS["dp_cuda.pth"]["extras"]["args"]
    assert "Adam-like, 1 group, 6 parameters" in extras["optimizer",]["text"]
    assert {g["name"]: g["verdict"] for g in found["globals"]}["argparse.Namespace"] == "known"


def test_the_screen_of_the_tutorials_file(capsys):
    status, out, err = cli(capsys, "inspect", DP_CUDA)
    lines = out.splitlines()

    assert (status, err) == (0, "")
    assert lines[0] == (
        f"{DP_CUDA}: PyTorch zip, 9.5 kB, 9 tensors, 51 parameters, "
        "float32 (8), int64 (1), saved on cuda:0"
    )
    assert lines[1] == "  wrappers: 'module.' on 9 of 9 keys"
    assert any(
        line.startswith("  state_dict   9 tensors") and "<- weights" in line for line in lines
    )
    assert any(
        line.split() == ["module.fc.bias", "[3]", "float32", "12", "B", "cuda:0"] for line in lines
    )
    assert "    ckptool convert" in lines[-1]
    assert out.count("ckptool convert") == 2


@pytest.mark.parametrize("name", OPENS)
def test_every_fixture_says_what_torch_says(name):
    found = ckptool.inspect(FIXTURES / name).to_dict()
    truth = TRUTHS[name]

    assert found["format"] == truth["format"]
    tables = {tuple(table["path"]): table for table in found["tables"]}
    for wanted in truth["tables"]:
        rows = tables[tuple(wanted["path"])]["tensors"]
        if truth["format"] == "safetensors":  # the truth is in the order of the net
            wanted["tensors"].sort(key=lambda row: [r["key"] for r in rows].index(row["key"]))
        assert [row["key"] for row in rows] == [row["key"] for row in wanted["tensors"]]
        for row, expected in zip(rows, wanted["tensors"], strict=True):
            for field in ("shape", "dtype", "device", "stride"):
                assert expected[field] is None or row[field] == expected[field], row["key"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_line_and_a_hint(name, capsys):
    status, out, err = cli(capsys, "inspect", FIXTURES / name)

    assert (status, out) == (2, "")
    first, *hint = err.splitlines()
    assert first.startswith(f"ckptool: {FIXTURES / name}: ")
    assert len(hint) <= 1
    assert all(line.startswith("  hint: ") for line in hint)


def test_what_could_run_code_is_named_and_is_a_no(capsys):
    status, out, _ = cli(capsys, "inspect", FIXTURES / "evil.pth")

    assert status == 1
    assert "could run code: posix.system at byte " in out
    assert "conv.weight" in out
    offered = [line for line in out.splitlines() if "ckptool convert" in line]
    assert [line.split()[-1] for line in offered] == [str(FIXTURES / "evil.clean.safetensors")]


# -- notes and their commands ------------------------------------------------------------------
WITH_COMMANDS = sorted(
    name for name in OPENS if any(n.command for n in ckptool.inspect(FIXTURES / name).notes)
)


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_command_of_a_note_mends_the_trouble(name, copy, capsys):
    path = copy(name)
    for told in ckptool.inspect(path).notes:
        if told.command is None:
            continue
        program, *argv = shlex.split(told.command)
        status, _, err = cli(capsys, *argv)
        assert (program, status) == ("ckptool", 0), err
        (made,) = (p for p in path.parent.iterdir() if p != path)
        before, after = ckptool.inspect(path), ckptool.inspect(made)
        again = [n for n in after.notes if (n.slug, n.text) == (told.slug, told.text)]
        assert again == []
        if told.slug not in ("module-prefix", "wrapper", "device-index"):
            assert told.slug not in slugs(after)
        assert [t.count for t in before.checkpoint.tensors] == [
            t.count for t in after.checkpoint.tensors
        ]
        made.unlink()


def test_no_command_is_offered_that_would_be_refused():
    found = ckptool.inspect(FIXTURES / "collision.pth")

    assert note(found, "module-prefix").command is None


def test_a_strange_name_is_quoted_in_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a b.pth", "$(touch x).pth", "it's.pth", "-dash.pth"):
        save(nn.DataParallel(Net()).state_dict(), tmp_path / name, "cuda:0")
        source = name if not name.startswith("-") else f"./{name}"
        command = note(ckptool.inspect(source), "device").command
        assert cli(capsys, *shlex.split(command)[1:])[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["a b.pth", "$(touch x).pth", "it's.pth", "-dash.pth", "a b.cpu.pth",
         "$(touch x).cpu.pth", "it's.cpu.pth", "-dash.cpu.pth"]
    )  # fmt: skip


NOTES = {
    "net_plain.pth": [],
    "net_cuda3.pth": ["device", "device-index"],
    "dp_cuda.pth": ["weights-only", "module-prefix", "device"],
    "mps.pth": ["device"],
    "meta.pth": ["device", "meta"],
    "tied.pth": ["module-prefix", "device", "tied"],
    "views.pth": ["device", "tied"],
    "proto4.pth": ["weights-only", "pickle-protocol", "module-prefix", "device"],
    "big_endian.pth": ["big-endian", "device"],
    "compiled.pth": ["wrapper", "device"],
    "gan.pth": ["module-prefix", "module-prefix", "device", "several-tables"],
    "whole_model.pth": ["whole-model", "weights-only"],
    "evil.pth": ["unsafe-pickle", "device"],
    "namespace_foreign.pth": ["weights-only", "module-prefix", "device"],
    "partial_prefix.pth": ["module-prefix", "device"],
    "features_module.pth": ["wrapper"],
}


@pytest.mark.parametrize("name", NOTES)
def test_which_notes_a_file_has(name):
    found = slugs(ckptool.inspect(FIXTURES / name))

    assert [slug for slug in found if slug in NOTES[name]] == NOTES[name]
    assert set(found) - set(NOTES[name]) <= {"views", "not-tensors", "batch-norm", "no-checksums"}


@pytest.mark.parametrize("name", OPENS)
def test_torch_refuses_by_default_exactly_where_the_note_says_so(name):
    if TRUTHS[name]["format"] not in ("torch-zip", "torch-legacy") or name == "evil.pth":
        return
    try:
        torch.load(FIXTURES / name, map_location="cpu", weights_only=True)
        refused = False
    except Exception as error:
        refused = "Weights only load failed" in str(error)
    said = slugs(ckptool.inspect(FIXTURES / name))

    assert refused == bool({"weights-only", "pickle-protocol", "unsafe-pickle"} & set(said))


# -- which rows --------------------------------------------------------------------------------
def shown(*args, **options):
    return [row.key for row in ckptool.inspect(*args, **options).rows]


def test_only_and_drop():
    assert shown(DP_CUDA, only=["fc"]) == ["module.fc.weight", "module.fc.bias"]
    assert shown(DP_CUDA, only=["bn", "*.weight"], drop=["running_*"]) == [
        "module.bn.weight", "module.bn.bias", "module.bn.num_batches_tracked",
    ]  # fmt: skip
    assert shown(DP_CUDA, only=["**.weight"]) == [
        "module.conv.weight", "module.bn.weight", "module.fc.weight",
    ]  # fmt: skip
    assert shown(DP_CUDA, only=["nothing"]) == []
    assert shown(DP_CUDA, drop=["*"]) == []


def test_sort_and_limit():
    keys = shown(DP_CUDA)
    assert shown(DP_CUDA, sort="name") == sorted(keys)
    sizes = [row.size_bytes for row in ckptool.inspect(DP_CUDA, sort="size").rows]
    assert sizes == sorted(sizes, reverse=True)
    assert shown(DP_CUDA, sort="size")[0] == "module.fc.weight"
    found = ckptool.inspect(DP_CUDA, limit=2)
    assert [row.key for row in found.rows] == keys[:2]
    assert found.to_dict()["shown"] == {"total": 9, "shown": 2}
    assert shown(DP_CUDA, limit=0) == []
    with pytest.raises(UsageError, match="no order 'age'"):
        ckptool.inspect(DP_CUDA, sort="age")


def test_at():
    gan = FIXTURES / "gan.pth"
    assert shown(gan, at="netD") == [t["key"] for t in TRUTHS["gan.pth"]["tables"][1]["tensors"]]
    assert shown(FIXTURES / "net_plain.pth", at=".") == shown(FIXTURES / "net_plain.pth")
    with pytest.raises(UsageError, match="no state_dict at 'netX'") as caught:
        ckptool.inspect(gan, at="netX")
    assert "'netG', 'netD'" in caught.value.hint


def numbers(path):
    found = ckptool.inspect(path, index=True)
    return {row["key"]: row.get("index") for row in found.to_dict()["tables"][0]["tensors"]}, found


def test_index_is_exact_where_an_optimizer_agrees():
    index, found = numbers(DP_CUDA)
    names = [f"module.{name}" for name, _ in Net().named_parameters()]

    assert {key: i for key, i in index.items() if i is not None} == {
        name: str(i) for i, name in enumerate(names)
    }
    assert "index-unsure" not in slugs(found)


def test_index_is_exact_where_the_file_holds_parameters():
    index, found = numbers(FIXTURES / "params.pth")

    assert index == {"weight": "0", "frozen": "1", "leaf": None, "plain": None}
    assert "index-unsure" not in slugs(found)


def test_index_carries_a_question_mark_elsewhere(capsys):
    index, found = numbers(FIXTURES / "net_plain.pth")

    assert index["conv.weight"] == "0?"
    assert index["bn.running_mean"] is None
    assert "does not say which tensors are parameters" in note(found, "index-unsure").text
    assert " 0?  conv.weight" in cli(capsys, "inspect", FIXTURES / "net_plain.pth", "--index")[1]


def test_a_tied_parameter_has_one_number(tmp_path):
    path = tmp_path / "net.pth"
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    save(net.state_dict(keep_vars=True), path)
    index, _ = numbers(path)

    wanted = {name: str(i) for i, (name, _) in enumerate(net.named_parameters())}
    assert {key: number for key, number in index.items() if number is not None} == wanted
