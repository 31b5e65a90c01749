"""convert between torch's own containers: zip, legacy stream, tar and bare pickles."""

from __future__ import annotations

import argparse
import pickle
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from container_support import (
    convert,
    legacy_parts,
    promise_kept,
    python2_legacy,
    same_weights,
    st_loaded,
    ties,
)
from fixtures.make_fixtures import Net, save
from formats_support import FLOAT, dictionary, legacy, name, pickled, storage, tensor, tup
from torch import nn
from verbs_support import FIXTURES, LEGACY, assert_same, load, notes, save_resume

import ckptool
from ckptool.errors import Unsupported


def format_of(path):
    return ckptool.inspect(path).checkpoint.format


# -- legacy to zip -----------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_legacy_training_file_comes_out_whole(protocol, tmp_path):
    path = save_resume(tmp_path / "net.pth", **LEGACY, pickle_protocol=protocol)
    convert(path, tmp_path / "o.pth", to="zip")

    before, after = load(path), load(tmp_path / "o.pth")
    assert assert_same(before, after) == 38
    sd = after["state_dict"]
    assert sd["module.head.weight"].data_ptr() == sd["module.fc.weight"].data_ptr()
    assert after["args"] == argparse.Namespace(arch="small", lr=0.1, device="cuda:0", gpus=[0, 1])
    assert after["optimizer"]["state"][0]["exp_avg"].shape == (2, 1, 3, 3)
    convert(path, tmp_path / "cpu.pth", to="zip", to_cpu=True)
    promise_kept(tmp_path / "cpu.pth", weights_only=False)


