"""DCP folders, read: what torch.distributed.checkpoint saved comes out whole, by every verb."""

import dataclasses
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import dcp_ranks
import pytest
import safetensors.torch
import torch
from dcp_support import FSDP, MIXED, assert_same, by_ranks, leaves, oracle, raw, saved, spoiled

import ckptool
from ckptool.formats import dcp
from ckptool.limits import DEFAULT
from ckptool.places import Folder
from ckptool.plans import Copy, Made
from ckptool.verbs.reading import opened

KEYS = [*dcp_ranks.PLACES, "scalar"]


def convert(folder, out, *options):
    command = [sys.executable, "-m", "ckptool", "convert", str(folder), "-o", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# --- what torch says -------------------------------------------------------------------------
@pytest.mark.parametrize("folder", [MIXED, FSDP], ids=["mixed", "fsdp"])
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_pth_is_what_torch_makes_of_the_folder(folder, kind, tmp_path):
    ckptool.convert(folder, tmp_path / "net.pth", to=kind)
    found = torch.load(tmp_path / "net.pth", weights_only=True)
    assert_same(found, oracle(folder, tmp_path))


def test_the_committed_folder_holds_what_four_ranks_had(tmp_path):
    ckptool.convert(MIXED, tmp_path / "net.pth")
    found = leaves(torch.load(tmp_path / "net.pth", weights_only=True))
    wanted = leaves(dcp_ranks.whole_state())
    assert set(found) == set(wanted)
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert raw(found[path]) == raw(value), path
        else:
            assert found[path] == value


def test_safetensors_and_shards(tmp_path):
    wanted = oracle(MIXED, tmp_path)["model"]
    ckptool.convert(MIXED, tmp_path / "net.safetensors")
    assert_same(
        dict(sorted(safetensors.torch.load_file(tmp_path / "net.safetensors").items())),
        dict(sorted(wanted.items())),
    )
    ckptool.convert(MIXED, tmp_path / "shards", max_shard_size="300B")
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2
    found = {k: v for file in files for k, v in safetensors.torch.load_file(file).items()}
    assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in wanted.items()}


def test_types_and_names_change_on_the_way(tmp_path):
    ckptool.convert(MIXED, tmp_path / "net.pth", dtype="bf16", add_prefix="net.", compact=True)
    found = torch.load(tmp_path / "net.pth", weights_only=True)["model"]
    wanted = oracle(MIXED, tmp_path)["model"]
    for key in ("rows.weight", "rows.uneven", "grid.weight", "grid.copied"):
        assert raw(found[f"net.{key}"]) == raw(wanted[key].to(torch.bfloat16)), key
    assert raw(found["net.last.dim"]) == raw(wanted["last.dim"])


def test_one_table_of_it(tmp_path):
    ckptool.convert(MIXED, tmp_path / "net.pth", select="model")
    assert_same(
        torch.load(tmp_path / "net.pth", weights_only=True), oracle(MIXED, tmp_path)["model"]
    )


def test_load_and_open(tmp_path):
    wanted = oracle(MIXED, tmp_path)
    assert_same(ckptool.load(MIXED), wanted)
    with ckptool.open(MIXED) as found:
        assert list(found.weights) == list(wanted["model"])
        for key, tensor in wanted["model"].items():
            assert raw(found.weights[key].torch()) == raw(tensor), key
            if tensor.dtype is not torch.bfloat16:
                assert (found.weights[key].numpy() == tensor.numpy()).all(), key


def test_load_into_a_net(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False))
    report = ckptool.load_into(net, FSDP)
    assert report.loaded == ("0.weight",)
    assert raw(net[0].weight) == raw(oracle(FSDP, tmp_path)["model"]["0.weight"])


def test_diff_with_what_torch_makes_of_it(tmp_path):
    oracle(MIXED, tmp_path)
    for values in (False, True):
        report = ckptool.diff(MIXED, tmp_path / "oracle.pth", values=values)
        found = report.to_dict()
        assert (found["same_tensors"], found["equal_count"]) == (True, 11)
        assert (found["changed"], found["extras"]) == ([], [])
    state = torch.load(tmp_path / "oracle.pth", weights_only=False)
    state["model"]["grid.weight"][4, 2] = -1.0
    torch.save(state, tmp_path / "other.pth")
    report = ckptool.diff(MIXED, tmp_path / "other.pth", values=True)
    rows = [row["key"] for row in report.to_dict()["changed"]]
    assert rows == ["grid.weight"]


