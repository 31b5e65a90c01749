"""How load fills memory: checksums, threads, small buffers, faults in the middle, one tensor alone."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from container_support import big_endian, records_of, rezipped
from load_support import Same, net, saved
from verbs_support import FIXTURES, LEGACY, data_offset, load

import ckptool
from ckptool.errors import CkptError, CrcMismatch, InputChanged, Truncated, Unsupported
from ckptool.models import tensors_memory
from ckptool.places import FileSource


def many():
    """Storages of all sizes around the blocks and parts they are read in."""
    sizes = (1, 3, 1000, 1 << 18, (1 << 18) + 1, 3 << 18)
    return OrderedDict((f"t{n}", torch.randint(0, 255, (n,), dtype=torch.int32)) for n in sizes)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks and parts small enough for a test: every way of reading is taken."""
    monkeypatch.setattr(tensors_memory, "BLOCK", 1 << 12)
    monkeypatch.setattr(tensors_memory, "PART", 1 << 18)
    monkeypatch.setattr(tensors_memory, "FEW", 0)
    monkeypatch.setattr(tensors_memory, "WINDOW", 1 << 19)


WAYS = ["one thread", "threads", "through a buffer"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch, small_blocks):
    if request.param == WAYS[0]:
        monkeypatch.setattr(tensors_memory, "THREADS", 1)
    else:
        monkeypatch.setattr(tensors_memory, "THREADS", 3)
    monkeypatch.setattr(tensors_memory, "THROUGH_BUFFER", request.param == WAYS[2])
    return request.param


def files(folder):
    """The same numbers in every encoding."""
    from safetensors.torch import save_file

    sd = many()
    made = {
        "zip": saved(sd, folder / "a.pth"),
        "legacy": saved(sd, folder / "legacy.pth", **LEGACY),
        "deflated": rezipped(folder / "small.pth", records_of(sd), zipfile.ZIP_DEFLATED),
        "swapped": big_endian(folder / "big.pth", sd),
        "safetensors": folder / "a.safetensors",
    }
    save_file(sd, made["safetensors"])
    return sd, made


def test_every_way_reads_the_same(way, tmp_path):
    sd, made = files(tmp_path)

    for path in made.values():
        found = ckptool.load(path)
        assert sorted(found) == sorted(sd)
        assert all(torch.equal(found[key], value) for key, value in sd.items()), path


@pytest.mark.parametrize("key", ["t1", "t1000", "t786432"])
def test_a_flipped_bit_is_found_and_named(way, key, tmp_path):
    sd = many()
    path = saved(sd, tmp_path / "a.pth")
    at = data_offset(path, f"data/{list(sd).index(key)}") + sd[key].nbytes - 1
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 4]))

    with pytest.raises(CrcMismatch, match=rf"a\.pth: bytes of '{key}' do not have their recorded checksum") as info:  # fmt: skip
        ckptool.load(path)
    assert "check=False" in info.value.hint
    found = ckptool.load(path, check=False)
    assert int(found[key][-1]) == int(sd[key][-1]) ^ (4 << 24)


