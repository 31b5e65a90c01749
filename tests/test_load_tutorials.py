"""The tutorials from their first line to their last: save on several GPUs, go on with one or none."""

from __future__ import annotations

import pytest
import torch
from fixtures.make_fixtures import Tags, save
from load_support import Net, adam, equal, net, saved, trained
from torch import nn

import ckptool
from ckptool.errors import RuleMatchesNothing


def by_hand(path, wrap, epochs=3):
    """A run of three epochs that saves as the tutorials do, tagged as on a GPU."""
    model = wrap(net(1))
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _epoch in range(epochs):
        trained(model, optimizer)
        scheduler.step()
    obj = {"net": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epochs - 1,
           "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(), "best_acc": torch.tensor(0.75)}  # fmt: skip
    tags = Tags("cuda:1", fresh=False)
    for state in optimizer.state.values():
        tags.put(state["step"], "cpu")
    save(obj, path, tags)
    trained(model, optimizer)  # the epoch that a resumed run must repeat
    return getattr(model, "module", model), optimizer


@pytest.mark.parametrize("saved_under", [nn.DataParallel, lambda m: m], ids=["dp", "plain"])
@pytest.mark.parametrize("goes_on_under", [nn.DataParallel, lambda m: m], ids=["dp", "plain"])
def test_resume(saved_under, goes_on_under, tmp_path):
    """Epoch 2 was saved on GPUs that are not here; the run goes on at epoch 3, bit for bit."""
    path = tmp_path / "ckpt.pth"
    one, first = by_hand(path, saved_under)

    model = goes_on_under(Net())
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    report = ckptool.load_into(model, path, optimizer=optimizer)
    start = report.extras["epoch"] + 1
    scheduler.load_state_dict(report.extras["scheduler"])
    torch.set_rng_state(report.extras["rng"])

    assert start == 3
    assert scheduler.last_epoch == 3
    assert float(report.extras["best_acc"]) == 0.75
    trained(model, optimizer)
    two = getattr(model, "module", model)
    assert equal(one.state_dict(), two.state_dict())
    for left, right in zip(first.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert all(s["exp_avg"].device == p.device for p, s in optimizer.state.items())
    assert {s["step"].device.type for s in optimizer.state.values()} == {"cpu"}


def test_the_optimizer_goes_where_its_parameters_are(tmp_path, monkeypatch):
    """Resume on a GPU, as far as a machine without one can tell: moments go to the device of
    their parameter, steps do not.
    """
    path = tmp_path / "ckpt.pth"
    by_hand(path, nn.DataParallel)
    model = net(2)
    optimizer = adam(model)
    asked = {}
    real = torch.optim.Optimizer._process_value_according_to_param_policy

    def process(param, value, param_id, param_groups, key=None):
        asked.setdefault(key, set()).add(value.device.type)
        return real(param, value, param_id, param_groups, key)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(process))  # fmt: skip
    ckptool.load_into(model, path, optimizer=optimizer)

    assert asked.keys() == {"exp_avg", "exp_avg_sq", "step"}  # torch itself places them
    assert asked["step"] == {"cpu"}


class Vgg(nn.Module):
    """A net that wraps its features alone, as torchvision's examples do for VGG and AlexNet."""

    def __init__(self, wrap=lambda part: part):
        super().__init__()
        self.features = wrap(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
        self.classifier = nn.Linear(4, 5)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


@pytest.mark.parametrize("ours", [nn.DataParallel, lambda part: part], ids=["dp", "plain"])
@pytest.mark.parametrize("theirs", [nn.DataParallel, lambda part: part], ids=["dp", "plain"])
def test_only_a_part_was_wrapped(ours, theirs, tmp_path):
    torch.manual_seed(1)
    source = Vgg(theirs)
    optimizer = adam(source)
    path = saved({"model": trained(source, optimizer).state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pth")  # fmt: skip
    model = Vgg(ours)
    other = adam(model)

    report = ckptool.load_into(model, path, optimizer=other)

    assert report.match.fits
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(source(x), model(x))
    trained(source, optimizer)
    trained(model, other)
    assert torch.equal(source(x), model(x))


# -- fine-tuning -------------------------------------------------------------------------------
def pretrained(tmp_path):
    """A net of 1000 classes, saved under DataParallel."""
    model = nn.DataParallel(net(1, classes=1000))
    return model.module, saved(model.state_dict(), tmp_path / "pretrained.pth")


def test_fine_tune_a_new_head(tmp_path):
    source, path = pretrained(tmp_path)
    model = Net(classes=10)

    report = ckptool.load_into(model, path, mismatched="skip")
    done = ckptool.freeze(model, keep=["fc.*"])

    assert [row.key for row in report.mismatched] == ["fc.weight", "fc.bias"]
    assert "the model has 10" in " ".join(report.to_dict()["findings"])
    assert done.kept == ("fc.weight", "fc.bias")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    head = model.fc.weight.clone()
    trained(model.eval(), optimizer)
    assert not torch.equal(model.fc.weight, head)
    assert equal(model.features.state_dict(), source.features.state_dict())


def test_freeze_what_was_loaded(tmp_path):
    _, path = pretrained(tmp_path)
    model = nn.DataParallel(Net(classes=10))
    report = ckptool.load_into(model, path, mismatched="skip")

    done = ckptool.freeze(model, only=report.loaded)  # buffers among them are no mistake

    assert done.kept == ("fc.weight", "fc.bias")
    assert [n for n, p in model.module.named_parameters() if p.requires_grad] == list(done.kept)
    again = trained(model, torch.optim.SGD(model.parameters(), 0.1))
    assert again.module.features[0].weight.grad is None


def test_the_head_alone_is_kept_out_by_a_rule(tmp_path):
    """The tutorial's `if "fc" not in k`, by whole components."""
    _, path = pretrained(tmp_path)
    model = Net(classes=1000)
    head = model.fc.weight.clone()

    report = ckptool.load_into(model, path, rules=[("strip-module",), ("drop", "fc.*")], strict=False)  # fmt: skip

    assert report.missing_keys == ("fc.weight", "fc.bias")
    assert report.left_out == ("module.fc.weight", "module.fc.bias")
    assert torch.equal(model.fc.weight, head)


# -- freeze ------------------------------------------------------------------------------------
def grads(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("fc", ["fc.weight", "fc.bias"]), (["fc.bias"], ["fc.bias"]), ((), []),
        (["*.bias"], ["fc.bias"]), (["**.bias"], ["features.0.bias", "features.1.bias", "fc.bias"]),
        (["bias", "fc"], ["features.0.bias", "features.1.bias", "fc.weight", "fc.bias"]),
        (["features.1"], ["features.1.weight", "features.1.bias"]),
    ],
)  # fmt: skip
def test_freeze_by_the_globs_of_every_verb(keep, kept):
    model = net()

    done = ckptool.freeze(model, keep=keep)

    assert grads(model) == list(done.kept) == kept
    assert set(done.frozen) == {n for n, _ in model.named_parameters()} - set(kept)


def test_freeze_leaves_what_it_keeps_as_it_was():
    model = net()
    model.fc.bias.requires_grad_(False)

    done = ckptool.freeze(model, keep="fc")

    assert grads(model) == ["fc.weight"]
    assert done.kept == ("fc.weight", "fc.bias")
    assert ckptool.freeze(net(), keep=["fc.weight"], only=["fc", "features.0"]).frozen == (
        "features.0.weight", "features.0.bias", "fc.bias",
    )  # fmt: skip


def test_a_name_is_only_that_name():
    """A parameter called `weight` at the root is no glob for every `weight`."""
    model = nn.Module()
    model.weight, model.inner = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)

    assert ckptool.freeze(model, only=["weight"]).frozen == ("weight",)
    assert grads(model) == ["inner.weight", "inner.bias"]


def test_a_tied_parameter_is_kept_by_either_name():
    model = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False), "mid": nn.Linear(3, 3)})  # fmt: skip
    model["head"].weight = model["emb"].weight

    done = ckptool.freeze(model, keep=["head.*"])

    assert done.kept == ("emb.weight", "head.weight")
    assert model["emb"].weight.requires_grad


