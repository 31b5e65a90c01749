"""DCP folders of ranks that saved with use_collectives=False: every rank its own metadata."""

import os
import shutil

import dcp_ranks
import pytest
import safetensors.torch
import torch
from dcp_support import Runs, assert_same, by_ranks, leaves, oracle, raw, save_apart, saved
from torch.distributed.checkpoint.filesystem import SerializationFormat
from verbs_support import cli

import ckptool
from ckptool.errors import CkptError
from ckptool.formats import dcp
from ckptool.formats.folders import look
from ckptool.places import Folder

W = torch.arange(24, dtype=torch.float32).view(6, 4)
G = torch.arange(12, dtype=torch.int32).view(4, 3)
COUNT = 3


def state_of(rank):
    """What all have is the same, but for `rank` and `buffer`."""
    return {
        "net": {"bias": torch.ones(3), "step": torch.tensor(4)},
        "rank": rank,
        "buffer": torch.full((2,), float(rank)),
        "note": "x",
    }


def slices_of(rank):
    """W by uneven rows (the last rank has none), G by columns."""
    rows = W[(0, 4, 6)[rank] : (4, 6, 6)[rank]]
    return {
        "net.w": ((6, 4), {((0, 4, 6)[rank], 0): rows}),
        "net.g": ((4, 3), {(0, rank): G[:, rank : rank + 1].contiguous()}),
    }


@pytest.fixture
def folder(tmp_path):
    rows = [(state_of(rank), slices_of(rank)) for rank in range(COUNT)]
    return save_apart(tmp_path / "run", *rows)


WHOLE = {**state_of(0), "net": {**state_of(0)["net"], "w": W, "g": G}}


def refusal(folder):
    with pytest.raises(CkptError) as caught:
        ckptool.inspect(folder)
    assert ckptool.verify(folder).exit_status == 2
    return caught.value


def notes(folder, slug):
    return [note["text"] for note in ckptool.inspect(folder).to_dict()["notes"] if note["slug"] == slug]  # fmt: skip


# --- what comes out --------------------------------------------------------------------------
def test_the_slices_of_all_ranks_are_one_tensor(folder, tmp_path):
    assert not (folder / ".metadata").exists()
    assert_same(ckptool.load(folder), WHOLE)
    ckptool.convert(folder, tmp_path / "net.pth", jobs=2)
    assert_same(torch.load(tmp_path / "net.pth", weights_only=True), WHOLE)
    ckptool.convert(folder, tmp_path / "net.safetensors")
    found = safetensors.torch.load_file(tmp_path / "net.safetensors")
    assert {name: raw(found[name]) for name in ("w", "g")} == {"w": raw(W), "g": raw(G)}


def test_torch_alone_would_fill_in_one_rank(folder, tmp_path):
    """The reason of the note: `dcp_to_torch_save` reads rank 0's metadata, and warns of nothing."""
    found = oracle(folder, tmp_path)
    assert torch.equal(found["net"]["w"][:4], W[:4])
    assert found["net"]["w"].shape == W.shape
    (note,) = notes(folder, "dcp-folder")
    assert "3 ranks" in note
    assert "rank 0's part alone" in note


def test_torch_loads_what_it_is_written_to(folder, tmp_path):
    ckptool.convert(folder, tmp_path / "together", to="dcp")
    assert_same(oracle(tmp_path / "together", tmp_path), WHOLE)


def test_one_rank_alone(tmp_path):
    value = {"model": {"w": W, "b": G}, "step": 3}
    saved_folder = save_apart(tmp_path / "x", (value, {}))
    assert sorted(os.listdir(saved_folder)) == ["__0.metadata", "__0_0.distcp"]
    assert_same(ckptool.load(saved_folder), oracle(saved_folder, tmp_path))
    assert notes(saved_folder, "ranks-differ") == []
    assert "by 1 rank," in notes(saved_folder, "dcp-folder")[0]


def test_keys_that_only_one_rank_has(tmp_path):
    """As with pipeline parallelism: every rank has other layers."""
    rows = [({f"layer{rank}": {"w": W + rank}}, {}) for rank in range(2)]
    folder = save_apart(tmp_path / "x", *rows)
    assert_same(ckptool.load(folder), {"layer0": {"w": W}, "layer1": {"w": W + 1}})


