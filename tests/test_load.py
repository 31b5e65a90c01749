"""ckptool.load beside torch.load: nesting, every tensor, ties, strides, devices."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from container_support import big_endian, python2_legacy, records_of, rezipped
from fixtures.make_fixtures import absent
from load_support import Net, Same, loaded, net, saved
from torch import nn
from verbs_support import FIXTURES, LEGACY, TRUTHS, load

import ckptool
from ckptool.errors import CkptError, UsageError

# Classes that torch would have to import, other containers, and what torch cannot read itself.
APART = {
    "evil.pth", "acme_enum.pth", "namespace_foreign.pth", "omegaconf_like.pth", "whole_model.pth",
    "whole_model_dp.pth", "torchscript.pt", "torch_package.pt", "exported.pt2",
    "named_pth_is_safetensors.pth", "numpy_pickle.pkl", "plain_pickle.pkl",
}  # fmt: skip
READABLE = sorted(name for name, truth in TRUTHS.items() if not truth.get("error") and name not in APART)  # fmt: skip


def test_the_fixtures_are_there():
    assert len(READABLE) >= 40


@pytest.mark.parametrize("name", READABLE)
def test_what_torch_loads_is_loaded(name):
    same = Same().same(load(FIXTURES / name), loaded(FIXTURES / name))

    assert same.tensors >= 1


@pytest.mark.parametrize(
    "name", [n for n in READABLE if not n.endswith(".safetensors") and n != "quantized.pth"]
)
def test_meta_has_shapes_and_no_numbers(name):
    one, two = load(FIXTURES / name), loaded(FIXTURES / name, "meta")

    Same(meta=True).same(one, two)


def test_torch_has_no_quantized_tensors_on_meta():
    with pytest.raises(CkptError, match="no quantized tensors on meta"):
        ckptool.load(FIXTURES / "quantized.pth", "meta")


@pytest.mark.parametrize("name", ["plain_pickle.pkl", "numpy_pickle.pkl"])
def test_bare_pickles_are_read(name):
    import pickle

    from torch import storage

    def on_cpu(data):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)

    before, storage._load_from_bytes = storage._load_from_bytes, on_cpu
    try:
        with open(FIXTURES / name, "rb") as f:
            one = pickle.load(f)
    finally:
        storage._load_from_bytes = before

    Same().same(one, loaded(FIXTURES / name))


# -- all kinds of tensors ----------------------------------------------------------------------
def strided():
    base = torch.arange(24.0)
    return {
        "base": base, "slice": base[3:9], "transposed": base.view(4, 6).t(), "step": base[::2],
        "expanded": torch.ones(3, 1).expand(3, 4), "scalar": torch.tensor(3), "empty": base[:0],
        "channels": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conj": torch.randn(3, dtype=torch.complex64).conj(), "imag": torch.randn(3, dtype=torch.complex64).conj().imag,
        "grad": torch.ones(2, requires_grad=True), "param": nn.Parameter(torch.ones(2), False),
        "again": base,
    }  # fmt: skip


def special():
    csr = torch.eye(3).to_sparse_csr()
    return {
        "coo": torch.eye(3).to_sparse(), "csr": csr, "csc": torch.eye(3).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr(2), "loose": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3, 4).flatten()]),
        "jagged": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
        "per_tensor": torch.quantize_per_tensor(torch.randn(4), 0.5, 1, torch.qint8),
        "per_channel": torch.quantize_per_channel(torch.randn(2, 3), torch.tensor([0.5, 2.0]), torch.tensor([0, 3]), 0, torch.quint8),
        "meta": torch.ones(2, 3, device="meta"), "lazy": nn.UninitializedParameter(), "lazy_buffer": nn.parameter.UninitializedBuffer(),
        "untyped": torch.arange(3.0).untyped_storage(), "typed": torch.FloatStorage(3).fill_(2),
    }  # fmt: skip


def with_attributes():
    tensor, parameter = torch.ones(2), nn.Parameter(torch.zeros(3))
    tensor.note, parameter.partition = "mine", {"rank": 3, "like": tensor}
    return {"tensor": tensor, "parameter": parameter}


KINDS = {"strided": strided, "special": special, "attributes": with_attributes}


@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor(kind, old, tmp_path):
    """Beside what was saved: torch itself reads nested and quantized ones of a legacy stream
    before it has their sizes and scales.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = KINDS[kind]()
        path = saved(one, tmp_path / "a.pth", **(LEGACY if old else {}))

    same = Same().same(one, ckptool.load(path))
    assert same.tensors >= 2


