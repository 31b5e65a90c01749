"""convert --salvage of folders: keys whose bytes are all there come out, the others are named."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import zero_support as zero
from dcp_support import MIXED, Runs, item_of, metadata_of, oracle, raw, save_apart, saved, spoiled
from safetensors.torch import load_file
from verbs_support import cli

import ckptool
from ckptool.errors import CkptError
from ckptool.formats import dcp
from ckptool.places import Folder

KEYS = ("rows.weight", "rows.uneven", "cols.uneven", "grid.weight", "grid.copied", "last.dim",
        "first.one", "copies", "scalar")  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(MIXED, tmp_path / "run"))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return oracle(MIXED, tmp_path_factory.mktemp("oracle"))["model"]


def salvage(folder, out, **options):
    return ckptool.convert(folder, out, salvage=True, fsync=False, **options)


def check(found, lost, wanted):
    """Every key is there to the byte, or listed; returns those that are there."""
    for key, value in found.items():
        assert raw(value) == raw(wanted[key]), key
    assert not found.keys() & lost.keys()
    assert found.keys() | {key for key in lost if key in wanted} == set(wanted)
    return set(found)


def item_bytes(folder, key, number=0):
    """(the file of an item, where it lies in it)."""
    item = item_of(metadata_of(folder), key, number)
    return folder / item.relative_path, item.offset, item.length


# --- DCP -------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_a_rank_is_missing(folder, wanted, rank, suffix, tmp_path):
    os.remove(folder / f"__{rank}_0.distcp")
    done = salvage(folder, tmp_path / f"part{suffix}")
    lost = dict(done.lost)
    names = {
        key.fqn
        for key, info in metadata_of(folder).storage_data.items()
        if info.relative_path == f"__{rank}_0.distcp"
    }
    assert all(why == f"'__{rank}_0.distcp' is missing" for key, why in lost.items() if key in KEYS)
    if suffix == ".pth":
        found = torch.load(tmp_path / "part.pth", weights_only=True)
        for entry in ("epoch", "note"):
            assert (entry in lost, entry in found) == (entry in names, entry not in names)
        assert "left out as a whole" in lost["optimizer"]  # its exp_avg was on every rank
        assert "optimizer" not in found
        found = found["model"]
    else:
        found = load_file(tmp_path / "part.safetensors")
    kept = check(found, lost, wanted)
    assert kept == {key for key in KEYS if f"model.{key}" not in names}


def test_a_cut_file_keeps_what_is_before_the_cut(folder, wanted, tmp_path):
    path, at, size = item_bytes(folder, "model.grid.weight")
    os.truncate(path, at + size - 1)
    done = salvage(folder, tmp_path / "part.safetensors")
    lost = dict(done.lost)
    assert "should end at byte" in lost["grid.weight"]
    kept = check(load_file(tmp_path / "part.safetensors"), lost, wanted)
    behind = {key.fqn for key, info in metadata_of(folder).storage_data.items()
              if info.relative_path == path.name and info.offset >= at}  # fmt: skip
    assert kept == {key for key in KEYS if f"model.{key}" not in behind}


def test_a_flipped_bit_costs_one_key(folder, wanted, tmp_path):
    piece = next(t for t in dcp.read(Folder(folder)).tensors if t.key == "last.dim").storage.pieces[
        1
    ]
    path = Path(dcp.read(Folder(folder)).sources[piece.source_id].uri)
    data = bytearray(path.read_bytes())
    data[piece.span.offset] ^= 1
    path.write_bytes(data)
    done = salvage(folder, tmp_path / "part.pth")
    assert [key for key, _ in done.lost] == ["last.dim"]
    found = torch.load(tmp_path / "part.pth", weights_only=True)
    assert check(found["model"], dict(done.lost), wanted) == set(KEYS) - {"last.dim"}
    assert (found["epoch"], "optimizer" in found) == (3, True)


def test_a_damaged_item_costs_one_key(folder, wanted, tmp_path):
    path, at, size = item_bytes(folder, "model.cols.uneven", 2)
    data = bytearray(path.read_bytes())
    data[at + size - 20 : at + size] = bytes(20)  # the end of its zip
    path.write_bytes(data)
    done = salvage(folder, tmp_path / "part.safetensors")
    assert [key for key, _ in done.lost] == ["cols.uneven"]
    check(load_file(tmp_path / "part.safetensors"), dict(done.lost), wanted)


def test_slices_that_no_rank_saved(tmp_path, wanted):
    def cut(metadata):
        metadata.state_dict_metadata["model.grid.weight"].chunks.pop()

    done = salvage(spoiled(tmp_path, cut), tmp_path / "part.safetensors")
    assert dict(done.lost) == {"grid.weight": "its slices hold 24 of 30 elements"}
    check(load_file(tmp_path / "part.safetensors"), dict(done.lost), wanted)


def test_a_whole_folder_says_that_nothing_is_damaged(folder, wanted, tmp_path, capsys):
    out = tmp_path / "all.pth"
    status, _, err = cli(capsys, "convert", folder, "--salvage", "-o", out)
    assert (status, "nothing is damaged" in err) == (0, True)
    assert check(torch.load(out, weights_only=True)["model"], {}, wanted) == set(KEYS)


def test_the_status_is_1_and_the_lost_keys_are_listed(folder, capsys, tmp_path):
    os.remove(folder / "__2_0.distcp")
    out = tmp_path / "shards"
    status, _, err = cli(capsys, "convert", folder, "--salvage", "-o", f"{out}/", "--max-shard-size", "10B")  # fmt: skip
    assert status == 1
    assert "lost: grid.weight ('__2_0.distcp' is missing)" in err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"copies", "scalar"}
    assert ckptool.load(out).keys() == {"copies", "scalar"}
    assert cli(capsys, "convert", folder, "-o", tmp_path / "strict.pth")[0] == 2


def test_every_file_is_gone(folder, tmp_path):
    for file in folder.glob("*.distcp"):
        os.remove(file)
    with pytest.raises(CkptError, match="nothing to write") as caught:
        salvage(folder, tmp_path / "part.safetensors")
    assert caught.value.slug == "truncated"
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_what_is_hostile_is_not_salvaged(tmp_path):
    def overlap(metadata):
        item_of(metadata, "model.grid.weight").offset = item_of(metadata, "model.rows.weight").offset + 1  # fmt: skip

    def escape(metadata):
        item_of(metadata, "model.grid.weight").relative_path = "../__0_0.distcp"

    for change in (overlap, escape, lambda metadata: Runs(tmp_path / "ran")):
        folder = spoiled(tmp_path, change)
        with pytest.raises(CkptError) as caught:
            salvage(folder, tmp_path / "part.pth")
        assert caught.value.slug in ("header-invalid", "path-escape", "unsafe-pickle")
        assert sorted(os.listdir(tmp_path)) == ["spoiled"]
        shutil.rmtree(folder)


def test_code_among_the_objects_is_not_written(tmp_path):
    state = {"model": {"w": torch.ones(2), "v": torch.ones(3)}, "bad": Runs(tmp_path / "ran")}
    folder = saved(tmp_path / "x", state, single_file_per_rank=False)
    (lost,) = {item_of(metadata_of(folder), "model.v").relative_path}
    os.remove(folder / lost)
    with pytest.raises(CkptError) as caught:
        salvage(folder, tmp_path / "part.pth")
    assert caught.value.slug == "unsafe-pickle"
    assert [key for key, _ in salvage(folder, tmp_path / "part.safetensors").lost] == ["v"]
    assert load_file(tmp_path / "part.safetensors")["w"].tolist() == [1.0, 1.0]
    assert not (tmp_path / "ran").exists()


def test_a_rank_of_a_save_without_collectives_is_missing(tmp_path):
    w = torch.arange(6.0).view(3, 2)
    rows = [({"b": torch.ones(2)}, {"w": ((3, 2), {(n, 0): w[n : n + 1]})}) for n in range(3)]
    folder = save_apart(tmp_path / "x", *rows)
    for file in folder.glob("__1*"):
        os.remove(file)
    done = salvage(folder, tmp_path / "part.pth")
    assert dict(done.lost) == {"w": "its slices hold 4 of 6 elements"}
    assert torch.load(tmp_path / "part.pth", weights_only=True)["b"].tolist() == [1.0, 1.0]
    assert any("'__1.metadata' is missing" in note.text for note in done.notes)


# --- Hugging Face shards ---------------------------------------------------------------------
NET = {f"layer{n}.weight": torch.arange(20.0).view(5, 4) + n for n in range(6)}


@pytest.fixture(params=[".safetensors", ".bin"])
def shards(request, tmp_path):
    """Three shards of two keys each."""
    folder = tmp_path / "shards"
    folder.mkdir()
    places = {}
    for number in range(3):
        part = dict(list(NET.items())[2 * number : 2 * number + 2])
        name = f"model-0000{number + 1}-of-00003{request.param}"
        if request.param == ".bin":
            torch.save(part, folder / name)
        else:
            from safetensors.torch import save_file

            save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    stem = "pytorch_model" if request.param == ".bin" else "model"
    index = folder / f"{stem}{request.param}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def shard(folder, number):
    return next(folder.glob(f"model-0000{number}-*"))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_shard_is_missing(shards, suffix, tmp_path):
    name = shard(shards, 2).name
    os.remove(shard(shards, 2))
    out = tmp_path / f"part{suffix}"
    done = salvage(shards, out)
    assert dict(done.lost) == dict.fromkeys(
        ("layer2.weight", "layer3.weight"), f"{name} is missing"
    )
    found = torch.load(out, weights_only=True) if suffix == ".pth" else load_file(out)
    assert check(found, dict(done.lost), NET) == {f"layer{n}.weight" for n in (0, 1, 4, 5)}


def test_a_shard_is_cut(shards, tmp_path, capsys):
    path = shard(shards, 3)
    whole = path.read_bytes()
    second = whole.index(NET["layer5.weight"].numpy().tobytes())
    path.write_bytes(whole[: second + 8])
    index = next(shards.glob("*.json"))
    status, _, err = cli(capsys, "convert", index, "--salvage", "-o", tmp_path / "part.safetensors")
    assert status == 1
    assert "lost: layer5.weight" in err
    found = load_file(tmp_path / "part.safetensors")
    assert check(found, {"layer5.weight": ""}, NET) == {f"layer{n}.weight" for n in range(5)}


def test_a_shard_of_which_nothing_is_left(shards, tmp_path):
    shard(shards, 1).write_bytes(b"<html>not found</html>")
    done = salvage(shards, tmp_path / "part.safetensors")
    lost = dict(done.lost)
    assert set(lost) == {"layer0.weight", "layer1.weight"}
    assert all(why.startswith(shard(shards, 1).name) for why in lost.values())
    check(load_file(tmp_path / "part.safetensors"), lost, NET)


def test_a_flipped_bit_of_a_bin_shard(shards, tmp_path):
    path = shard(shards, 2)
    data = bytearray(path.read_bytes())
    data[data.index(NET["layer3.weight"].numpy().tobytes()) + 5] ^= 4
    path.write_bytes(data)
    done = salvage(shards, tmp_path / "part.pth")
    wanted = {"layer3.weight"} if path.suffix == ".bin" else set()  # the other records no checksum
    assert dict(done.lost).keys() == wanted
    assert torch.load(tmp_path / "part.pth", weights_only=True).keys() == NET.keys() - wanted


def test_an_index_that_disagrees_is_no_damage(shards, tmp_path):
    index = next(shards.glob("*.json"))
    said = json.loads(index.read_text())
    said["weight_map"]["other.weight"] = shard(shards, 1).name
    index.write_text(json.dumps(said))
    with pytest.raises(CkptError, match=r"other\.weight"):
        salvage(shards, tmp_path / "part.pth")
    os.remove(shard(shards, 2))
    with pytest.raises(CkptError):
        salvage(shards, tmp_path / "part.pth")


# --- others ----------------------------------------------------------------------------------
def test_an_unpacked_archive_without_a_storage(tmp_path):
    value = {"state_dict": {"a": torch.arange(3.0), "b": torch.arange(4.0)}, "epoch": 3}
    torch.save(value, tmp_path / "net.pth")
    with zipfile.ZipFile(tmp_path / "net.pth") as z:
        z.extractall(tmp_path / "x")
    os.remove(tmp_path / "x" / "net" / "data" / "0")
    done = salvage(tmp_path / "x", tmp_path / "part.pth")
    assert [key for key, _ in done.lost] == ["a"]
    assert "storage '0' is not there" in dict(done.lost)["a"]
    found = torch.load(tmp_path / "part.pth", weights_only=True)
    assert (list(found["state_dict"]), found["epoch"]) == (["b"], 3)
    assert found["state_dict"]["b"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_folder_that_stands_for_one_file(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"a": torch.ones(2), "b": torch.arange(9.0)}, folder / "pytorch_model.bin")
    data = bytearray((folder / "pytorch_model.bin").read_bytes())
    data[data.index(torch.arange(9.0).numpy().tobytes()) + 4] ^= 1
    (folder / "pytorch_model.bin").write_bytes(data)
    done = salvage(folder, tmp_path / "part.pth")
    assert [key for key, _ in done.lost] == ["b"]


def test_a_deepspeed_folder_is_refused_with_a_way_out(tmp_path, capsys):
    folder = zero.write(tmp_path / "run", zero.net(), 2, 2)
    status, _, err = cli(capsys, "convert", folder, "--salvage", "-o", tmp_path / "part.pth")
    assert status == 2
    assert "not DeepSpeed ZeRO" in err
    assert "hint: give the damaged file in it" in err
    assert not (tmp_path / "part.pth").exists()


# --- verify says what a salvage would -----------------------------------------------------------
def test_verify_names_what_is_lost_and_the_command(folder, capsys, tmp_path):
    os.remove(folder / "__2_0.distcp")
    report = ckptool.verify(folder)
    assert (report.exit_status, report.tensor_count, report.whole_count) == (2, 11, 3)
    done = salvage(folder, tmp_path / "part.pth")
    assert {key for key, _ in report.lost} == {key for key, _ in done.lost} - {"optimizer"}
    status, out, _ = cli(capsys, "verify", folder)
    assert status == 2
    assert "1 of 4 files are missing: '__2_0.distcp'" in out
    assert "3 of 11 tensors are whole" in out
    assert f"ckptool convert {folder} --salvage -o {folder}.part.pth" in out
    command = f"convert {folder} --salvage -o {folder}.part.pth".split()
    assert cli(capsys, *command)[0] == 1
    found = torch.load(f"{folder}.part.pth", weights_only=True)["model"]
    assert set(found) == {"copies", "grid.copied", "scalar"} - {key for key, _ in report.lost}


def test_verify_of_a_cut_file_names_every_tensor_behind_the_cut(folder):
    path, at, size = item_bytes(folder, "model.grid.weight")
    os.truncate(path, at + size - 1)
    report = ckptool.verify(folder)
    named = {key for row in report.to_dict()["findings"] for key in row["keys"]}
    assert named == {key for key, _ in report.lost}
    assert "grid.weight" in named
    assert report.size_bytes == sum(file.stat().st_size for file in folder.iterdir())


def test_verify_of_shards_offers_it_too(shards, capsys):
    os.remove(shard(shards, 2))
    status, out, _ = cli(capsys, "verify", shards)
    assert status == 2
    assert "4 of 6 tensors are whole" in out
    assert f"ckptool convert {shards} --salvage -o {shards}.part.safetensors" in out
    command = f"convert {shards} --salvage -o {shards}.part.safetensors".split()
    assert cli(capsys, *command)[0] == 1
    assert len(load_file(f"{shards}.part.safetensors")) == 4
    os.remove(shard(shards, 1))
    os.remove(shard(shards, 3))
    assert "--salvage" not in cli(capsys, "verify", shards)[1]


def test_verify_of_an_unpacked_archive_without_a_storage(tmp_path, capsys):
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "net.pth")
    with zipfile.ZipFile(tmp_path / "net.pth") as z:
        z.extractall(tmp_path / "x")
    os.truncate(tmp_path / "x" / "net" / "data" / "1", 15)
    status, out, _ = cli(capsys, "verify", tmp_path / "x")
    assert status == 2
    assert "b: storage '1' has 15 bytes, its tensors need 16" in out
    assert "1 of 2 tensors are whole" in out