def test_a_flipped_bit_in_a_deflated_storage(tmp_path):
    sd = OrderedDict(a=torch.arange(1000))
    records = records_of(sd)
    path = rezipped(tmp_path / "a.pth", records, zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as z:
        info = z.getinfo("net/data/0")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(CkptError, match=r"a\.pth: "):
        ckptool.load(path)


def test_a_file_without_checksums_is_read(tmp_path):
    Same().same(load(FIXTURES / "nocrc.pth"), ckptool.load(FIXTURES / "nocrc.pth"))


# -- faults ------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_is_cut_while_it_is_read(threads, small_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_memory, "THREADS", threads)
    path = saved(many(), tmp_path / "a.pth")
    real, seen = FileSource.read_into, []

    def cutting(self, offset, buffer):
        seen.append(offset)
        if len(seen) == 20:
            with open(path, "r+b") as f:
                f.truncate(1000)
        return real(self, offset, buffer)

    monkeypatch.setattr(FileSource, "read_into", cutting)
    with pytest.raises(Truncated, match="became shorter while it was read"):
        ckptool.load(path)


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = saved(many(), tmp_path / "a.pth")
    monkeypatch.setattr(FileSource, "unchanged", lambda self: False)

    with pytest.raises(InputChanged):
        ckptool.load(path)


def test_no_room_is_said_with_the_key(tmp_path, monkeypatch):
    path = saved({"w": torch.ones(3)}, tmp_path / "a.pth")

    def full(*args, **options):
        raise RuntimeError("CUDA out of memory. Tried to allocate\nlots")

    monkeypatch.setattr(torch, "UntypedStorage", full)
    with pytest.raises(CkptError, match=r"no room for 12 bytes on cpu: CUDA out of memory.*key 'w'") as info:  # fmt: skip
        ckptool.load(path)
    assert info.value.slug == "no-memory"


def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    sd = many()
    path = saved(sd, tmp_path / "a.pth")
    real, read = FileSource.read_into, []
    monkeypatch.setattr(FileSource, "read_into", lambda self, offset, buffer: (read.append(len(buffer)), real(self, offset, buffer))[1])  # fmt: skip

    ckptool.load(path, "meta")
    assert read == []
    with ckptool.open(path) as f:
        assert torch.equal(f.weights["t1000"].torch(), sd["t1000"])
    assert sum(read) == 4000


def test_threads_leave_nothing_running(small_blocks, tmp_path):
    import threading

    before = threading.active_count()
    ckptool.load(saved(many(), tmp_path / "a.pth"))

    assert threading.active_count() == before


# -- one tensor --------------------------------------------------------------------------------
def test_a_record_gives_its_numbers(tmp_path):
    """As a torch tensor and as an array, of views of one storage too."""
    base = torch.arange(24.0)
    one = OrderedDict(base=base, step=base[1::3], t=base.view(4, 6).t(), expanded=torch.ones(2, 1).expand(2, 3),
                      c=torch.randn(3, dtype=torch.complex64).conj(), i=torch.randn(3, dtype=torch.complex64).conj().imag,
                      scalar=torch.tensor(3), empty=torch.ones(0, 2), p=torch.nn.Parameter(torch.ones(2)))  # fmt: skip
    paths = [saved(one, tmp_path / "a.pth"), saved(one, tmp_path / "b.pth", **LEGACY),
             rezipped(tmp_path / "c.pth", records_of(one), zipfile.ZIP_DEFLATED)]  # fmt: skip
    for path in paths:
        with ckptool.open(path) as f:
            for key, want in one.items():
                record = f.weights[key]
                found = record.torch()
                assert type(found) is type(want)
                assert torch.equal(found, want)
                assert found.stride() == want.stride()
                array = record.numpy()
                assert np.array_equal(array, want.detach().resolve_conj().resolve_neg().numpy())
                assert array.shape == tuple(want.shape)
            assert f.weights["t"].numpy().strides == (4, 24)
            assert f.weights["step"].numpy().base is not None


def test_numpy_needs_no_torch_and_reads_what_the_view_reaches(tmp_path, monkeypatch):
    big = torch.arange(1 << 20, dtype=torch.int32)
    path = saved({"a": big[5:9], "b": big}, tmp_path / "a.pth", **LEGACY)
    real, read = FileSource.read, []
    with ckptool.open(path) as f:
        monkeypatch.setattr(FileSource, "read", lambda self, offset, size: (read.append(size), real(self, offset, size))[1])  # fmt: skip
        assert f.weights["a"].numpy().tolist() == [5, 6, 7, 8]
    assert read == [16]


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("dtypes.pth", "bfloat16", "numpy has no bfloat16"),
        ("quantized.pth", "per_tensor", "of the kind 'quantized'"),
        ("sparse.pth", "coo", "of the kind 'sparse'"),
    ],
)
def test_what_numpy_cannot_hold_says_so(name, key, words):
    with ckptool.open(FIXTURES / name) as f:
        with pytest.raises(Unsupported, match=words) as info:
            f.weights[key].numpy()
        assert ".torch()" in info.value.hint
        assert f.weights[key].torch() is not None


def test_records_of_other_containers(tmp_path):
    model = net()
    source = saved(model.state_dict(), tmp_path / "a.pth")
    ckptool.convert(source, tmp_path / "shards", to="shards", max_shard_size=100, fsync=False)
    ckptool.convert(source, tmp_path / "a.safetensors", fsync=False)
    for path in (tmp_path / "shards", tmp_path / "a.safetensors", io.BytesIO((tmp_path / "a.safetensors").read_bytes())):  # fmt: skip
        with ckptool.open(path) as f:
            for key, want in model.state_dict().items():
                assert torch.equal(f.weights[key].torch(), want)
                assert np.array_equal(f.weights[key].numpy(), want.numpy())
    for name in ("big_endian.pth", "tar_01x.pth", "plain_pickle.pkl", "numpy_pickle.pkl",
                 "torchscript.pt", "exported.pt2", "whole_model.pth"):  # fmt: skip
        with ckptool.open(FIXTURES / name) as f:
            for record in f.weights.values():
                found = record.torch()
                assert np.array_equal(record.numpy(), found.detach().numpy()), (name, record.key)


def test_a_damaged_record_names_its_key(tmp_path):
    sd = many()
    path = saved(sd, tmp_path / "a.pth")
    with open(path, "r+b") as f:
        f.seek(data_offset(path, "data/2") + 40)
        f.write(b"\xff\xff")
    with ckptool.open(path) as f:
        for read in (f.weights["t1000"].numpy, f.weights["t1000"].torch):
            with pytest.raises(CrcMismatch, match=r"key 't1000'"):
                read()
        assert f.weights["t3"].numpy().tolist() == sd["t3"].tolist()
