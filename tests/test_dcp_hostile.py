"""DCP folders that lie: code in the index, paths out of the folder, slices that do not fit."""

import dataclasses
import os
import pickle
import shutil
import time

import pytest
import torch
from dcp_support import FSDP, MIXED, SLICED, Runs, item_of, metadata_of, saved, spoiled
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckptool
from ckptool import pieces
from ckptool.errors import CkptError, LimitExceeded
from ckptool.formats.dcp import read
from ckptool.places import Folder

KEY = f"model.{SLICED}"


def refusal(folder):
    with pytest.raises(CkptError) as caught:
        read(Folder(folder))
    return caught.value


def rows_of(metadata, key=KEY):
    return metadata.state_dict_metadata[key]


# --- code ------------------------------------------------------------------------------------
def test_code_in_the_index_is_told_and_never_run(tmp_path):
    def infected(metadata):
        metadata.storage_meta = Runs(tmp_path / "ran")

    folder = spoiled(tmp_path, infected)
    report = ckptool.verify(folder)
    assert (report.safe, report.exit_status) == (False, 1)
    (finding,) = report.to_dict()["findings"]
    assert (finding["slug"], finding["member"]) == ("unsafe-pickle", ".metadata")
    assert "posix.mkdir" in finding["text"]
    ckptool.convert(folder, tmp_path / "net.pth")  # its pickle is not the index
    assert torch.load(tmp_path / "net.pth", weights_only=True)["epoch"] == 3
    assert not (tmp_path / "ran").exists()


def test_an_index_that_is_nothing_but_code(tmp_path):
    folder = spoiled(tmp_path, lambda metadata: Runs(tmp_path / "ran"))
    assert refusal(folder).slug == "unsafe-pickle"
    report = ckptool.verify(folder)
    assert (report.whole, report.safe, report.exit_status) == (False, False, 2)
    with pytest.raises(CkptError):
        ckptool.convert(folder, tmp_path / "net.safetensors")
    assert not (tmp_path / "ran").exists()


def test_code_in_an_object_is_told_with_its_key(tmp_path):
    saved(tmp_path / "x", {"w": torch.ones(2), "bad": Runs(tmp_path / "ran")})
    report = ckptool.verify(tmp_path / "x").to_dict()
    assert report["safe"] is False
    assert report["findings"][0]["member"] == "__0_0.distcp:bad:data.pkl"
    with pytest.raises(CkptError) as caught:
        ckptool.convert(tmp_path / "x", tmp_path / "net.pth")
    assert caught.value.slug == "unsafe-pickle"
    ckptool.convert(tmp_path / "x", tmp_path / "net.safetensors")
    assert not (tmp_path / "ran").exists()


def test_an_object_that_holds_itself(tmp_path):
    loop = []
    loop.append(loop)
    saved(tmp_path / "x", {"w": torch.ones(2), "loop": (loop,)})
    error = refusal(tmp_path / "x")
    assert (error.slug, error.key) == ("unsupported", "loop")


def test_a_short_object_that_spells_a_huge_one(tmp_path):
    bomb = ("x" * 100,)
    for _ in range(60):
        bomb = (bomb, bomb)
    saved(tmp_path / "x", {"w": torch.ones(2), "bomb": bomb})
    started = time.monotonic()
    error = refusal(tmp_path / "x")
    assert (error.slug, error.key) == ("limit-value-bytes", "bomb")
    assert time.monotonic() - started < 5


def test_a_deep_object(tmp_path):
    deep = ()
    for _ in range(300):
        deep = (deep,)
    saved(tmp_path / "x", {"w": torch.ones(2), "deep": deep})
    assert refusal(tmp_path / "x").slug == "limit-nesting"


def test_a_deep_index(tmp_path):
    """Nothing of it is followed further than is needed."""

    def deep(metadata):
        inner = ()
        for _ in range(800):
            inner = (inner,)
        metadata.storage_meta = inner

    assert len(read(Folder(spoiled(tmp_path, deep))).tables[0].tensors) == 9


def test_no_item_is_what_it_was_said_to_be(tmp_path):
    """A file of other bytes under the same name."""
    folder = spoiled(tmp_path, lambda metadata: None)
    path = folder / "__1_0.distcp"
    path.write_bytes(b"\x00" * path.stat().st_size)
    error = refusal(folder)
    assert error.path == str(path)
    assert error.key is not None


