"""Folders that other programs leave: unpacked archives, Megatron's ranks, Lightning's."""

import argparse
import os
import zipfile

import pytest
import torch
import zero_support as zero
from container_support import same_weights
from verbs_support import cli

import ckptool
from ckptool.errors import (
    CkptError,
    HeaderInvalid,
    NotACheckpoint,
    PathEscape,
    SpecialFile,
    StorageSize,
    Unsupported,
    UsageError,
)
from ckptool.formats.folders import look, read_folder
from ckptool.limits import DEFAULT
from ckptool.places import Folder


def read(folder):
    place = Folder(folder)
    return read_folder(place, DEFAULT, look(place))


def refusal(folder, kind=CkptError):
    with pytest.raises(kind) as caught:
        read(folder)
    return caught.value


def slugs(folder):
    return [note["slug"] for note in ckptool.inspect(folder).to_dict()["notes"]]


# -- unpacked ----------------------------------------------------------------------------------
def unpacked(folder, value, **options):
    """The archive's own folder, as unpackers make it; returns it."""
    torch.save(value, folder / "net.pth", **options)
    with zipfile.ZipFile(folder / "net.pth") as z:
        z.extractall(folder / "out")
    os.remove(folder / "net.pth")
    return folder / "out" / "net"


def resume():
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"state_dict": layer.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def test_an_unpacked_archive_is_read_and_packed_again(tmp_path, capsys):
    value = resume()
    folder = unpacked(tmp_path, value)
    out = tmp_path / "again.pth"
    ckptool.convert(folder, out, fsync=False)
    packed = torch.load(out, weights_only=True)
    assert same_weights(packed["state_dict"], value["state_dict"]) == 2
    assert packed["epoch"] == 3
    step = packed["optimizer"]["state"][0]
    assert torch.equal(step["exp_avg"], value["optimizer"]["state"][0]["exp_avg"])
    assert same_weights(ckptool.load(folder)["state_dict"], value["state_dict"]) == 2
    assert cli(capsys, "diff", folder, out)[0] == 0


def test_the_folder_above_stands_for_the_one_in_it(tmp_path):
    folder = unpacked(tmp_path, resume())
    assert [t.key for t in read(folder.parent).tables[0].tensors] == ["weight", "bias"]
    os.rename(folder, folder.parent / "a")
    unpacked(tmp_path, resume())
    assert "2 unpacked archives" in refusal(folder.parent, UsageError).text


def test_the_note_of_an_unpacked_archive_packs_it(tmp_path, capsys):
    folder = unpacked(tmp_path, resume())
    os.rename(folder, tmp_path / "best_seen.pth")
    (note,) = [n for n in read(tmp_path / "best_seen.pth").notes if n.slug == "unpacked"]
    assert note.command.endswith("best_seen.packed.pth")
    assert cli(capsys, *note.command.split()[1:])[0] == 0
    assert torch.load(tmp_path / "best_seen.packed.pth", weights_only=True)["epoch"] == 3


def test_big_endian_storages_of_an_unpacked_archive_come_out_swapped(tmp_path):
    folder = unpacked(tmp_path, {"w": torch.arange(6, dtype=torch.float64)})
    (folder / "byteorder").write_text("big")
    assert ckptool.load(folder)["w"].numpy().tobytes() == (
        torch.arange(6, dtype=torch.float64).numpy().byteswap().tobytes()
    )
    (folder / "byteorder").write_text("middle")
    refusal(folder, HeaderInvalid)


def test_a_storage_that_is_missing_or_cut_is_named(tmp_path):
    folder = unpacked(tmp_path, resume())
    path = folder / "data" / "1"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert refusal(folder, StorageSize).text == "storage '1' has 7 bytes, its tensors need 8"
    path.unlink()
    assert "storage '1' is not there" in refusal(folder, StorageSize).text
    os.mkfifo(path)
    assert "FIFO" in refusal(folder, StorageSize).text