def measured(place):
    table = ckptool.inspect(place, stats=True, hash=True).to_dict()["tables"][0]
    return {row["key"]: (row["sha256"], row["stats"]) for row in table["tensors"]}


def test_statistics_and_hashes_are_those_of_the_whole(tmp_path):
    oracle(MIXED, tmp_path)
    found = measured(MIXED)
    assert set(found) == set(KEYS)
    assert found == measured(tmp_path / "oracle.pth")


# --- how it is read --------------------------------------------------------------------------
def test_tables_and_extras_stand_where_they_were_nested():
    found = dcp.read(Folder(MIXED))
    assert [table.path for table in found.tables] == [("model",)]
    assert [t.key for t in found.tables[0].tensors] != []
    assert {extra.path[0]: extra.value for extra in found.extras}["epoch"] == 3
    assert {extra.path[0]: extra.text for extra in found.extras}["note"] == "'x'"
    assert {extra.path[0]: extra.type for extra in found.extras}["optimizer"] == "optimizer"


def test_rows_are_copied_columns_are_put_together(tmp_path):
    from ckptool.checkpoint import Changes
    from ckptool.formats.writers import write

    with opened(MIXED) as found:
        plan, _ = write(found.checkpoint, Changes(), "safetensors")
    kinds = {}
    for part in plan.outputs[0].parts:
        if isinstance(part, Copy | Made):
            kinds.setdefault(part.label, []).append(type(part))
    assert kinds["rows.weight"] == [Copy] * 4
    assert kinds["rows.uneven"] == [Copy] * 3
    assert kinds["first.one"] == [Copy] * 4
    assert kinds["copies"] == [Copy]
    assert kinds["grid.weight"] == kinds["last.dim"] == kinds["cols.uneven"] == [Made]


@pytest.mark.parametrize("writer", [
    {"single_file_per_rank": False},
    {"thread_count": 3},
    {"sync_files": False},
])  # fmt: skip
def test_every_way_torch_lays_files_out(writer, tmp_path):
    state = {"model": {f"w{n}": torch.randn(n + 1, 3) for n in range(5)}, "step": 9}
    saved(tmp_path / "x", state, **writer)
    assert_same(ckptool.load(tmp_path / "x"), oracle(tmp_path / "x", tmp_path))


def test_items_in_safetensors(tmp_path):
    """SerializationFormat.SAFETENSORS: torch writes it, and cannot read it back."""
    format_ = torch.distributed.checkpoint.filesystem.SerializationFormat.SAFETENSORS
    state = {"model": {"a": torch.randn(3, 4), "b": torch.arange(5)}, "step": 9}
    saved(tmp_path / "x", state, serialization_format=format_)
    assert_same(ckptool.load(tmp_path / "x"), state)
    ckptool.convert(tmp_path / "x", tmp_path / "x.safetensors")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in state["model"].items()}


def test_compressed_items_are_refused_by_name(tmp_path):
    def compressed(metadata):
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd"]

    folder = spoiled(tmp_path, compressed)
    with pytest.raises(ckptool.CkptError, match=r"'stream\.zstd'") as caught:
        dcp.read(Folder(folder))
    assert caught.value.slug == "unsupported"


def test_tensors_that_do_not_lie_row_by_row(tmp_path):
    state = {
        "t": torch.arange(6.0).view(2, 3).t(),
        "last": torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "f8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "u16": torch.arange(4).to(torch.uint16),
        "bool": torch.tensor([True, False]),
    }
    saved(tmp_path / "x", state)
    ckptool.convert(tmp_path / "x", tmp_path / "x.pth")
    assert_same(torch.load(tmp_path / "x.pth", weights_only=True), oracle(tmp_path / "x", tmp_path))
    ckptool.convert(tmp_path / "x", tmp_path / "x.safetensors")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in state.items()}