def test_ties_hold_across_tables_and_the_optimizer(tmp_path):
    model = net()
    ema = OrderedDict(model.state_dict())
    path = saved({"model": model.state_dict(), "ema": ema, "head": model.fc.weight}, tmp_path / "a")

    found = ckptool.load(path)

    found["head"].data[0, 0] = 99
    assert found["model"]["fc.weight"][0, 0] == found["ema"]["fc.weight"][0, 0] == 99
    assert type(found["head"]) is nn.Parameter


def test_memory_that_is_loaded_is_its_own(tmp_path):
    """Closed, cut and removed: what was loaded stays."""
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(10_000.0), "b": torch.ones(3)}
    files = {"zip": saved(dict(tensors), tmp_path / "a.pth"), "st": tmp_path / "a.safetensors"}
    save_file(tensors, files["st"])
    for path in files.values():
        found = ckptool.load(path)
        os.truncate(path, 0)
        os.unlink(path)
        gc.collect()
        assert torch.equal(found["a"], tensors["a"])
        found["a"][0] = 5  # writable


# -- containers --------------------------------------------------------------------------------
def test_swapped_and_deflated_bytes(tmp_path):
    import zipfile

    sd = OrderedDict(f=torch.randn(300, 7), i=torch.arange(5), c=torch.randn(3, dtype=torch.complex128),
                     h=torch.ones(3, dtype=torch.bfloat16), b=torch.tensor([True, False]))  # fmt: skip
    big = big_endian(tmp_path / "big.pth", sd)
    small = rezipped(tmp_path / "small.pth", records_of(sd), zipfile.ZIP_DEFLATED)
    both = rezipped(tmp_path / "both.pth", dict(_records(big)), zipfile.ZIP_DEFLATED)

    for path in (big, small, both):
        Same().same(sd, ckptool.load(path))


def _records(path):
    import zipfile

    with zipfile.ZipFile(path) as z:
        return [(i.filename.split("/", 1)[1], z.read(i)) for i in z.infolist()]


def test_python_2_names_are_text(tmp_path):
    one = OrderedDict([("conv.weight", torch.ones(2)), ("käse", torch.zeros(1))])
    path = python2_legacy(tmp_path / "py2.pth", one, odd={"käse": b"k\xe4se"})  # not UTF-8

    Same().same(one, ckptool.load(path))


def test_shards_come_as_one_dict(tmp_path):
    model = net()
    path = saved(model.state_dict(), tmp_path / "net.pth")
    for to in ("shards", None):
        folder = tmp_path / f"out-{to}"
        ckptool.convert(path, folder, to="shards", max_shard_size=100, fsync=False)
        found = ckptool.load(folder)
        index = next(folder.glob("*.index.json"))
        Same().same(dict(found), dict(ckptool.load(index)))
        assert list(found) == list(model.state_dict())
        assert all(torch.equal(found[k], v) for k, v in model.state_dict().items())
        assert len(list(folder.glob("*.safetensors"))) > 2


def test_shards_of_pickles(tmp_path):
    import json

    sd = net().state_dict()
    names = list(sd)
    for at, keys in enumerate((names[:3], names[3:]), 1):
        torch.save(OrderedDict((k, sd[k]) for k in keys), tmp_path / f"pytorch_model-0000{at}-of-00002.bin")  # fmt: skip
    rows = {k: f"pytorch_model-0000{1 + (at >= 3)}-of-00002.bin" for at, k in enumerate(names)}
    text = json.dumps({"metadata": {}, "weight_map": rows})
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)

    found = ckptool.load(tmp_path)

    assert list(found) == names
    assert all(torch.equal(found[k], v) for k, v in sd.items())


def test_safetensors_go_through_the_package(tmp_path, monkeypatch):
    import safetensors
    from safetensors.torch import load_file, save_file

    sd = {"w": torch.randn(3, 4).to(torch.bfloat16), "e": torch.empty(0, 2), "s": torch.tensor(2),
          "f8": torch.ones(4).to(torch.float8_e4m3fn), "b": torch.tensor([True])}  # fmt: skip
    save_file(sd, tmp_path / "a.safetensors")
    asked = []
    real = safetensors.safe_open

    def counting(path, **options):
        asked.append(path)
        return real(path, **options)

    monkeypatch.setattr(safetensors, "safe_open", counting)
    found = ckptool.load(tmp_path / "a.safetensors")

    assert asked == [str(tmp_path / "a.safetensors")]
    assert type(found) is dict
    Same().same(dict(sorted(load_file(tmp_path / "a.safetensors").items())), dict(sorted(found.items())))  # fmt: skip
    with open(tmp_path / "a.safetensors", "rb") as f:  # the package opens paths only
        Same().same(found, ckptool.load(f))