def test_more_than_nine_ranks_are_in_the_order_of_numbers(tmp_path):
    rows = [({"rank": n}, {"w": ((11,), {(n,): torch.tensor([float(n)])})}) for n in range(11)]
    folder = save_apart(tmp_path / "x", *rows)
    found = ckptool.load(folder)
    assert found["rank"] == 0
    assert found["w"].tolist() == list(range(11))


# --- what several saved ----------------------------------------------------------------------
def test_keys_that_are_not_the_same_on_every_rank_are_named(folder):
    (text,) = notes(folder, "ranks-differ")
    assert text.startswith("2 keys are not the same on every rank")
    assert text.endswith("'rank', 'buffer'")


def test_copies_without_checksums_are_named(tmp_path):
    rows = [({"b": torch.ones(2)}, {}), ({"b": torch.ones(2)}, {})]
    folder = save_apart(tmp_path / "x", *rows, serialization_format=SerializationFormat.SAFETENSORS)
    (text,) = notes(folder, "ranks-differ")
    assert "no checksum to compare" in text
    assert ckptool.load(folder)["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(4), ("rank 0 saved float32 [3]", "rank 1 float32 [4]")),
        (torch.ones(3, dtype=torch.float16), ("float32 [3]", "float16 [3]")),
        ("text", ("float32 [3]", "an object")),
    ],
    ids=["shape", "dtype", "object"],
)
def test_two_things_under_one_key_are_refused(tmp_path, other, words):
    folder = save_apart(tmp_path / "x", ({"b": torch.ones(3)}, {}), ({"b": other}, {}))
    error = refusal(folder)
    assert (error.slug, error.key) == ("unsupported", "b")
    assert all(word in error.text for word in words)


def test_one_name_for_two_places_is_refused(tmp_path):
    folder = save_apart(tmp_path / "x", ({"a": {"b": W}}, {}), ({"a.b": W}, {}))
    assert refusal(folder).key == "a.b"


def test_a_damaged_copy_is_told_and_loses_nothing(folder, tmp_path):
    """Only the bytes of rank 2's `bias` are wrong: the one that is read is rank 0's."""
    path = folder / "__2_0.distcp"
    data = path.read_bytes()
    at = data.index(torch.ones(3).numpy().tobytes())
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    report = ckptool.verify(folder)
    assert (report.whole, report.exit_status) == (False, 1)
    (finding,) = report.to_dict()["findings"]
    assert (finding["slug"], finding["keys"]) == ("crc-mismatch", [])
    assert finding["member"].startswith("__2_0.distcp:net.bias:data/")
    assert report.to_dict()["lost"] == []
    ckptool.convert(folder, tmp_path / "net.pth")
    assert torch.load(tmp_path / "net.pth", weights_only=True)["net"]["bias"].tolist() == [1.0] * 3


def test_verify_sums_the_records_of_every_copy(folder):
    report = ckptool.verify(folder).to_dict()
    assert report["checksums"]["checked_count"] == report["checksums"]["record_count"]
    names = len(leaves(state_of(0))) + len(slices_of(0))
    assert report["checksums"]["record_count"] >= COUNT * names


# --- what is missing, what is of another save ------------------------------------------------
@pytest.mark.parametrize("rank", range(COUNT))
def test_a_rank_without_metadata_is_named(folder, rank):
    os.remove(folder / f"__{rank}.metadata")
    error = refusal(folder)
    assert f"'__{rank}.metadata' is missing" in error.text
    assert error.hint.startswith(f"copy the files of rank {rank} ('__{rank}*') into it, or take")
    (folder / f"__{rank}.metadata.tmp").write_bytes(b"")
    assert "never finished" in refusal(folder).text


def test_a_rank_that_is_gone_altogether(folder):
    """Between others it is seen by its number, the last one by what tensors lack."""
    for file in folder.glob("__1*"):
        file.rename(folder.parent / file.name)
    assert "'__1.metadata' is missing" in refusal(folder).text
    for file in folder.parent.glob("__1*"):
        file.rename(folder / file.name)
    for file in folder.glob("__2*"):
        os.remove(file)
    error = refusal(folder)
    assert (error.key, error.text) == ("net.g", "its slices hold 8 of 12 elements")