def test_a_storage_may_not_be_a_link_out(tmp_path):
    folder = unpacked(tmp_path, resume())
    os.rename(folder / "data" / "1", tmp_path / "secret")
    os.symlink(tmp_path / "secret", folder / "data" / "1")
    refusal(folder, PathEscape)


def test_a_key_that_is_a_path_is_refused(tmp_path):
    folder = unpacked(tmp_path, {"w": torch.ones(2)})
    data = (folder / "data.pkl").read_bytes()
    assert data.count(b"X\1\0\0\x000") == 1
    (folder / "data.pkl").write_bytes(data.replace(b"X\1\0\0\x000", b"X\5\0\0\0../aa"))
    (folder / "aa").write_bytes(bytes(8))
    refusal(folder, PathEscape)


def test_verify_of_an_unpacked_archive_says_what_it_cannot_know(tmp_path, capsys):
    status, out, _ = cli(capsys, "verify", unpacked(tmp_path, resume()))
    assert status == 0
    assert "unpacked files have no checksums" in out


def test_an_unpacked_script_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "net.pt")
    with zipfile.ZipFile(tmp_path / "net.pt") as z:
        z.extractall(tmp_path / "out")
    assert "TorchScript" in refusal(tmp_path / "out" / "net", Unsupported).text


# -- Megatron ----------------------------------------------------------------------------------
def megatron(folder, tensor=2, pipeline=2, iteration="500"):
    name = f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration
    args = argparse.Namespace(
        **{f"option_{at}": at for at in range(100)},
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
    )  # fmt: skip
    for tp in range(tensor):
        for pp in range(pipeline):
            rank = folder / name / f"mp_rank_{tp:02d}_{pp:03d}"
            rank.mkdir(parents=True)
            model = {"embedding.weight": torch.full((4, 2), 10.0 * tp + pp), "bias": torch.ones(2)}
            value = {"args": args, "iteration": 500, "model": model, "checkpoint_version": 3.0}
            torch.save(value, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)
    return folder


def test_the_ranks_of_megatron_are_listed(tmp_path, capsys):
    folder = megatron(tmp_path / "run")
    status, out, _ = cli(capsys, "inspect", folder)
    assert status == 0
    assert "Megatron, 4 ranks (tp 2, pp 2), iter_0000500" in out
    found = read(folder)
    assert [t.path for t in found.tables] == [
        (f"mp_rank_{tp:02d}_{pp:03d}", "model") for tp in range(2) for pp in range(2)
    ]
    assert [len(t.tensors) for t in found.tables] == [2, 2, 2, 2]
    assert cli(capsys, "verify", folder)[0] == 0
    assert cli(capsys, "diff", folder, folder)[0] == 0
    with ckptool.open(folder) as held:
        record = held.at("mp_rank_01_001.model")["embedding.weight"]
        assert record.torch().unique().tolist() == [11.0]


def test_megatron_is_not_joined_by_guess(tmp_path, capsys):
    folder = megatron(tmp_path / "run")
    status, _, err = cli(capsys, "convert", folder, "-o", tmp_path / "out.pth")
    assert (status, "inspected, not converted" in err) == (2, True)
    assert "tools/checkpoint/convert.py" in err
    with pytest.raises(Unsupported, match="part of the model"):
        ckptool.load(folder)
    with pytest.raises(Unsupported, match="part of the model"):
        ckptool.load_into(torch.nn.Linear(2, 2), folder)


def test_missing_ranks_of_megatron_are_told(tmp_path):
    folder = megatron(tmp_path / "run")
    os.remove(folder / "iter_0000500" / "mp_rank_01_000" / "model_optim_rng.pt")
    (note,) = [n for n in read(folder).notes if n.slug == "megatron-ranks-missing"]
    assert note.text == "its arguments ask for 4 ranks, 3 are there"


def test_the_pointer_of_megatron_may_not_lead_out_or_nowhere(tmp_path):
    folder = megatron(tmp_path / "run", iteration="release")
    assert len(read(folder).tables) == 4
    pointer = folder / "latest_checkpointed_iteration.txt"
    pointer.write_text("7")
    assert "iter_0000007" in refusal(folder, SpecialFile).text
    pointer.write_text("../run")
    refusal(folder, PathEscape)
    pointer.write_bytes(b"\xff\n")
    refusal(folder, HeaderInvalid)


