"""DCP folders, written: torch.distributed.checkpoint loads them, key by key and byte by byte."""

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import FSDP, MIXED, assert_same, leaves, metadata_of, oracle, raw, saved
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptool
from ckptool.errors import CkptError, OutputError
from ckptool.formats.dcp import read
from ckptool.places import Folder


def net():
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(made.parameters())
    made(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return made, optimizer


def state_of_training():
    made, optimizer = net()
    return {
        "model": made.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "lists": [[torch.ones(2), 5], [1, 2], {"deep": torch.arange(3)}],
        "pair": (torch.arange(4.0), "x"),
        "view": torch.arange(12.0)[2:8:2],
        "turned": torch.arange(6.0).view(2, 3).t(),
        "f8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "empty": torch.empty(0, 3),
    }


def flattened_by_torch(state, folder):
    """What torch itself would have saved of it, as `dcp_to_torch_save` gives it back."""
    return oracle(saved(folder / "by_torch", state), folder)


def pth(tmp_path, state):
    torch.save(state, tmp_path / "net.pth")
    return tmp_path / "net.pth"


def assert_leaves_same(found, wanted):
    found, wanted = leaves(found), leaves(wanted)
    assert list(found) == list(wanted)
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
            assert raw(found[path]) == raw(value), path
        elif isinstance(value, tuple) and any(isinstance(v, torch.Tensor) for v in value):
            assert [raw(v) if isinstance(v, torch.Tensor) else v for v in found[path]] == [
                raw(v) if isinstance(v, torch.Tensor) else v for v in value
            ]
        else:
            assert found[path] == value, path


# --- what torch loads ------------------------------------------------------------------------
@pytest.mark.parametrize("legacy", [False, True])
def test_a_pth_comes_out_as_torch_would_have_saved_it(legacy, tmp_path):
    state = state_of_training()
    if legacy:
        del state["f8"]
    torch.save(state, tmp_path / "net.pth", _use_new_zipfile_serialization=not legacy)
    ckptool.convert(tmp_path / "net.pth", tmp_path / "out", to="dcp")
    assert_leaves_same(oracle(tmp_path / "out", tmp_path), flattened_by_torch(state, tmp_path))
    ours, theirs = metadata_of(tmp_path / "out"), metadata_of(tmp_path / "by_torch")
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    for key, wanted in theirs.state_dict_metadata.items():
        assert ours.state_dict_metadata[key] == wanted, key
    assert set(ours.storage_data) == set(theirs.storage_data)


@pytest.mark.parametrize("source", [MIXED, FSDP], ids=["mixed", "fsdp"])
def test_many_ranks_come_out_as_one(source, tmp_path):
    ckptool.convert(source, tmp_path / "out", to="dcp")
    assert sorted(os.listdir(tmp_path / "out")) == [".metadata", "__0_0.distcp"]
    assert_same(oracle(tmp_path / "out", tmp_path), oracle(source, tmp_path))
    assert ckptool.verify(tmp_path / "out").whole


def test_dcp_load_fills_a_nets_own_tensors(tmp_path):
    made, optimizer = net()
    state = {"model": made.state_dict(), "optim": optimizer.state_dict()}
    ckptool.convert(pth(tmp_path, state), tmp_path / "out", to="dcp")
    again = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    target = {"model": again.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(dict(again.state_dict()), dict(made.state_dict()))


def test_dcp_load_of_every_tensor(tmp_path):
    ckptool.convert(pth(tmp_path, state_of_training()), tmp_path / "out", to="dcp")
    target = {}
    metadata = metadata_of(tmp_path / "out")
    for key, row in metadata.state_dict_metadata.items():
        if isinstance(row, TensorStorageMetadata):
            blank = torch.zeros(row.size, dtype=row.properties.dtype)
            set_element(target, metadata.planner_data[key], blank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    wanted = leaves(oracle(tmp_path / "out", tmp_path))
    found = leaves(target)
    assert len(found) > 20
    for path, value in found.items():
        if isinstance(value, torch.Tensor):
            assert raw(value) == raw(wanted[path]), path


def test_safetensors_and_shards_come_out_flat(tmp_path):
    from safetensors.torch import save_file

    state = {"b.weight": torch.randn(3, 2), "a.bias": torch.randn(3).to(torch.bfloat16)}
    save_file(state, tmp_path / "net.safetensors", metadata={"format": "pt", "mine": "yes"})
    report = ckptool.convert(tmp_path / "net.safetensors", tmp_path / "out", to="dcp")
    found = oracle(tmp_path / "out", tmp_path)
    assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in state.items()}
    assert report.entries_left == ("__metadata__",)
    ckptool.convert(tmp_path / "net.safetensors", tmp_path / "shards", max_shard_size="10B")
    ckptool.convert(tmp_path / "shards", tmp_path / "out2", to="dcp")
    assert_same(oracle(tmp_path / "out2", tmp_path), found)


def test_changes_are_made_on_the_way(tmp_path):
    made, _ = net()
    state = {"model": {f"module.{k}": v for k, v in made.state_dict().items()}, "junk": 1, "n": 2}
    ckptool.convert(
        pth(tmp_path, state), tmp_path / "out", to="dcp", strip_module=True, dtype="float16",
        drop=["*.running_*"], drop_entry=["junk"],
    )  # fmt: skip
    found = oracle(tmp_path / "out", tmp_path)
    assert list(found) == ["model", "n"]
    wanted = {
        k: v.to(torch.float16) if v.is_floating_point() else v
        for k, v in made.state_dict().items()
        if "running" not in k
    }
    assert_same(found["model"], wanted)


def test_one_table(tmp_path):
    made, _ = net()
    source = pth(tmp_path, {"a": made.state_dict(), "b": {"x": torch.ones(2)}})
    ckptool.convert(source, tmp_path / "out", to="dcp", select="a")
    assert_same(oracle(tmp_path / "out", tmp_path), dict(made.state_dict()))


def test_a_pickled_module_comes_out_as_its_state_dict(tmp_path):
    made, _ = net()
    report = ckptool.convert(pth(tmp_path, {"net": made}), tmp_path / "out", to="dcp")
    assert_same(oracle(tmp_path / "out", tmp_path)["net"], dict(made.state_dict()))
    assert "whole-model" in [note.slug for note in report.notes]


def test_back_and_forth_is_the_same(tmp_path):
    ckptool.convert(MIXED, tmp_path / "one", to="dcp")
    ckptool.convert(tmp_path / "one", tmp_path / "two", to="dcp")
    for name in (".metadata", "__0_0.distcp"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


# --- what is said, what is refused -----------------------------------------------------------
def test_what_dcp_has_no_word_for_is_said(tmp_path):
    made, _ = net()
    state = {
        "model": made.state_dict(),
        "tied": made[0].weight,
        "none": {},
        "opt": {"state": {}, "param_groups": []},
    }
    report = ckptool.convert(pth(tmp_path, state), tmp_path / "out", to="dcp")
    said = {note.slug: note.text for note in report.notes}
    assert "layer versions" in said["dcp-metadata"]
    assert "2 are left out" in said["dcp-empty"]
    assert "tied" in said["tied"]
    found = oracle(tmp_path / "out", tmp_path)
    assert raw(found["tied"]) == raw(made[0].weight)


def test_two_values_of_one_name(tmp_path):
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    with pytest.raises(CkptError) as caught:
        ckptool.convert(pth(tmp_path, state), tmp_path / "out", to="dcp")
    assert (caught.value.slug, caught.value.key) == ("key-collision", "a.b")
    assert not (tmp_path / "out").exists()


def test_keys_that_become_one_text(tmp_path):
    with pytest.raises(CkptError) as caught:
        ckptool.convert(pth(tmp_path, {"a": {1: 2, "1": 3}}), tmp_path / "out", to="dcp")
    assert (caught.value.slug, caught.value.key) == ("key-collision", "1")


def test_objects_that_could_run_code_are_refused(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    source = pth(tmp_path, {"w": torch.ones(2), "x": Bad()})
    with pytest.raises(CkptError) as caught:
        ckptool.convert(source, tmp_path / "out", to="dcp")
    assert (caught.value.slug, caught.value.key) == ("unsafe-pickle", "x")
    assert not (tmp_path / "out").exists()
    ckptool.convert(source, tmp_path / "out", to="dcp", drop_entry=["x"])
    assert_same(oracle(tmp_path / "out", tmp_path), {"w": torch.ones(2)})
    assert not (tmp_path / "ran").exists()


def test_sparse_tensors_are_refused_by_name(tmp_path):
    source = pth(tmp_path, {"w": torch.ones(2), "s": torch.eye(2).to_sparse()})
    with pytest.raises(CkptError, match="sparse") as caught:
        ckptool.convert(source, tmp_path / "out", to="dcp")
    assert caught.value.key == "s"


def test_a_files_name_is_no_folder(tmp_path):
    with pytest.raises(CkptError, match="go into a folder"):
        ckptool.convert(MIXED, tmp_path / "out.pth", to="dcp")


def test_nothing_half_written(tmp_path, monkeypatch):
    """The disk fails while the index is written: neither file is there."""
    from ckptool.formats import dcp_edit

    def fails(*args):
        raise OutputError("no")

    monkeypatch.setattr(dcp_edit, "confirm", fails)
    with pytest.raises(OutputError):
        ckptool.convert(MIXED, tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


def test_an_older_folder_is_replaced_only_when_asked(tmp_path):
    ckptool.convert(MIXED, tmp_path / "out", to="dcp")
    before = (tmp_path / "out" / ".metadata").read_bytes()
    with pytest.raises(OutputError):
        ckptool.convert(FSDP, tmp_path / "out", to="dcp")
    assert (tmp_path / "out" / ".metadata").read_bytes() == before
    ckptool.convert(FSDP, tmp_path / "out", to="dcp", force=True)
    assert [t.key for t in read(Folder(tmp_path / "out")).tables[0].tensors] == ["0.weight"]


def test_the_index_names_torch_classes_alone(tmp_path):
    ckptool.convert(MIXED, tmp_path / "out", to="dcp")
    found = read(Folder(tmp_path / "out"))
    assert {row.verdict for row in found.globals} == {"known"}
    data = (tmp_path / "out" / ".metadata").read_bytes()
    assert data[:2] == b"\x80\x02"
    assert type(pickle.loads(data)).__name__ == "Metadata"
