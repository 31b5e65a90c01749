"""DCP folders for tests: saved by torch, or a committed one with another `.metadata`."""

import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import dcp_ranks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

FOLDERS = Path(__file__).parent / "fixtures" / "dcp"
MIXED, FSDP = FOLDERS / "mixed", FOLDERS / "fsdp"
SLICED = "grid.weight"


def saved(folder, state, **writer):
    """`state`, saved by one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = dcp.FileSystemWriter(folder, **writer)
        dcp.save(state, storage_writer=made, no_dist=True)
    return folder


class _Sliced(DefaultSavePlanner):
    """Saves slices of tensors as several ranks do, in one process, beside a state_dict."""

    def __init__(self, slices):
        super().__init__()
        self._slices = slices

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = [
            WriteItem(
                MetadataIndex(key, torch.Size(start)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(start), part.shape),
                    TensorProperties.create_from_tensor(part),
                    torch.Size(shape),
                ),
            )
            for key, (shape, parts) in self._slices.items()
            for start, part in parts.items()
        ]
        places = {key: tuple(key.split(".")) for key in self._slices}
        self.plan = SavePlan(plan.items + items, planner_data=plan.planner_data | places)
        return self.plan

    def lookup_object(self, index):
        if index.fqn not in self._slices:
            return super().lookup_object(index)
        return self._slices[index.fqn][1][tuple(index.offset)]


def save_slices(folder, slices):
    """`slices`: {key: (shape, {offsets: tensor})}, each slice with the strides that it has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({}, checkpoint_id=folder, planner=_Sliced(slices), no_dist=True)
    return folder


class _OfRank(dcp.FileSystemWriter):
    """Writes what one rank of several would."""

    def __init__(self, folder, rank, **options):
        super().__init__(folder, **options)
        self._as = rank

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        super().set_up_storage_writer(is_coordinator, *args, **(kwargs | {"rank": self._as}))


def save_apart(folder, *ranks, **options):
    """As so many ranks save with use_collectives=False: of each (its state, its slices as
    `save_slices` takes them).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank, (state, slices) in enumerate(ranks):
            dcp.save(
                state, storage_writer=_OfRank(folder, rank, **options), planner=_Sliced(slices),
                no_dist=True, use_collectives=False,
            )  # fmt: skip
    return folder


def by_ranks(folder, kind):
    """What four processes save, by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
               "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
               dcp_ranks.__file__, str(folder), kind]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def oracle(folder, tmp_path):
    """What torch makes of the folder: `dcp_to_torch_save`, loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(folder), tmp_path / "oracle.pth")
    return torch.load(tmp_path / "oracle.pth", weights_only=False)


def leaves(value, path=()):
    """{path: value} of nested dicts and lists; numbers as keys of dicts are texts, as in DCP."""
    if isinstance(value, dict):
        rows = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list):
        rows = list(enumerate(value))
    else:
        return {path: value}
    found = {}
    for key, inner in rows:
        found |= leaves(inner, (*path, key))
    return found


def raw(tensor):
    """The bytes of its elements, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found, wanted):
    """Both hold the same places in the same order, each value to the byte."""
    found, wanted = leaves(found), leaves(wanted)
    assert list(found) == list(wanted)
    for path, value in wanted.items():
        other = found[path]
        if isinstance(value, torch.Tensor):
            assert (other.dtype, other.shape) == (value.dtype, value.shape), path
            assert raw(other) == raw(value), path
        else:
            assert type(other) is type(value), path
            assert other == value, path


def metadata_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def spoiled(tmp_path, change, source=MIXED):
    """A copy of a committed folder with its metadata changed: `change(metadata)`, which may
    return another object to be pickled.
    """
    folder = tmp_path / "spoiled"
    shutil.copytree(source, folder)
    metadata = metadata_of(folder)
    metadata = change(metadata) or metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def item_of(metadata, key, number=0):
    """The place of an item of a key."""
    return [info for at, info in metadata.storage_data.items() if at.fqn == key][number]


class Runs:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = os.fspath(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