def test_objects_beside_tensors(tmp_path):
    import collections

    import numpy as np

    state = {
        "w": torch.ones(2),
        "tuple": (torch.arange(3), "x", None, 2.5),
        "bytes": b"\x00\xff\x80",
        "ordered": collections.OrderedDict(a=1, b=[1, 2]),
        "set": {1, 2},
        "array": np.arange(4.0),
        "size": torch.Size((2, 3)),
        "dtype": torch.float16,
        "text": "\u96ea \U0001f600\n",
        "long": 1 << 80,
        "list": [1, [2, {"a": 3}]],
        "rng": [torch.arange(4, dtype=torch.uint8)],
    }
    saved(tmp_path / "x", state)
    ckptool.convert(tmp_path / "x", tmp_path / "x.pth")
    found = torch.load(tmp_path / "x.pth", weights_only=False)
    wanted = oracle(tmp_path / "x", tmp_path)
    assert list(found) == list(wanted)
    assert (found["array"] == wanted["array"]).all()
    assert torch.equal(found["tuple"][0], torch.arange(3))
    for key in ("bytes", "ordered", "set", "size", "dtype", "text", "long"):
        assert type(found[key]) is type(wanted[key]), key
        assert found[key] == wanted[key], key
    assert found["list"] == wanted["list"]
    assert found["tuple"][1:] == wanted["tuple"][1:]


def test_a_flat_state_dict_is_the_root_table(tmp_path):
    state = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3)}
    saved(tmp_path / "x", state)
    found = dcp.read(Folder(tmp_path / "x"))
    assert [table.path for table in found.tables] == [()]
    assert_same(ckptool.load(tmp_path / "x"), state)


def test_a_key_that_was_not_flattened(tmp_path):
    """planner_data may be missing: then the dotted name is the key."""
    folder = spoiled(tmp_path, lambda metadata: dataclasses.replace(metadata, planner_data=None))
    found = dcp.read(Folder(folder))
    assert "model.rows.weight" in [t.key for t in found.tensors]


def test_the_title_and_the_sizes_of_inspect():
    report = ckptool.inspect(MIXED).to_dict()
    assert report["format"] == "dcp"
    sizes = [file.stat().st_size for file in MIXED.iterdir()]
    assert report["size_bytes"] == sum(sizes)


def test_a_file_of_another_save_is_mentioned(tmp_path):
    shutil.copytree(MIXED, tmp_path / "x")
    (tmp_path / "x" / "__7_0.distcp").write_bytes(b"old")
    notes = dcp.read(Folder(tmp_path / "x")).notes
    assert [(note.slug, "'__7_0.distcp'" in note.text) for note in notes] == [
        ("index-extra-files", True),
        ("optimizer-ids", False),
        ("dcp-folder", False),
    ]


def test_the_index_stands_for_the_folder(tmp_path):
    assert ckptool.inspect(MIXED / ".metadata").to_dict()["tensor_count"] == 9
    assert ckptool.verify(MIXED / ".metadata").whole
    with pytest.raises(ckptool.CkptError) as caught:
        ckptool.inspect(MIXED / "__0_0.distcp")
    assert "give the folder" in caught.value.hint


def test_an_index_that_changes_on_the_way_is_noticed(tmp_path):
    shutil.copytree(MIXED, tmp_path / "x")

    def touch(done, total):
        os.utime(tmp_path / "x" / ".metadata", (1, 1))

    with pytest.raises(ckptool.CkptError) as caught:
        ckptool.convert(tmp_path / "x", tmp_path / "net.pth", progress=touch)
    assert caught.value.slug == "input-changed"


