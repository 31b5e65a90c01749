"""load_into a model on the meta device, and onto devices."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from load_support import Net, equal, net, prefixed, saved, trained
from torch import nn

import ckptool
from ckptool.errors import ModelError, UsageError


class TwoTied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight
        self.free = nn.Linear(4, 6, bias=False)


def test_a_model_on_meta_gets_its_tensors(tmp_path):
    state = net(1).state_dict()
    with torch.device("meta"):
        model = Net().half()
    model.fc.weight.requires_grad_(False)

    report = ckptool.load_into(model, saved(prefixed(state, "module."), tmp_path / "a.pth"))

    assert report.match.fits
    assert {str(t.device) for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert torch.equal(model.fc.weight, state["fc.weight"].half())  # the model's dtype counts
    assert [p.requires_grad for p in model.parameters()] == [True] * 4 + [False, True]
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_ties_of_a_model_on_meta_are_the_models(tmp_path):
    """Tied stays one Parameter, and what shares memory in the file alone does not become tied."""
    real = TwoTied()
    shared = OrderedDict((k, real.emb.weight.detach()) for k in real.state_dict())
    with torch.device("meta"):
        model = TwoTied()
        model.head.weight = model.emb.weight

    ckptool.load_into(model, saved(shared, tmp_path / "a.pth"))

    assert model.head.weight is model.emb.weight
    assert model.free.weight is not model.emb.weight
    assert model.free.weight.data_ptr() != model.emb.weight.data_ptr()
    assert torch.equal(model.free.weight, real.emb.weight)


def test_a_small_part_of_a_large_storage_is_not_kept_alive(tmp_path):
    big = torch.arange(1000.0)
    path = saved({"weight": big[:4].view(2, 2), "bias": big[4:6]}, tmp_path / "a.pth")
    with torch.device("meta"):
        model = nn.Linear(2, 2)

    ckptool.load_into(model, path)

    assert model.weight.untyped_storage().nbytes() == 16
    assert model.bias.tolist() == [4, 5]


def test_what_no_checkpoint_holds_is_said(tmp_path):
    with torch.device("meta"):
        model = net()
        model.register_buffer("table", torch.ones(2), persistent=False)
    path = saved(net(1).state_dict(), tmp_path / "a.pth")

    with pytest.raises(ModelError, match="no checkpoint holds its buffers table"):
        ckptool.load_into(model, path)
    assert model.fc.weight.is_meta
    report = ckptool.load_into(model, path, strict=False)
    assert [note.text for note in report.notes] == ["still without numbers: table"]
    assert "still without numbers: table" in str(report)


def test_missing_keys_of_a_model_on_meta_stay_without_numbers(tmp_path):
    state = net(1).state_dict()
    del state["fc.bias"]
    path = saved(state, tmp_path / "a.pth")
    with torch.device("meta"):
        model = net()

    report = ckptool.load_into(model, path, strict=False)

    assert model.fc.bias.is_meta
    assert report.missing_keys == ("fc.bias",)
    assert "fc.bias" in report.notes[0].text


def test_device_moves_the_model(tmp_path, monkeypatch):
    model = net(2)
    params = list(model.parameters())
    path = saved(net(1).state_dict(), tmp_path / "a.pth")

    ckptool.load_into(model, path, device="cpu")
    assert list(map(id, model.parameters())) == list(map(id, params))
    with pytest.raises(UsageError, match="nothing can be loaded onto meta"):
        ckptool.load_into(model, path, device="meta")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="cuda:0 does not exist here"):
        ckptool.load_into(model, path, device="cuda:0")
    wrapped = nn.DataParallel(model)
    wrapped.src_device_obj = torch.device("cuda:1")  # as it is with GPUs
    with pytest.raises(UsageError, match="DataParallel, which keeps it on cuda:1, not cpu"):
        ckptool.load_into(wrapped, path, device="cpu")


@pytest.mark.gpu
def test_on_a_real_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = saved(nn.DataParallel(net(1)).state_dict(), tmp_path / "a.pth")
    model = net(2)
    ckptool.load_into(model, path, device="cuda:0")
    assert equal({k: v.cpu() for k, v in model.state_dict().items()}, net(1).state_dict())
    with torch.device("meta"):
        empty = Net()
    ckptool.load_into(empty, path, device="cuda:0")
    assert {str(p.device) for p in empty.parameters()} == {"cuda:0"}
    assert trained(empty, torch.optim.SGD(empty.parameters(), 0.1), steps=0) is empty
