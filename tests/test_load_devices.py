"""Where ckptool.load puts tensors: a device asked for, the file's own, what stays on the CPU.

The machine of these tests has no GPU: two are faked, and their memory is on the meta device.
"""

from __future__ import annotations

import pytest
import torch
from devices_support import A, B, card, install
from fixtures.make_fixtures import Tags, save
from load_support import net, saved
from verbs_support import FIXTURES

import ckptool
from ckptool.errors import CkptError, UsageError


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A machine that shows two CUDA devices; there is no memory on them."""
    monkeypatch.setenv("PATH", install(tmp_path, card(0, A), card(1, B)))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")


def placed(path, device, **tags):
    """{place of each tensor: its device} where tensors of cuda and mps are made on meta."""
    from ckptool.models import tensors_memory

    where = {}
    real = tensors_memory._allocated

    def pretend(storage, asked, label):
        where[label] = str(asked)
        return real(storage, torch.device("meta"), label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors_memory, "_allocated", pretend)
        patch.setattr(tensors_memory.Memory, "read", lambda self: None)
        ckptool.load(path, device)
    return where


def checkpoint(tmp_path):
    model, opt = net(), None
    opt = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    opt.step()
    tags = Tags("cuda:1", fresh=False)
    for state in opt.state.values():
        tags.put(state["step"], "cpu")
    rng = torch.get_rng_state()
    tags.put(rng, "cpu")
    obj = {"net": model.state_dict(), "optimizer": opt.state_dict(), "rng_state": rng,
           "cuda_rng": [torch.ones(8, dtype=torch.uint8)], "acc": torch.tensor(0.5)}  # fmt: skip
    save(obj, tmp_path / "a.pth", tags)
    return tmp_path / "a.pth"


def test_random_states_and_steps_stay_on_the_cpu(two_gpus, tmp_path):
    where = placed(checkpoint(tmp_path), "cuda:0")

    stay = {place for place, device in where.items() if device == "cpu"}
    steps = {f"optimizer.state.{i}.step" for i in range(6)}
    assert stay == steps | {"rng_state", "cuda_rng.0"}
    assert {device for place, device in where.items() if place not in stay} == {"cuda:0"}
    assert {"net.fc.weight", "optimizer.state.0.exp_avg", "acc"} <= where.keys() - stay


def test_none_means_as_the_file_says(two_gpus, tmp_path):
    where = placed(checkpoint(tmp_path), None)

    assert where["net.fc.weight"] == where["acc"] == "cuda:1"
    assert where["optimizer.state.0.step"] == where["cuda_rng.0"] == "cpu"


def test_a_number_is_a_cuda_device(two_gpus, tmp_path):
    assert placed(checkpoint(tmp_path), 1)["acc"] == "cuda:1"
    assert placed(checkpoint(tmp_path), torch.device("cuda", 1))["acc"] == "cuda:1"


def test_a_device_that_does_not_exist_says_what_does(two_gpus, tmp_path):
    path = checkpoint(tmp_path)

    with pytest.raises(UsageError, match=r"cuda:2 does not exist here: 2 devices are visible .cuda:0 = physical 1") as info:  # fmt: skip
        ckptool.load(path, "cuda:2")
    assert "CUDA_VISIBLE_DEVICES=1,0" in info.value.hint
    with pytest.raises(UsageError, match="names no device"):
        ckptool.load(path, "gpu one")
    save({"w": torch.ones(1)}, path, "cuda:7")
    with pytest.raises(UsageError, match="the file says 'cuda:7'") as info:
        ckptool.load(path, None)
    assert "device='cpu'" in info.value.hint


def test_without_a_gpu_the_file_cannot_have_its_way(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    with pytest.raises(UsageError, match=r"the file says 'cuda:3'.*does not exist here"):
        ckptool.load(FIXTURES / "net_cuda3.pth", None)
    with pytest.raises(UsageError, match="cuda:0 does not exist here"):
        ckptool.load(FIXTURES / "net_cuda3.pth", "cuda:0")


def test_an_apple_gpu_has_no_float64(monkeypatch, tmp_path):
    """R36: refused with the key and the way out, before anything is read."""
    from ckptool.models import tensors_memory, tensors_rebuild

    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    fake = type("Storage", (), {"device": torch.device("mps", 0)})
    monkeypatch.setattr(tensors_memory.Memory, "storage", lambda self, storage: fake)
    monkeypatch.setattr(tensors_rebuild.torch, "empty", None)
    path = saved({"a": torch.ones(1, dtype=torch.float64)}, tmp_path / "a.pth")

    with pytest.raises(CkptError, match="an Apple GPU has no float64") as info:
        ckptool.load(path, "mps")
    assert "--dtype float32" in info.value.hint


@pytest.mark.gpu
def test_on_a_real_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = checkpoint(tmp_path)

    found = ckptool.load(path, "cuda:0")
    want = torch.load(path, map_location="cpu")

    assert {str(t.device) for t in found["net"].values()} == {"cuda:0"}
    assert found["rng_state"].device.type == found["cuda_rng"][0].device.type == "cpu"
    assert all(torch.equal(found["net"][k].cpu(), v) for k, v in want["net"].items())
    ties = {t.untyped_storage().data_ptr() for t in found["net"].values()}
    assert len(ties) == len({t.untyped_storage().data_ptr() for t in want["net"].values()})