def test_one_rank_of_megatron_is_a_file_as_any_other(tmp_path):
    folder = megatron(tmp_path / "run") / "iter_0000500" / "mp_rank_01_000"
    ckptool.convert(folder, tmp_path / "out.pth", fsync=False)
    found = torch.load(tmp_path / "out.pth", weights_only=False)
    assert found["model"]["embedding.weight"].unique().tolist() == [10.0]


def test_an_iteration_that_is_dcp_is_pointed_at(tmp_path):
    folder = megatron(tmp_path / "run")
    (folder / "iter_0000500" / ".metadata").write_bytes(b"x")
    assert refusal(folder, UsageError).hint == f"give {folder}/iter_0000500"


# -- Lightning ---------------------------------------------------------------------------------
def ckpts(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 1}, folder / name)
    return folder


def test_of_several_lightning_files_one_is_proposed(tmp_path):
    folder = ckpts(tmp_path / "a", "epoch=9.ckpt", "epoch=10.ckpt")
    error = refusal(folder, UsageError)
    assert "2 Lightning checkpoints" in error.text
    assert error.hint.endswith("epoch=10.ckpt")
    assert refusal(ckpts(folder, "last.ckpt"), UsageError).hint.endswith("last.ckpt")


def test_one_lightning_file_is_read_and_a_sharded_one_is_named(tmp_path):
    folder = ckpts(tmp_path / "a", "epoch=9.ckpt")
    assert ckptool.load(folder)["epoch"] == 1
    zero.write(folder / "epoch=11.ckpt", zero.net(), 2, 2, tag="checkpoint")
    assert refusal(folder, UsageError).hint.endswith("epoch=11.ckpt")
    assert len(ckptool.load(folder / "epoch=11.ckpt")) == 13


def test_lightnings_sharded_folder_says_where_the_trainer_is(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert "lightning-folder" not in slugs(tmp_path / "a")
    torch.save({"epoch": 1}, tmp_path / "a" / "meta.pt")
    assert "lightning-folder" in slugs(tmp_path / "a")


def test_a_trainers_folder_is_read_by_its_model_and_names_deepspeeds(tmp_path):
    folder = zero.write(tmp_path / "checkpoint-5", zero.net(), 2, 2)
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    assert list(ckptool.load(folder)) == ["w"]
    (note,) = [
        n for n in ckptool.inspect(folder).to_dict()["notes"] if n["slug"] == "folder-choice"
    ]
    assert "'global_step5'" in note["text"]
    (folder / "latest").write_text("gone")
    assert list(ckptool.load(folder)) == ["w"]


def test_a_folder_of_other_weights_still_asks_for_one(tmp_path):
    folder = ckpts(tmp_path / "a", "one.pth", "two.pth")
    with pytest.raises(NotACheckpoint, match=r"'one\.pth', 'two\.pth'"):
        look(Folder(folder))


# -- what is no checkpoint ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["latest", "x/mp_rank_00_model_states.pt"], "x/mp_rank_00_model_states.pt"),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"], "mp_rank_00_model_states.pt"),
        (["mp_rank_00/model_optim_rng.pt"], "mp_rank_00/model_optim_rng.pt"),
        (["mp_rank_00/model_rng.pt", "mp_rank_01/model_optim_rng.pt"], "mp_rank_00/model_rng.pt"),
        (["a/data.pkl", "a/data/0"], ""),
    ],
    ids=range(5),
)  # fmt: skip
def test_a_file_that_is_something_else_is_named(tmp_path, files, named):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CkptError) as caught:
        ckptool.inspect(tmp_path)
    assert caught.value.path == (str(tmp_path / named) if named else str(tmp_path))
    if "latest" not in files:  # there, one file stands for the folder
        assert ckptool.verify(tmp_path).exit_status == 2
