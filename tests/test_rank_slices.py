"""Slices of ranks in .safetensors, as HuggingFaceStorageWriter(save_distributed=True) leaves them."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import Sliced
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from verbs_support import cli

import ckptool

W = torch.arange(12.0).view(4, 3)


class _OfRank(HuggingFaceStorageWriter):
    """Writes what one rank of several would."""

    def __init__(self, folder, rank):
        super().__init__(folder, save_distributed=True)
        self._as = rank

    def prepare_global_plan(self, plans):
        (plan,) = super().prepare_global_plan(plans)
        return [dataclasses.replace(plan, storage_data={"shard_index": self._as + 1})]


@pytest.fixture
def folder(tmp_path):
    """Two ranks: W by rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank in range(2):
            rows = {(2 * rank, 0): W[2 * rank : 2 * rank + 2].contiguous()}
            writer = _OfRank(tmp_path / "run", rank)
            planner = Sliced({"w": ((4, 3), rows)})
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    return tmp_path / "run"


def texts(place):
    notes = ckptool.inspect(place).to_dict()["notes"]
    return [note["text"] for note in notes if note["slug"] == "rank-slices"]


def test_the_folder_is_refused_by_what_it_is(folder, capsys):
    for verb in ("inspect", "verify"):
        status, _, err = cli(capsys, verb, folder)
        assert status == 2
        assert "slices of 2 ranks, which no index joins: 'shard-00001-model-00001-of-00001" in err
        assert "consolidate_safetensors_files" in err


def test_what_the_hint_says_makes_it_readable(folder, tmp_path):
    (tmp_path / "whole").mkdir()
    consolidate_safetensors_files(str(folder), str(tmp_path / "whole"), {"w": 1})
    assert torch.equal(ckptool.load(tmp_path / "whole")["w"], W)
    assert texts(tmp_path / "whole") == []


def test_one_file_of_it_says_that_it_is_a_part(folder, tmp_path, capsys):
    first, second = sorted(folder.iterdir())
    assert texts(first)[0].endswith("may be the first slices of larger ones")
    assert texts(second)[0].endswith("'w' is a slice of a larger tensor")
    status, _, err = cli(capsys, "convert", second, "-o", tmp_path / "part.pth")
    assert (status, "a slice of a larger tensor" in err) == (0, True)


def test_anybodys_text_says_nothing(tmp_path):
    from safetensors.torch import save_file

    for text in ("[", "[]", '{"w": 1}', '{"w": {"saved_offsets": "1"}}', "[" * 5000):
        save_file({"w": W}, tmp_path / "net.safetensors", {"DCP_SHARDING_INFO": text})
        assert texts(tmp_path / "net.safetensors") == []


def test_a_save_by_rank_0_alone_is_no_slice(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": W}, storage_writer=HuggingFaceStorageWriter(tmp_path / "x"), no_dist=True)
    assert texts(tmp_path / "x") == []
    assert torch.equal(ckptool.load(tmp_path / "x")["w"], W)
