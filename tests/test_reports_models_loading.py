"""The same for what cannot be loaded where it is wanted: devices and resuming, refusals of
torch.load, whole pickled models.
"""

from __future__ import annotations

import argparse
import pathlib
import pickle

import numpy as np
import pytest
import torch
from causes_support import rekeyed
from fixtures.make_fixtures import Tags, absent, save
from reports_support import NETS, SPACE, asked, build, holds, loads, mended, other, screen
from torch import nn
from verbs_support import LEGACY, cli

import ckptool
from ckptool.errors import DoesNotFit, UsageError


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)


# -- devices and resuming ----------------------------------------------------------------------
def stepped(net, kind=torch.optim.Adam, parameters=None, **words):
    optimizer = kind(parameters or net.parameters(), **words)
    for group in optimizer.param_groups:
        for value in group["params"]:
            value.grad = torch.ones_like(value)
    optimizer.step()
    return optimizer


def test_a_file_from_a_gpu_fits_where_there_is_none(capsys):
    save(build().state_dict(), "gpu.pth", "cuda:0")
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load("gpu.pth")
    assert asked(capsys, "gpu.pth")["fits"]
    net = other()
    ckptool.load_into(net, "gpu.pth")
    assert holds(net, build().state_dict())


@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel])
@pytest.mark.parametrize("saved_as", [lambda net: net, nn.DataParallel])
def test_resuming_on_a_machine_without_the_gpu(saved_as, wrap):
    """Weights and moments come from cuda:2, step counters from the CPU; all of it goes on here."""
    net = saved_as(build())
    optimizer = stepped(net, lr=0.25)
    tags = Tags("cuda:2")
    for row in optimizer.state.values():
        tags.put(row["step"], "cpu")
    whole = {"net": net.state_dict(), "optim": optimizer.state_dict(), "epoch": 4}
    save(whole, "resume.pth", tags)

    model = wrap(other())
    again = torch.optim.Adam(model.parameters(), lr=9.0)
    report = ckptool.load_into(model, "resume.pth", optimizer=again)
    assert report.extras["epoch"] + 1 == 5
    plain = model.module if isinstance(model, nn.DataParallel) else model
    inside = net.module if isinstance(net, nn.DataParallel) else net
    assert holds(plain, inside.state_dict())
    assert again.param_groups[0]["lr"] == 0.25
    for one, two in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert {key: value.device.type for key, value in one.items()} == dict.fromkeys(two, "cpu")
        assert all(torch.equal(one[key], two[key]) for key in two)
    for value, other_value in zip(net.parameters(), model.parameters(), strict=True):
        value.grad = other_value.grad = torch.full_like(value, 0.5)
    optimizer.step()
    again.step()
    assert holds(plain, inside.state_dict())  # the next step is the same