def test_a_glob_of_nothing_freezes_nothing():
    model = net()

    with pytest.raises(RuleMatchesNothing, match=r"'classifier.\*' matches no parameter; nothing was frozen"):  # fmt: skip
        ckptool.freeze(model, keep=["fc.*", "classifier.*"])
    assert len(grads(model)) == 6
    with pytest.raises(RuleMatchesNothing, match=r"'features.7'"):
        ckptool.freeze(model, only=["features.7"])
    assert len(grads(model)) == 6


# -- the other ways a tutorial ends ------------------------------------------------------------
def test_a_net_built_without_memory(tmp_path):
    """A model on the meta device, its optimizer built after the weights are there."""
    path = tmp_path / "ckpt.pth"
    one, first = by_hand(path, nn.DataParallel)
    with torch.device("meta"):
        model = Net()

    ckptool.load_into(model, path)
    optimizer = adam(model)
    ckptool.load_into(model, path, optimizer=optimizer)

    trained(model, optimizer)
    assert equal(one.state_dict(), model.state_dict())
    assert first.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_ckptool_load_in_the_place_of_torch_load(tmp_path):
    """The tutorial's own lines, with one call changed."""
    path = tmp_path / "ckpt.pth"
    one, _ = by_hand(path, nn.DataParallel)
    model = nn.DataParallel(Net())
    optimizer = adam(model)

    checkpoint = ckptool.load(path)
    model.load_state_dict(checkpoint["net"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"])

    trained(model, optimizer)
    assert equal(one.state_dict(), model.module.state_dict())
    assert checkpoint["epoch"] + 1 == 3
