"""`check_device`: whether a device exists here, and what an error shows when not."""

from __future__ import annotations

import sys

import pytest
import torch
from devices_support import A, B, C, card, with_cards  # noqa: F401 - a fixture

from ckptool.errors import UsageError
from ckptool.models.devices import check_device


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: torch counts n CUDA devices, as a build with CUDA does."""

    def make(count):
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return make


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda", "cuda:0", "cuda:1"])
def test_a_device_that_exists_passes(machine, gpus, device):
    machine(card(0, A), card(1, B))
    gpus(2)
    check_device(device)


def test_the_error_shows_what_is_visible(machine, gpus):
    machine(card(0, A), card(1, B), card(2, C), mask="2")
    gpus(1)
    with pytest.raises(UsageError) as caught:
        check_device("cuda:3")

    assert caught.value.text == (
        "cuda:3 does not exist here: 1 device is visible (cuda:0 = physical 2, NVIDIA H200)"
    )
    assert caught.value.hint == (
        "take cuda:0, counted after CUDA_VISIBLE_DEVICES=2; `ckptool devices` shows them"
    )


def test_several_devices_are_listed(machine, gpus):
    machine(card(0, A), card(1, B))
    gpus(2)
    with pytest.raises(
        UsageError, match=r"2 devices are visible \(cuda:0 = .*; cuda:1 = physical 1"
    ):
        check_device("cuda:2")


def test_nvidia_smi_is_not_believed_against_torch(machine, gpus):
    machine(card(0, A), card(1, B))
    gpus(1)
    with pytest.raises(UsageError, match=r"1 device is visible$"):
        check_device("cuda:1")


def test_once_cuda_runs_torch_names_the_devices(machine, gpus, monkeypatch):
    machine(card(0, A), card(1, B), mask="1")
    gpus(1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    with pytest.raises(UsageError, match=r"1 device is visible \(cuda:0, card 0\)") as caught:
        check_device("cuda:1")

    assert "CUDA_VISIBLE_DEVICES" not in caught.value.hint


def test_hidden_cards_are_said(machine, gpus):
    machine(card(0, A), mask="")
    gpus(0)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES is empty") as caught:
        check_device("cuda")

    assert caught.value.hint == "take device='cpu'"


def test_a_torch_without_cuda_is_said(machine, gpus, monkeypatch):
    machine(card(0, A))
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="built without CUDA"):
        check_device("cuda:0")


@pytest.mark.parametrize(
    "device",
    ["", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda 1", "gpu", "1", "cuda:٣", "cuda:01"],
)
def test_what_torch_cannot_read_is_refused(gpus, device):
    gpus(4)
    with pytest.raises(UsageError, match="no device"):
        check_device(device)


def test_other_accelerators_are_counted_by_torch(monkeypatch):
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 0)
    check_device("xpu:0")
    with pytest.raises(UsageError, match="xpu:1 does not exist here: torch finds 1 device"):
        check_device("xpu:1")
    with pytest.raises(UsageError, match="mps:0 does not exist here"):
        check_device("mps")


def test_without_torch_nvidia_smi_counts(machine, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    machine(card(0, A), card(1, B), mask="1")
    check_device("cuda:0")
    with pytest.raises(UsageError, match="physical 1"):
        check_device("cuda:1")
    machine(status=3)
    check_device("cuda:1")  # nobody can tell


@pytest.mark.gpu
def test_on_a_real_machine_we_say_what_cuda_does():
    from ckptool.models.devices import visible

    seen = visible()

    assert seen.count == torch.cuda.device_count()
    for device in seen.devices:
        facts = torch.cuda.get_device_properties(device.index)
        assert device.uuid == f"GPU-{facts.uuid}"
        assert device.name == facts.name
        assert device.total_bytes >= facts.total_memory
    check_device(f"cuda:{seen.count - 1}")
    with pytest.raises(UsageError):
        check_device(f"cuda:{seen.count}")