# --- paths -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["../spoiled/__0_0.distcp", "/etc/passwd", "..", "", "a/b", "x\0y"]
)
def test_names_that_lead_elsewhere(name, tmp_path):
    def moved(metadata):
        item_of(metadata, KEY).relative_path = name

    assert refusal(spoiled(tmp_path, moved)).slug == "path-escape"


def test_a_link_that_leads_out(tmp_path):
    folder = spoiled(tmp_path, lambda metadata: None)
    shutil.move(folder / "__2_0.distcp", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "__2_0.distcp")
    assert refusal(folder).slug == "path-escape"


def test_a_missing_file_is_named(tmp_path):
    folder = spoiled(tmp_path, lambda metadata: None)
    (folder / "__2_0.distcp").unlink()
    error = refusal(folder)
    assert error.slug == "special-file"
    assert "1 of 4 files are missing: '__2_0.distcp'" in error.text
    assert KEY in error.findings
    report = ckptool.verify(folder)
    assert (report.whole, report.exit_status) == (False, 2)


def test_a_cut_file(tmp_path):
    folder = spoiled(tmp_path, lambda metadata: None)
    path = folder / "__3_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    error = refusal(folder)
    assert (error.slug, error.path) == ("truncated", str(path))


# --- spans -----------------------------------------------------------------------------------
def place(**fields):
    def change(metadata):
        for name, value in fields.items():
            setattr(item_of(metadata, KEY), name, value)

    return change


@pytest.mark.parametrize(("change", "slug"), [
    (place(offset=1 << 40), "truncated"),
    (place(length=1 << 40), "truncated"),
    (place(offset=(1 << 63) - 1, length=1 << 63), "tensor-bounds"),
    (place(offset=-1), "tensor-bounds"),
    (place(length=True), "tensor-bounds"),
    (place(length="7"), "tensor-bounds"),
    (place(relative_path=7), "header-invalid"),
    (place(offset=1 << 100_000), "tensor-bounds"),
])  # fmt: skip
def test_spans_outside_of_the_file(change, slug, tmp_path):
    assert refusal(spoiled(tmp_path, change)).slug == slug


def test_two_items_in_the_same_bytes(tmp_path):
    def same(metadata):
        one, two = item_of(metadata, "epoch"), item_of(metadata, "note")
        two.offset, two.length, two.relative_path = one.offset, one.length, one.relative_path

    error = refusal(spoiled(tmp_path, same))
    assert (error.slug, error.text) == ("header-invalid", "two items overlap")


def test_an_item_of_another_tensor(tmp_path):
    def swapped(metadata):
        one, two = item_of(metadata, KEY), item_of(metadata, "model.last.dim")
        one.__dict__, two.__dict__ = two.__dict__, one.__dict__

    error = refusal(spoiled(tmp_path, swapped))
    assert error.slug == "header-invalid"
    assert ".metadata says" in error.text


# --- slices ----------------------------------------------------------------------------------
def chunks(change):
    def changed(metadata):
        rows = rows_of(metadata).chunks
        made = change(rows)
        if made is not None:
            rows[:] = made

    return changed


def shifted(rows, by):
    first = rows[0]
    rows[0] = ChunkStorageMetadata(torch.Size(n + by for n in first.offsets), first.sizes)


@pytest.mark.parametrize(("change", "words"), [
    (chunks(lambda rows: rows[:-1]), "its slices hold"),
    (chunks(lambda rows: [*rows, rows[0]]), "two slices overlap"),
    (chunks(lambda rows: []), "its slices hold 0 of 30"),
    (chunks(lambda rows: shifted(rows, 1)), "no item holds the bytes"),
    (chunks(lambda rows: [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((5, 6))), *rows[1:]]), "two slices overlap"),
    (chunks(lambda rows: [ChunkStorageMetadata(torch.Size((0,)), torch.Size((5,)))]), "no item holds the bytes"),
    (lambda m: setattr(rows_of(m), "size", torch.Size((50, 60))), "its slices hold 30 of 3,000"),
    (lambda m: setattr(rows_of(m), "size", torch.Size((4, 6))), "outside of a tensor"),
    (lambda m: setattr(rows_of(m), "size", torch.Size((5, 6, 1))), "outside of a tensor"),
    (lambda m: setattr(rows_of(m), "chunks", 5), "no list"),
    (lambda m: setattr(rows_of(m), "size", [5, 6]), "no torch.Size"),
    (lambda m: setattr(rows_of(m), "size", torch.Size((5, 6))) or setattr(m, "planner_data", 5), "planner_data is no dict"),
    (lambda m: setattr(rows_of(m), "properties", None), "no TensorProperties"),
    (lambda m: m.storage_data.pop(MetadataIndex(KEY, (0, 0))) and None, "no item holds"),
    (lambda m: setattr(m, "storage_data", None), "storage_data is no dict"),
    (lambda m: m.planner_data.update({"epoch": ("note",)}), "two values at one place"),
    (lambda m: m.planner_data.update({"epoch": ("note", "x")}), "two values at one place"),
    (lambda m: m.planner_data.update({"epoch": (5,)}), "both a dict and a list"),
    (lambda m: m.planner_data.update({"epoch": ("model", 5)}), "both a dict and a list"),
    (lambda m: m.planner_data.update({"epoch": ("e", -1)}), "no path"),
    (lambda m: m.planner_data.update({"epoch": ()}), "no path"),
    (lambda m: m.planner_data.update({"epoch": ("x",) * 500}), "no path"),
])  # fmt: skip
def test_an_index_that_contradicts_itself(change, words, tmp_path):
    error = refusal(spoiled(tmp_path, change))
    assert error.slug == "header-invalid"
    assert words in error.text