def test_aliases_of_safetensors_are_ties_again(tmp_path):
    tied = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    tied["head"].weight = tied["emb"].weight
    path = saved(tied.state_dict(), tmp_path / "tied.pth")
    ckptool.convert(path, tmp_path / "tied.safetensors", fsync=False)

    found = ckptool.load(tmp_path / "tied.safetensors")

    assert list(found) == ["emb.weight", "head.weight"]
    assert found["emb.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert found._metadata[""] == {"version": 1}


@pytest.mark.parametrize("name", ["torchscript.pt", "torch_package.pt", "exported.pt2"])
def test_other_containers_give_their_weights(name):
    found = loaded(FIXTURES / name)

    want = TRUTHS[name]["tables"][0]["tensors"]
    assert [(k, list(t.shape)) for k, t in found.items()] == [(r["key"], r["shape"]) for r in want]


def test_streams_are_read_wherever_they_stand(tmp_path):
    data = (FIXTURES / "dp_cuda.pth").read_bytes()
    stream = io.BytesIO(data)
    stream.seek(17)

    Same().same(load(FIXTURES / "dp_cuda.pth"), ckptool.load(stream))


class Foreign(Net):
    pass


# -- whole models ------------------------------------------------------------------------------
@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
def test_a_pickled_model_comes_as_its_state_dict(old, tmp_path):
    model = nn.DataParallel(net())
    model.module.__class__ = Foreign
    model.module.register_buffer("scratch", torch.ones(1), persistent=False)
    want = model.state_dict()
    with absent("acme.nets", Foreign=Foreign), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a legacy file carries source code
        path = saved({"epoch": 3, "model": model, "again": model.module.fc}, tmp_path / "m.pth", **(LEGACY if old else {}))  # fmt: skip

    with pytest.warns(UserWarning, match=r"whole models \(torch.nn.parallel.data_parallel.DataParallel.*trust=True"):  # fmt: skip
        found = ckptool.load(path)

    assert found["epoch"] == 3
    assert type(found["model"]) is OrderedDict
    assert list(found["model"]) == list(want)
    assert all(torch.equal(found["model"][k], v) for k, v in want.items())
    assert not any(t.requires_grad for t in found["model"].values())  # as state_dict() gives them
    assert found["again"]["weight"].data_ptr() == found["model"]["module.fc.weight"].data_ptr()


def test_trust_hands_the_file_to_torch(tmp_path):
    model = net()
    path = saved({"model": model}, tmp_path / "m.pth")

    found = ckptool.load(path, trust=True)

    assert type(found["model"]) is Net
    with open(path, "rb") as f:
        assert type(ckptool.load(f, trust=True)["model"]) is Net
    assert ckptool.load(path, "meta", trust=True)["model"].fc.weight.is_meta
    assert list(ckptool.load(FIXTURES / "model.safetensors", trust=True))  # nothing to trust
    with pytest.raises(UsageError, match="one file"):
        ckptool.load(tmp_path, trust=True)


# -- laziness and errors -----------------------------------------------------------------------
def test_load_alone_imports_torch():
    code = "import ckptool, sys; ckptool.open; ckptool.Record; print('torch' in sys.modules); ckptool.load; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "True"]


def test_errors_name_the_file(tmp_path):
    (tmp_path / "a.pth").write_text("<html>")

    with pytest.raises(CkptError, match=r"a\.pth: not a checkpoint: an HTML page"):
        ckptool.load(tmp_path / "a.pth")
    with pytest.raises(CkptError, match=r"missing\.pth: no such file"):
        ckptool.load(tmp_path / "missing.pth")


def test_numpy_values_come_as_themselves(tmp_path):
    one = {
        "f": np.float64(1.5), "b": np.bool_(True), "a": np.arange(6).reshape(2, 3), "t": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"), "text": np.array(["a", "bc"]), "bytes": np.array([b"x"]), "when": np.array(["2024-01-02"], "M8[D]"),
        "objects": np.array([{"a": 1}, None, "x"], object), "dtype": np.dtype("float16"), "state": np.random.RandomState(0).get_state(),
    }  # fmt: skip
    path = saved(one, tmp_path / "a.pth")

    Same().same(one, ckptool.load(path))


def test_without_torch_the_error_says_what_to_install():
    code = """
import sys
sys.modules["torch"] = None
import ckptool
for name in ("load", "load_into", "freeze"):
    try:
        getattr(ckptool, name)
    except ckptool.CkptError as error:
        print(error.slug, error.hint)
with ckptool.open(sys.argv[1]) as f:
    print(f.weights["fc.bias"].numpy().shape)
"""
    command = [sys.executable, "-c", code, str(FIXTURES / "net_plain.pth")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["torch-missing pip install 'ckptool[torch]'"] * 3 + ["(3,)"]