def test_an_optimizer_over_other_parameters(capsys):
    """It goes by position: which parameters it was over is told by their shapes."""
    net = build()
    few = [net.fc.weight, net.fc.bias]
    optimizer = stepped(net, torch.optim.SGD, few, lr=0.1, momentum=0.9)
    torch.save({"state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}, "ft.pth")
    model = other()
    every = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(DoesNotFit) as caught:
        ckptool.load_into(model, "ft.pth", optimizer=every)
    assert "1 group of 2 parameters, yours has 1 group of 6 parameters" in str(caught.value)
    assert "the file's are fc.weight and fc.bias" in str(caught.value)
    assert holds(model, before)
    assert not every.state
    same = torch.optim.SGD([model.fc.weight, model.fc.bias], 0.9, momentum=0.9)
    ckptool.load_into(model, "ft.pth", optimizer=same)
    momentum = same.state[model.fc.weight]["momentum_buffer"]
    assert torch.equal(momentum, torch.ones(10, 4))


def test_float64_is_warned_of_before_an_apple_gpu_refuses_it(capsys):
    state = {"w": torch.ones(2, dtype=torch.float64), "step": torch.tensor(3), "b": torch.ones(2)}
    torch.save(state, "f64.pth")
    out = cli(capsys, "inspect", "f64.pth")[1]
    assert "\n  w in float64, which an Apple GPU (mps) cannot hold\n" in out
    if not torch.backends.mps.is_available():
        with pytest.raises(UsageError, match="mps:0 does not exist here"):
            ckptool.load("f64.pth", device="mps")


# -- what torch.load refuses -------------------------------------------------------------------
def refused(file):
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(file, map_location="cpu")


@pytest.mark.parametrize("module", [b"numpy._core.multiarray", b"numpy.core.multiarray"])
def test_numpy_scalars_and_arrays_of_either_version(capsys, module):
    rng = np.random.RandomState(0).get_state()
    whole = {"model": build().state_dict(), "best_acc": np.float64(0.91), "rng": rng}
    torch.save(whole, "np.pth", **LEGACY)
    old = np.float64.__reduce__(np.float64(1))[0].__module__.encode()
    data = pathlib.Path("np.pth").read_bytes().replace(b"c" + old, b"c" + module)
    pathlib.Path("np.pth").write_bytes(data)
    refused("np.pth")
    match = asked(capsys, "np.pth")
    assert match["fits"]
    assert "(plain data, no code)" in screen(capsys, "np.pth")
    net = other()
    report = ckptool.load_into(net, "np.pth")
    assert holds(net, build().state_dict())
    assert report.extras["best_acc"] == 0.91
    np.testing.assert_array_equal(report.extras["rng"][1], rng[1])


def test_args_keep_the_device_they_name(capsys):
    args = argparse.Namespace(
        lr=0.1, device=torch.device("cuda:0"), out=pathlib.Path("runs/exp"), gpu_ids=[0, 1]
    )
    save({"args": args, "model": nn.DataParallel(build()).state_dict()}, "args.pt", "cuda:0")
    refused("args.pt")
    assert cli(capsys, "convert", "args.pt", "--to-cpu", "-o", "cpu.pt")[0] == 0
    found = torch.load("cpu.pt", weights_only=False)  # no map_location: nothing is on a GPU
    assert found["args"] == args
    assert loads(found["model"])
    net = other()
    report = ckptool.load_into(net, "args.pt")
    assert (report.extras["args"].device, report.extras["args"].gpu_ids) == (args.device, [0, 1])
    assert holds(net, build().state_dict())


def test_classes_that_are_not_installed(capsys):
    class ListConfig(list):
        def __reduce__(self):
            return ListConfig, (), {"_content": list(self)}

    class AttributeDict(dict):
        def __reduce__(self):
            return AttributeDict, (dict(self),)

    with (
        absent("omegaconf.listconfig", ListConfig=ListConfig),
        absent("pytorch_lightning.utilities.parsing", AttributeDict=AttributeDict),
    ):
        state = rekeyed(build().state_dict(), lambda key: f"model.{key}")
        words = AttributeDict(lr=0.1, channels=ListConfig([1, 2]))
        torch.save({"state_dict": state, "epoch": 3, "hyper_parameters": words}, "epoch3.ckpt")
    refused("epoch3.ckpt")
    match = asked(capsys, "epoch3.ckpt")
    assert match["fix"] == "ckptool convert epoch3.ckpt --strip-prefix model. -o epoch3.fit.ckpt"
    net = other()
    report = ckptool.load_into(net, "epoch3.ckpt")
    assert holds(net, build().state_dict())
    record = report.extras["hyper_parameters"]
    assert record.class_name == "pytorch_lightning.utilities.parsing.AttributeDict"
    assert record.arguments[0]["lr"] == 0.1
    words = ("--select", "state_dict", "--strip-prefix", "model.", "-o", "plain.pth")
    assert cli(capsys, "convert", "epoch3.ckpt", *words)[0] == 0
    assert loads(torch.load("plain.pth", weights_only=True))


class Reduced:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_paths_of_the_other_system():
    paths = {
        "there": Reduced(pathlib.WindowsPath, "runs", "train"),
        "here": Reduced(pathlib.PosixPath, "a", "b"),
    }
    torch.save({"model": build().state_dict(), **paths}, "best.pt")
    refused("best.pt")
    net = other()
    report = ckptool.load_into(net, "best.pt")
    assert holds(net, build().state_dict())
    assert [str(report.extras[name]) for name in paths] == ["runs\\train", "a/b"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickle_protocols(capsys, protocol):
    torch.save({"sd": build().state_dict(), "n": 1 << 40}, "p.pth", pickle_protocol=protocol)
    if protocol > 3:
        refused("p.pth")
    assert asked(capsys, "p.pth")["fits"]
    assert cli(capsys, "convert", "p.pth", "--fit", "nets.py:net", "-o", "out.pth")[0] == 0
    found = torch.load("out.pth", weights_only=True)
    assert loads(found["sd"])
    assert found["n"] == 1 << 40
    net = other()
    assert ckptool.load_into(net, "p.pth").extras == {"n": 1 << 40}
    assert holds(net, build().state_dict())


# -- whole models ------------------------------------------------------------------------------
@pytest.mark.parametrize("form", [{}, LEGACY])
def test_a_whole_model_whose_package_is_not_here(capsys, monkeypatch, form):
    for kind in (SPACE["Conv"], SPACE["Yolo"]):
        monkeypatch.setattr(kind, "__module__", kind.__module__)  # put back afterwards
    net = build("yolo")
    with absent("models", Conv=SPACE["Conv"], Yolo=SPACE["Yolo"]):
        torch.save({"epoch": -1, "model": net, "best": np.array([0.5])}, "best.pt", **form)
    with pytest.raises(ModuleNotFoundError, match="models"):
        torch.load("best.pt", weights_only=False)
    out = cli(capsys, "inspect", "best.pt")[1]
    assert "a whole pickled model of class models.Yolo, not a state_dict" in out
    assert asked(capsys, "best.pt", "yolo")["fits"]
    model = other("yolo")
    report = ckptool.load_into(model, "best.pt")
    assert holds(model, net.state_dict())
    assert report.extras["epoch"] == -1
    assert cli(capsys, "convert", "best.pt", "--fit", "nets.py:yolo", "-o", "out.pt")[0] == 0
    assert loads(torch.load("out.pt", weights_only=False)["model"], "yolo")


@pytest.mark.parametrize("form", [{}, LEGACY])
def test_a_whole_data_parallel_from_a_script(capsys, form):
    """The class was __main__.Net, which only that script has."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.fc = nn.Linear(4, 10)

    import __main__

    Net.__module__, Net.__qualname__ = "__main__", "Net"
    __main__.Net = Net
    try:
        net = Net()
        torch.save(nn.DataParallel(net), "model.pth", **form)
    finally:
        del __main__.Net
    with pytest.raises(AttributeError, match="Net"):
        torch.load("model.pth", weights_only=False)
    out = screen(capsys, "model.pth")
    assert "a whole pickled model of class torch.nn.parallel.data_parallel.DataParallel" in out
    match = asked(capsys, "model.pth")
    assert match["cause"] == "all 9 keys match after removing 'module.'"
    found = mended(capsys, match)
    assert holds(net, found)
    assert loads(found)
    model = other()
    ckptool.load_into(model, "model.pth")
    assert holds(model, net.state_dict())