def test_a_legacy_file_of_float8_that_torch_cannot_load(tmp_path):
    """torch 2.13 writes it and cannot read it back; as a zip it can."""
    sd = OrderedDict(
        w=torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 4).t(),
        n=torch.arange(5).to(torch.uint16), b=torch.ones(3),
    )  # fmt: skip
    torch.save(sd, tmp_path / "net.pth", **LEGACY)
    with pytest.raises(Exception, match=r"[Dd]type|UntypedStorage"):
        torch.load(tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth", to="zip")

    after = promise_kept(tmp_path / "o.pth")
    same_weights(sd, after)
    assert after["w"].stride() == (1, 4)


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.made = function, args

    def __reduce__(self):
        return self.made


def python2_dict(sd):
    """Python 2 gives the items of an OrderedDict as a list of pairs."""
    return Call(OrderedDict, [[key, value] for key, value in sd.items()])


@pytest.mark.parametrize("target", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("spelled", [OrderedDict, python2_dict], ids=["SETITEMS", "pairs"])
def test_a_legacy_file_of_python_2(spelled, target, tmp_path):
    base = torch.arange(12.0)
    sd = OrderedDict(
        [("fc.w", base.view(3, 4).t()), ("fc.b", base[2:5]), ("größe", torch.arange(3))]
    )
    path = python2_legacy(tmp_path / "py2.pth", spelled(sd))
    assert b"U\x04fc.w" in path.read_bytes()
    out = tmp_path / ("o.safetensors" if target == "safetensors" else "o.pth")
    convert(path, out, to=target)

    if target == "safetensors":
        same_weights(sd, st_loaded(out), tied=False)
        return
    before = torch.load(path)
    after = promise_kept(out) if target == "zip" else load(out, weights_only=True)
    assert_same(before, after)
    same_weights(sd, after)
    assert b"U\x04fc.w" not in out.read_bytes() or target == "legacy"


def test_strings_of_python_2_that_are_no_utf8(tmp_path):
    """R62: torch.load fails; the zip loads, the string read as Latin-1."""
    obj = {"state_dict": OrderedDict(w=torch.ones(2, 2)), "note": "NOTE", "ok": "größe"}
    odd = b"/home/\x8c\xe9\xff/data"
    path = python2_legacy(tmp_path / "py2.pth", obj, {"NOTE": odd})
    with pytest.raises(UnicodeDecodeError):
        load(path)
    convert(path, tmp_path / "o.pth", to="zip")

    after = promise_kept(tmp_path / "o.pth")
    assert (after["note"], after["ok"]) == (odd.decode("latin-1"), "größe")
    assert torch.equal(after["state_dict"]["w"], torch.ones(2, 2))


def raw(data):
    """A byte string of Python 2."""
    return b"U" + bytes([len(data)]) + data


def numpy_dtype(code):
    made = name("numpy", "dtype") + tup(raw(code), 0, 1) + b"R"
    return made + tup(3, raw(b"<"), None, None, None, -1, -1, 0) + b"b"


OLD = storage("0", 6, FLOAT, "cpu", None)
NUMBERS = np.array([1.5, -2.0, 1e300])
SCALAR = name("numpy.core.multiarray", "scalar") + tup(numpy_dtype(b"f8"), raw(NUMBERS[:1].tobytes())) + b"R"  # fmt: skip


def numpy_array(values, code, shape, fortran=False):
    empty = name("numpy.core.multiarray", "_reconstruct")
    empty += tup(name("numpy", "ndarray"), (0,), raw(b"b")) + b"R"
    return empty + tup(1, shape, numpy_dtype(code), fortran, raw(values)) + b"b"


def test_numbers_of_numpy_that_python_2_wrote(tmp_path):
    """Their bytes are a string there, and no text: they must come out as bytes."""
    rows = [(raw(b"state_dict"), dictionary((raw(b"w"), tensor(OLD)), (raw(b"b"), tensor(OLD)))),
            (raw(b"best"), SCALAR), (raw(b"seen"), numpy_array(NUMBERS.tobytes(), b"f8", (3,)))]  # fmt: skip
    (tmp_path / "py2.pth").write_bytes(legacy(pickled(dictionary(*rows))))
    convert(tmp_path / "py2.pth", tmp_path / "o.pth", to="zip")
    before, after = load(tmp_path / "py2.pth", encoding="latin1"), load(tmp_path / "o.pth")

    assert after["best"] == before["best"] == 1.5
    assert type(after["best"]) is np.float64
    assert after["seen"].tobytes() == NUMBERS.tobytes()
    assert torch.equal(after["state_dict"]["w"], before["state_dict"]["w"])


def test_views_of_storages_become_offsets(tmp_path):
    """Files of torch 0.2: a persistent id with a view (key, offset, size) of its storage."""
    twelve = struct.pack("<q12f", 12, *range(12))
    one, two = storage("0", 12, FLOAT, "cpu", ("55", 5, 4)), storage("0", 12, FLOAT, "cpu", None)
    rows = [("v", tensor(one, 1, (3,), (1,))), ("w", tensor(two, 2, (2, 3), (3, 1)))]
    (tmp_path / "old.pth").write_bytes(legacy(pickled(dictionary(*rows)), data=twelve))
    before = load(tmp_path / "old.pth")
    convert(tmp_path / "old.pth", tmp_path / "o.pth", to="zip")
    convert(tmp_path / "old.pth", tmp_path / "o.safetensors")
    convert(tmp_path / "old.pth", tmp_path / "l.pth", drop="w", to="legacy")

    after = promise_kept(tmp_path / "o.pth")
    assert before["v"].tolist() == after["v"].tolist() == [6, 7, 8]
    assert after["v"].storage_offset() == 6
    assert after["v"].untyped_storage().data_ptr() == after["w"].untyped_storage().data_ptr()
    assert st_loaded(tmp_path / "o.safetensors")["v"].tolist() == [6, 7, 8]
    assert load(tmp_path / "l.pth")["v"].tolist() == [6, 7, 8]


# -- to legacy ---------------------------------------------------------------------------------
def odd_views():
    base = torch.arange(24.0)
    return OrderedDict(
        base=base, again=base, slice=base[3:9].view(2, 3), t=base.view(4, 6).t(), steps=base[::2],
        scalar=torch.tensor(5), empty=torch.zeros(0, 3), wide=torch.tensor([3.0]).expand(2, 5),
        p=nn.Parameter(torch.ones(2)), c=torch.ones(2) * 1j, b=torch.tensor([True, False]),
        h=torch.ones(3).bfloat16(), i=torch.arange(3, dtype=torch.int8),
    )  # fmt: skip


@pytest.mark.parametrize("weights_only", [True, False])
def test_zip_to_legacy_is_what_old_torch_reads(weights_only, tmp_path):
    """R51. The bytes are those of torch's own legacy writer, but for the order of storages."""
    torch.save(odd_views(), tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth", to="legacy")

    after = load(tmp_path / "o.pth", weights_only=weights_only)
    assert assert_same(load(tmp_path / "net.pth"), after) == 13
    assert not zipfile.is_zipfile(tmp_path / "o.pth")
    head, _ = legacy_parts(odd_views())
    assert (tmp_path / "o.pth").read_bytes().startswith(b"".join(head[:2]))
    assert format_of(tmp_path / "o.pth") == "torch-legacy"


def test_a_training_file_as_legacy_and_back(tmp_path):
    path = save_resume(tmp_path / "net.pth")
    convert(path, tmp_path / "l.pth", to="legacy")
    convert(tmp_path / "l.pth", tmp_path / "z.pth", to="zip")

    assert assert_same(load(path), load(tmp_path / "l.pth")) == 38
    assert_same(load(path), load(tmp_path / "z.pth"))
    assert ckptool.inspect(tmp_path / "l.pth").checkpoint.storages[0].device == "cuda:0"


def test_safetensors_to_legacy(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.safetensors")
    convert(tmp_path / "o.safetensors", tmp_path / "l.pth", to="legacy")

    same_weights(Net().state_dict(), load(tmp_path / "l.pth", weights_only=True))
    assert format_of(tmp_path / "l.pth") == "torch-legacy"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16"])
def test_what_old_torch_has_not_is_refused_by_name(dtype, tmp_path):
    sd = OrderedDict(w=torch.ones(2), odd=torch.ones(2).to(getattr(torch, dtype)))
    torch.save(sd, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "net.safetensors")
    for source in ("net.pth", "net.safetensors"):
        with pytest.raises(Unsupported, match=dtype) as caught:
            convert(tmp_path / source, tmp_path / "o.pth", to="legacy")
        assert (caught.value.key, "--to zip" in caught.value.hint) == ("odd", True)
        assert not (tmp_path / "o.pth").exists()
    if dtype.startswith("float8"):
        convert(tmp_path / "net.pth", tmp_path / "o.pth", to="legacy", dtype="float16")
        assert load(tmp_path / "o.pth", weights_only=True)["odd"].tolist() == [1, 1]


def legacy_file(path):
    obj = {"epoch": 3, "state_dict": nn.DataParallel(Net()).state_dict(), "optimizer": {"lr": 1.0}}
    save(obj, path, "cuda:1", **LEGACY)
    return path


STAYS = {
    "rename": {"rename": {"^module": "net"}}, "strip": {"strip_module": True},
    "tags": {"to_cpu": True}, "gpu": {"to_gpu": 0}, "dtype": {"dtype": "float16"},
}  # fmt: skip
MOVES = {
    "drop": {"drop": "module.fc.*"}, "only": {"only": "module.fc.*"}, "select": {"select": "state_dict"},
    "entry": {"drop_entry": "optimizer"}, "compact": {"compact": True}, "float8": {"dtype": "float8_e5m2"},
}  # fmt: skip


@pytest.mark.parametrize("options", STAYS.values(), ids=STAYS)
def test_legacy_stays_legacy_where_it_can(options, tmp_path):
    path = legacy_file(tmp_path / "net.pth")
    convert(path, tmp_path / "o.pth", **options)
    convert(path, tmp_path / "z.pth", to="zip", **options)

    assert format_of(tmp_path / "o.pth") == "torch-legacy"
    assert format_of(tmp_path / "z.pth") == "torch-zip"
    assert_same(load(tmp_path / "z.pth"), load(tmp_path / "o.pth", weights_only=True))
    if "to_cpu" in options:
        promise_kept(tmp_path / "z.pth")


@pytest.mark.parametrize("options", MOVES.values(), ids=MOVES)
def test_legacy_becomes_zip_where_parts_go(options, tmp_path):
    path = legacy_file(tmp_path / "net.pth")
    convert(path, tmp_path / "o.pth", **options)
    if "dtype" not in options:
        convert(path, tmp_path / "l.pth", to="legacy", **options)
        assert format_of(tmp_path / "l.pth") == "torch-legacy"
        assert_same(load(tmp_path / "o.pth"), load(tmp_path / "l.pth", weights_only=True))
    convert(tmp_path / "o.pth", tmp_path / "cpu.pth", to_cpu=True)

    assert format_of(tmp_path / "o.pth") == "torch-zip"
    assert list(promise_kept(tmp_path / "cpu.pth"))


# -- tar ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["zip", "legacy", "safetensors"])
def test_the_tar_of_torch_01(target, tmp_path):
    base = torch.arange(12.0)
    truth = OrderedDict([("module.w", base.view(3, 4)), ("module.v", base[5:9].view(2, 2)),
                         ("module.n", torch.tensor([3, 4]))])  # fmt: skip
    out = tmp_path / ("o.safetensors" if target == "safetensors" else "o.pth")
    done = convert(FIXTURES / "tar_01x.pth", out, to=target)

    if target == "safetensors":
        same_weights(truth, st_loaded(out), tied=False)
        assert done.entries_left == ("epoch",)
        return
    after = load(out, weights_only=True)
    assert after.pop("epoch") == 7
    same_weights(truth, after)
    assert after["module.v"].storage_offset() == 5
    assert after["module.v"].untyped_storage().data_ptr() == after["module.w"].data_ptr()
    assert {s.device for s in ckptool.inspect(out).checkpoint.storages} == {"cuda:0"}


def test_the_tar_becomes_a_zip_by_itself(tmp_path):
    convert(FIXTURES / "tar_01x.pth", tmp_path / "o.pth", to_cpu=True, strip_module=True)

    assert list(promise_kept(tmp_path / "o.pth")) == ["w", "v", "n", "epoch"]


# -- bare pickles ------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickled_state_dict(protocol, tmp_path):
    """Every tensor is a legacy stream inside bytes; what pickle.load makes is the truth."""
    sd = odd_views()
    sd["twin"] = sd["h"]
    obj = {"model": sd, "epoch": 3, "net": Net().state_dict()}
    with open(tmp_path / "net.pkl", "wb") as f:
        pickle.dump(obj, f, protocol)
    truth = pickle.loads((tmp_path / "net.pkl").read_bytes())
    convert(tmp_path / "net.pkl", tmp_path / "o.pth", to="zip")
    convert(tmp_path / "net.pkl", tmp_path / "l.pth", to="legacy")

    assert assert_same(truth, promise_kept(tmp_path / "o.pth")) == 23
    assert_same(truth, load(tmp_path / "l.pth", weights_only=True))
    source = tmp_path / "net.pkl"
    if protocol == 2:  # no byte strings: the numbers are text, which can only be copied
        with pytest.raises(Unsupported, match="copied, not computed with") as caught:
            convert(source, tmp_path / "o.safetensors", at="model")
        assert (caught.value.key, "convert it to .pth first" in caught.value.hint) == ("t", True)
        source = tmp_path / "o.pth"
    convert(source, tmp_path / "o.safetensors", at="model")
    convert(tmp_path / "o.safetensors", tmp_path / "s.pth")
    same_weights(truth["model"], promise_kept(tmp_path / "s.pth"))
    assert ["h", "twin"] in ties(load(tmp_path / "s.pth"))


def arrays():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    return OrderedDict(
        w=base, t=base.T, f=np.asfortranarray(base[:, 1:4]), cut=base[::2, 1::2], back=base[::-1],
        i=np.arange(3), u=np.arange(4, dtype=np.uint16), b=np.array([True, False]),
        big=np.arange(5, dtype=">f4"), h=np.arange(3, dtype=np.float16), zero=np.array(2.5),
        empty=np.zeros((0, 3), np.float32), c=np.array([1 + 2j], np.complex64),
    )  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickled_dict_of_arrays(protocol, tmp_path):
    """Fortran order, strides and byte order of numpy: values come out, not memory."""
    with open(tmp_path / "net.pkl", "wb") as f:
        pickle.dump({"model": arrays(), "__author__": "Detectron2"}, f, protocol)
    done = convert(tmp_path / "net.pkl", tmp_path / "o.pth")
    convert(tmp_path / "net.pkl", tmp_path / "o.safetensors")

    after = promise_kept(tmp_path / "o.pth")
    assert after["__author__"] == "Detectron2"
    assert "arrays" in notes(done)
    for found in (after["model"], st_loaded(tmp_path / "o.safetensors")):
        assert list(found) == list(arrays())
        for key, array in arrays().items():
            assert found[key].numpy().dtype == array.dtype.newbyteorder("="), key
            assert np.array_equal(found[key].numpy(), array), key


def test_arrays_that_python_2_pickled(tmp_path):
    values = np.arange(6, dtype=np.float64).reshape(2, 3) - 2.5
    rows = [(raw(b"w"), numpy_array(values.tobytes(), b"f8", (2, 3))),
            (raw(b"f"), numpy_array(values.T.tobytes(), b"f8", (2, 3), True))]  # fmt: skip
    (tmp_path / "py2.pkl").write_bytes(pickled(dictionary(*rows)))
    truth = pickle.loads((tmp_path / "py2.pkl").read_bytes(), encoding="latin1")
    convert(tmp_path / "py2.pkl", tmp_path / "o.pth")
    convert(tmp_path / "py2.pkl", tmp_path / "o.safetensors")

    for found in (promise_kept(tmp_path / "o.pth"), st_loaded(tmp_path / "o.safetensors")):
        assert list(found) == ["w", "f"]
        for key in found:
            assert np.array_equal(found[key].numpy(), truth[key]), key