def test_a_list_of_a_billion(tmp_path):
    folder = spoiled(tmp_path, lambda m: m.planner_data.update({"epoch": ("e", 10**9)}))
    assert refusal(folder).slug == "limit-value-count"


def test_huge_sizes_cost_nothing(tmp_path):
    def huge(metadata):
        rows_of(metadata).size = torch.Size((1 << 60, 6))

    started = time.monotonic()
    assert refusal(spoiled(tmp_path, huge)).slug == "header-invalid"
    assert time.monotonic() - started < 2


def test_many_slices_are_no_hang(tmp_path):
    """All of one row: along the first axis each could overlap with each."""

    def many(metadata):
        rows = rows_of(metadata)
        rows.size = torch.Size((2, 10_000))
        sizes = torch.Size((2, 1))
        rows.chunks = [ChunkStorageMetadata(torch.Size((0, n)), sizes) for n in range(10_000)]
        item = item_of(metadata, KEY)
        for n in range(10_000):
            metadata.storage_data[MetadataIndex(KEY, (0, n))] = item

    folder = spoiled(tmp_path, many)
    started = time.monotonic()
    assert refusal(folder).slug == "header-invalid"
    assert time.monotonic() - started < 8


def test_slices_that_are_no_grid_are_bounded(monkeypatch):
    monkeypatch.setattr(pieces, "_COMPARED", 30)
    grid = [((a, a + 1), (b, b + 1)) for a in range(9) for b in range(9)]
    with pytest.raises(LimitExceeded):
        pieces.overlap(grid)
    assert pieces.overlap(grid[:9]) is None


def test_two_items_for_one_slice(tmp_path):
    """One key twice in a pickled dict: a dict would keep the last."""

    class Twice(dict):
        def __reduce__(self):
            return dict, (), None, None, iter([*self.items(), *list(self.items())[:1]])

    folder = spoiled(tmp_path, lambda m: None)
    metadata = metadata_of(folder)
    metadata.storage_data = Twice(metadata.storage_data)
    data = pickle.dumps(metadata)
    assert len(pickle.loads(data).storage_data) == len(metadata.storage_data)
    (folder / ".metadata").write_bytes(data)
    error = refusal(folder)
    assert error.slug in ("key-duplicate", "header-invalid")


@pytest.mark.parametrize("size", [0, 1, 50, 3000])
def test_a_cut_index(size, tmp_path):
    folder = spoiled(tmp_path, lambda m: None)
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:size])
    assert isinstance(refusal(folder), CkptError)


def test_every_flipped_byte_of_the_index_is_an_error_or_the_truth(tmp_path):
    """Only CkptError may escape; what is read has the tensors' true bytes behind it."""
    folder = spoiled(tmp_path, lambda m: None, source=FSDP)
    path = folder / ".metadata"
    good = path.read_bytes()
    refused = 0
    for at in range(0, len(good), 23):
        path.write_bytes(good[:at] + bytes((good[at] ^ 0x15,)) + good[at + 1 :])
        try:
            found = read(Folder(folder))
        except CkptError:
            refused += 1
            continue
        for tensor in found.tensors:
            assert tensor.size_bytes <= 120
    assert refused > 20


def test_the_mixed_folder_itself_is_fine(tmp_path):
    folder = spoiled(tmp_path, dataclasses.replace)
    assert len(read(Folder(folder)).tables[0].tensors) == len(read(Folder(MIXED)).tables[0].tensors)