def test_the_class_that_older_torch_wrote(tmp_path):
    """TensorProperties stood in another module; its state is the same."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    def older(metadata):
        for row in metadata.state_dict_metadata.values():
            if hasattr(row, "properties"):
                row.properties = TensorProperties(dtype=row.properties.dtype)

    found = dcp.read(Folder(spoiled(tmp_path, older)))
    assert [t.key for t in found.tables[0].tensors] != []
    assert {row.verdict for row in found.globals} == {"known"}


def test_report_r66(tmp_path, monkeypatch):
    """`torch.load("step5")`: IsADirectoryError. The keys are listed, and the way out is a command."""
    from ckptool.cli.main import main

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2))
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "step5", {"model": net.state_dict(), "step": 5})
    report = ckptool.inspect("step5").to_dict()
    assert [t["key"] for t in report["tables"][0]["tensors"]] == list(net.state_dict())
    assert [extra["path"] for extra in report["extras"]] == [["step"]]
    (note,) = [note for note in report["notes"] if note["slug"] == "dcp-folder"]
    assert "dcp_to_torch_save" in note["text"]
    assert note["command"] == "ckptool convert step5 -o step5.pth"
    assert main(note["command"].split()[1:]) == 0
    found = torch.load("step5.pth", weights_only=True)
    assert_same(found, {"model": dict(net.state_dict()), "step": 5})


# --- verify ----------------------------------------------------------------------------------
def test_verify_compares_every_recorded_checksum():
    report = ckptool.verify(MIXED)
    assert (report.whole, report.safe, report.exit_status) == (True, True, 0)
    counts = report.to_dict()["checksums"]
    assert counts["record_count"] == counts["checked_count"] > 200


def test_verify_names_the_tensor_of_a_flipped_bit(tmp_path):
    shutil.copytree(MIXED, tmp_path / "x")
    tensor = next(t for t in dcp.read(Folder(tmp_path / "x")).tensors if t.key == "grid.weight")
    piece = tensor.storage.pieces[2]
    path = Path(dcp.read(Folder(tmp_path / "x")).sources[piece.source_id].uri)
    data = bytearray(path.read_bytes())
    data[piece.span.offset + 3] ^= 1
    path.write_bytes(data)
    report = ckptool.verify(tmp_path / "x")
    assert (report.whole, report.exit_status) == (False, 1)
    (finding,) = report.to_dict()["findings"]
    assert (finding["slug"], finding["keys"]) == ("crc-mismatch", ["grid.weight"])
    assert finding["member"].startswith(f"{path.name}:model.grid.weight:data/")
    for out in ("net.pth", "net.safetensors"):
        with pytest.raises(ckptool.CkptError, match=r"grid\.weight") as caught:
            ckptool.convert(tmp_path / "x", tmp_path / out)
        assert caught.value.slug == "crc-mismatch"
        assert not (tmp_path / out).exists()
    with pytest.raises(ckptool.CkptError, match="recorded checksum"):
        ckptool.load(tmp_path / "x")


def test_verify_finds_nan_in_slices(tmp_path):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: F401

    state = {"model": {"w": torch.tensor([1.0, float("nan"), 2.0])}}
    saved(tmp_path / "x", state)
    report = ckptool.verify(tmp_path / "x", finite=True).to_dict()
    assert [row["slug"] for row in report["findings"]] == ["not-finite"]


# --- cost ------------------------------------------------------------------------------------
def test_looking_reads_no_numbers(tmp_path, monkeypatch):
    from ckptool import places

    saved(tmp_path / "x", {"model": {"w": torch.zeros(1 << 20)}})
    seen = []
    fetch = places.FileSource._fetch

    def counted(self, offset, size):
        seen.append(size)
        return fetch(self, offset, size)

    monkeypatch.setattr(places.FileSource, "_fetch", counted)
    dcp.read(Folder(tmp_path / "x"), DEFAULT)
    assert sum(seen) < 200_000


def test_neither_torch_nor_numpy_is_imported(tmp_path):
    code = (
        "import sys, ckptool; ckptool.inspect(sys.argv[1]);"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, MIXED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# --- four ranks ------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixed", "fsdp", "last"])
def test_what_four_ranks_write_today(kind, tmp_path):
    by_ranks(tmp_path / "x", kind)
    ckptool.convert(tmp_path / "x", tmp_path / "net.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = oracle(tmp_path / "x", tmp_path)
    assert_same(torch.load(tmp_path / "net.pth", weights_only=True), wanted)
    assert ckptool.verify(tmp_path / "x").whole


def test_the_command_line_says_what_it_joined(tmp_path):
    said = convert(MIXED, tmp_path / "net.safetensors")
    assert "left behind: optimizer, epoch, note" in said