def test_the_data_of_a_rank_are_missing(folder):
    os.remove(folder / "__1_0.distcp")
    error = refusal(folder)
    assert "1 of 3 files are missing: '__1_0.distcp'" in error.text
    assert "net.bias" in error.findings


def test_ranks_of_two_saves(folder, tmp_path):
    """Rank 2 is of a save by two ranks, which cut the tensor elsewhere."""
    other = save_apart(
        tmp_path / "y", ({}, {}), ({}, {}), ({}, {"net.w": ((6, 4), {(3, 0): W[3:]})})
    )
    for name in ("__2.metadata", "__2_0.distcp"):
        shutil.copy(other / name, folder / name)
    error = refusal(folder)
    assert (error.key, error.text) == ("net.w", "two slices overlap: [0:4, 0:4] and [3:6, 0:4]")


def test_the_metadata_of_all_comes_before_those_of_ranks(folder):
    """As torch looks for it first."""
    saved(folder, {"w": W + 1})
    assert_same(ckptool.load(folder), {"w": W + 1})
    assert any("__0.metadata" in text for text in notes(folder, "index-extra-files"))


def test_a_ranks_metadata_stands_for_the_folder(folder):
    assert look(Folder(folder)).name == "__0.metadata"
    assert ckptool.verify(folder / "__1.metadata").whole
    assert_same(ckptool.load(folder / "__1.metadata"), WHOLE)


def test_a_ranks_metadata_that_changes_on_the_way_is_noticed(folder, tmp_path):
    def touch(done, total):
        os.utime(folder / "__2.metadata", (1, 1))

    with pytest.raises(CkptError) as caught:
        ckptool.convert(folder, tmp_path / "net.pth", progress=touch)
    assert caught.value.slug == "input-changed"


# --- hostile ---------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 2])
def test_code_in_the_metadata_of_any_rank_is_not_run(folder, tmp_path, rank):
    import pickle

    (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    error = refusal(folder)
    assert (error.slug, error.member) == ("unsafe-pickle", f"__{rank}.metadata")
    assert ckptool.verify(folder).safe is False
    assert not (tmp_path / "ran").exists()


def test_code_in_a_copy_is_found(tmp_path):
    """Rank 1 would run it when it loads its own part."""
    folder = save_apart(tmp_path / "x", ({"o": "x"}, {}), ({"o": Runs(tmp_path / "ran")}, {}))
    report = ckptool.verify(folder)
    assert (report.safe, report.exit_status) == (False, 1)
    assert any("__1_0.distcp" in (row["member"] or "") for row in report.to_dict()["findings"])
    assert not (tmp_path / "ran").exists()


def test_a_file_name_of_a_rank_that_is_no_number_of_torchs(folder, capsys):
    os.rename(folder / "__2.metadata", folder / "__02.metadata")
    assert "'__2.metadata' is missing" in cli(capsys, "inspect", folder)[2]
    (folder / "__99999999999999999999_0.distcp").write_bytes(b"x")
    assert "'__2.metadata' is missing" in cli(capsys, "inspect", folder)[2]


# --- four ranks ------------------------------------------------------------------------------
@pytest.mark.long
def test_what_four_ranks_write_without_collectives(tmp_path):
    folder = by_ranks(tmp_path / "x", "apart")
    assert sorted(folder.glob("*.metadata")) == [folder / f"__{rank}.metadata" for rank in range(4)]
    ckptool.convert(folder, tmp_path / "net.pth")
    found = leaves(torch.load(tmp_path / "net.pth", weights_only=True))
    wanted = leaves(dcp_ranks.whole_state() | {"rank": 0, "buffer": torch.zeros(3)})
    assert set(found) == set(wanted)
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert raw(found[path]) == raw(value), path
        else:
            assert found[path] == value, path
    assert ckptool.verify(folder).whole
    (text,) = notes(folder, "ranks-differ")
    assert text.endswith("'rank', 'buffer'")
    assert len(dcp.read(Folder(folder), name="__0.metadata").tables[0].tensors) == 9
