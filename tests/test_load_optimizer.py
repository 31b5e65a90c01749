"""The optimizer's state through load_into, beside torch's own way; refusals that touch nothing."""

from __future__ import annotations

import re

import pytest
import torch
from load_support import (
    Net,
    adam,
    equal,
    net,
    numbers,
    optimizer_numbers,
    prefixed,
    saved,
    trained,
)
from torch import nn
from verbs_support import data_offset

import ckptool
from ckptool.errors import CrcMismatch, DoesNotFit, ModelError, UsageError

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 0.01), "AMSGrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01), "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "Adagrad": torch.optim.Adagrad, "Adadelta": torch.optim.Adadelta, "Adamax": torch.optim.Adamax, "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam, "Rprop": torch.optim.Rprop, "ASGD": torch.optim.ASGD, "Adafactor": torch.optim.Adafactor,
}  # fmt: skip


def checkpoint(path, model, optimizer, **more):
    return saved({"net": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)


def two_runs(path, make, wrap=lambda model: model):
    """(what training goes on to without a break, what it goes on to after load_into)."""
    model = wrap(net(1))
    optimizer = make(model.parameters())
    checkpoint(path, trained(model, optimizer), optimizer)
    trained(model, optimizer, seed=8)
    fresh = net(2)
    other = make(fresh.parameters())
    ckptool.load_into(fresh, path, optimizer=other)
    trained(fresh, other, seed=8)
    return (getattr(model, "module", model), optimizer), (fresh, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(name, tmp_path):
    (one, first), (two, second) = two_runs(tmp_path / "a.pth", OPTIMIZERS[name], nn.DataParallel)

    assert equal(one.state_dict(), two.state_dict())
    assert [g["lr"] for g in first.param_groups] == [g["lr"] for g in second.param_groups]
    for left, right in zip(first.state.values(), second.state.values(), strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            same = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]  # fmt: skip
            assert same, key


def test_it_is_what_torch_would_load(tmp_path):
    """Types, devices, dtypes of the state: moments follow their parameter, steps do not."""
    model, half = net(1), net(2).to(torch.float64)
    optimizer = adam(model)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    theirs, ours = adam(half), adam(half)
    theirs.load_state_dict(torch.load(path)["optimizer"])

    ckptool.load_into(half, path, optimizer=ours)

    for left, right in zip(theirs.state.values(), ours.state.values(), strict=True):
        assert left["exp_avg"].dtype == right["exp_avg"].dtype == torch.float64
        assert left["step"].dtype == right["step"].dtype == torch.float32
        assert right["step"].device.type == "cpu"
        assert torch.equal(left["exp_avg_sq"], right["exp_avg_sq"])


def test_groups_and_their_settings_come_along(tmp_path):
    def grouped(model):
        rows = [{"params": model.features.parameters(), "lr": 1e-3, "name": "slow"}, {"params": model.fc.parameters()}]  # fmt: skip
        return torch.optim.SGD(rows, 0.1, momentum=0.9, weight_decay=1e-4)

    model = net(1)
    optimizer = grouped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trained(model, optimizer)
    scheduler.step()
    path = checkpoint(tmp_path / "a.pth", model, optimizer, scheduler=scheduler.state_dict())
    fresh = net(2)
    other = grouped(fresh)
    later = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)

    report = ckptool.load_into(fresh, path, optimizer=other)
    later.load_state_dict(report.extras["scheduler"])

    assert [(g["lr"], g.get("name")) for g in other.param_groups] == [(5e-4, "slow"), (0.05, None)]
    assert later.last_epoch == 1
    assert report.optimizer == ("optimizer",)
    assert report.extras.keys() == {"scheduler"}


# -- names and order ---------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_decide_where_both_sides_know_them(prefix, tmp_path):
    """Saved in another order; torch alone would mix the moments up."""
    model = net(1)
    rows = list(model.named_parameters())
    optimizer = torch.optim.Adam([(prefix + n, p) for n, p in reversed(rows)], 0.01)
    state = trained(model, optimizer).state_dict()
    state = prefixed(state, prefix) if prefix else state
    path = saved({"net": state, "optimizer": optimizer.state_dict()}, tmp_path / "a.pth")
    fresh = net(2)
    other = torch.optim.Adam(fresh.named_parameters(), 0.01)

    ckptool.load_into(fresh, path, optimizer=other)

    for (name, one), (_, two) in zip(rows, fresh.named_parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], other.state[two]["exp_avg"]), name
    assert other.param_groups[0]["param_names"] == [name for name, _ in rows]
    trained(fresh, other)


def test_names_of_other_parameters_are_refused(tmp_path):
    model = net(1)
    rows = list(model.named_parameters())
    optimizer = torch.optim.Adam(rows[:4], 0.01)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = net(2)
    other = torch.optim.Adam(list(fresh.named_parameters())[1:5], 0.01)

    with pytest.raises(DoesNotFit, match=r"state of features.0.weight, yours is over fc.weight instead"):  # fmt: skip
        ckptool.load_into(fresh, path, optimizer=other)


def test_names_as_keys_of_the_state(tmp_path):
    """As torch.distributed writes an optimizer: names in the place of numbers."""
    model = net(1)
    optimizer = adam(model)
    trained(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    plain = optimizer.state_dict()
    state = {"state": {names[i]: row for i, row in plain["state"].items()},
             "param_groups": [{**plain["param_groups"][0], "params": names}]}  # fmt: skip
    path = saved({"net": model.state_dict(), "optimizer": state}, tmp_path / "a.pth")
    fresh = net(2)
    other = torch.optim.Adam(list(fresh.parameters())[::-1], 0.01)

    ckptool.load_into(fresh, path, optimizer=other)

    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], other.state[two]["exp_avg"])


def test_another_order_without_names_is_seen_by_shape(tmp_path):
    model = net(1)
    optimizer = torch.optim.Adam(list(model.parameters())[::-1], 0.01)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = net(2)
    before = optimizer_numbers(adam(fresh))

    other = adam(fresh)
    with pytest.raises(DoesNotFit, match=r"of the shape \[5\] where yours has features.0.weight \[4, 3, 3, 3\], and 3 more differ; the shapes are the same in another order"):  # fmt: skip
        ckptool.load_into(fresh, path, optimizer=other)
    assert optimizer_numbers(other) == before


# -- refusals ----------------------------------------------------------------------------------
def untouched(path, model, optimizer, error, words, **options):
    """load_into fails with these words, and nothing has changed."""
    trained(model, optimizer)
    before = numbers(model), optimizer_numbers(optimizer)
    with pytest.raises(error, match=words) as info:
        ckptool.load_into(model, path, optimizer=optimizer, **options)
    assert (numbers(model), optimizer_numbers(optimizer)) == before
    return info.value


def frozen(model):
    """R77: the body is frozen, the optimizer saw the head alone."""
    head = list(model.fc.parameters())
    return torch.optim.SGD(head, 0.1, momentum=0.9)


def test_an_optimizer_over_frozen_layers(tmp_path):
    model = net(1)
    optimizer = frozen(model)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = net(2)

    error = untouched(
        path, fresh, torch.optim.SGD(fresh.parameters(), 0.1, momentum=0.9), DoesNotFit,
        re.escape("the optimizer in the file has 1 group of 2 parameters, yours has 1 group of 6 parameters; by their shapes the file's are fc.weight and fc.bias"),
    )  # fmt: skip
    assert error.hint.startswith("build SGD over those alone, as when the others were frozen")
    assert ckptool.load_into(fresh, path, optimizer=frozen(fresh)).optimizer == ("optimizer",)


def test_an_optimizer_over_more_than_ours(tmp_path):
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = net(2)

    untouched(path, fresh, frozen(fresh), DoesNotFit,
              "1 group of 6 parameters, yours has 1 group of 2 parameters; the file's are all those of the model")  # fmt: skip


def test_other_groups(tmp_path):
    model = net(1)
    rows = [{"params": model.features.parameters()}, {"params": model.fc.parameters()}]
    optimizer = torch.optim.SGD(rows, 0.1, momentum=0.9)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = net(2)

    untouched(path, fresh, torch.optim.SGD(fresh.parameters(), 0.1, momentum=0.9), DoesNotFit,
              "has 2 groups of 4, 2 parameters, yours has 1 group of 6")  # fmt: skip


def test_shapes_that_cannot_be_told_are_not_guessed(tmp_path):
    """Two layers alike: the file's two could be of either."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = adam(model[1])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = checkpoint(tmp_path / "a.pth", model, optimizer)

    with pytest.raises(DoesNotFit, match=r"yours has 1 group of 4 parameters$") as info:
        ckptool.load_into(model, path, optimizer=adam(model))
    assert "over the parameters it was saved with" in info.value.hint


def test_another_head(tmp_path):
    model = net(1, classes=7)
    optimizer = adam(model)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = net(2)

    untouched(path, fresh, adam(fresh), DoesNotFit, r"state of the shape \[7, 4\] where yours has fc.weight \[5, 4\], and 1 more differ", mismatched="skip")  # fmt: skip
    assert ckptool.load_into(fresh, path, mismatched="skip").optimizer is None


def test_another_kind_of_optimizer(tmp_path):
    model = net(1)
    optimizer = adam(model)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = net(2)

    untouched(path, fresh, torch.optim.SGD(fresh.parameters(), 0.1, momentum=0.9), DoesNotFit,
              "like those of Adam, yours is SGD")  # fmt: skip


def test_a_damaged_moment(tmp_path):
    model = net(1)
    optimizer = adam(model)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    with ckptool.open(path) as f:
        at = [s.key for s in f._checkpoint.storages].index("12")
    with open(path, "r+b") as file:
        file.seek(data_offset(path, f"data/{at}"))
        file.write(b"\xff\xff")
    fresh = net(2)

    untouched(path, fresh, adam(fresh), CrcMismatch, "bytes of 'optimizer.state")


class Failing(torch.optim.Adam):
    """Its state_dict is taken, and then it fails."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        next(iter(self.state.values()))["exp_avg"].zero_()
        raise ValueError("no such luck")


def test_an_optimizer_that_fails_takes_the_model_back(tmp_path):
    model = net(1)
    optimizer = adam(model)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    fresh = Hooked()

    untouched(path, fresh, Failing(fresh.parameters(), 0.01), ModelError, "no such luck")
    plain = net(2)  # whose numbers are not copied first, since torch alone loads them
    untouched(path, plain, Failing(plain.parameters(), 0.01), ModelError, "no such luck")


class Hooked(Net):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


def test_what_is_no_optimizer_says_so(tmp_path):
    model = net(1)
    path = saved({"net": model.state_dict(), "epoch": 1}, tmp_path / "a.pth")

    with pytest.raises(UsageError, match="the file holds no state of an optimizer"):
        ckptool.load_into(model, path, optimizer=adam(model))
    path = checkpoint(tmp_path / "b.pth", model, adam(model))
    with pytest.raises(UsageError, match="a Net is no optimizer"):
        ckptool.load_into(model, path, optimizer=net())
    broken = saved({"net": model.state_dict(), "optimizer": {"state": [], "param_groups": 3}}, path)
    with pytest.raises(DoesNotFit, match="not laid out as torch's"):
        ckptool.load_into(model, broken, optimizer=adam(model))
    with torch.device("meta"):
        empty = net()
    with pytest.raises(UsageError, match="its Parameters are replaced"):
        ckptool.load_into(empty, path, optimizer=adam(empty))


# -- several optimizers ------------------------------------------------------------------------
def test_of_several_the_one_that_fits_is_taken(tmp_path):
    gen, critic = net(1), net(2, classes=1)
    first, second = adam(gen), adam(critic)
    trained(gen, first), trained(critic, second)
    obj = {"netG": gen.state_dict(), "netD": critic.state_dict(),
           "optimizers": {"G": first.state_dict(), "D": second.state_dict()}, "epoch": 2}  # fmt: skip
    path = saved(obj, tmp_path / "a.pth")
    fresh = net(3, classes=1)
    other = adam(fresh)

    report = ckptool.load_into(fresh, path, optimizer=other, at="netD")

    assert report.optimizer == ("optimizers", "D")
    assert report.extras == {"epoch": 2}
    assert equal(fresh.state_dict(), critic.state_dict())
    assert torch.equal(other.state[fresh.fc.bias]["exp_avg"], second.state[critic.fc.bias]["exp_avg"])  # fmt: skip


def test_of_several_alike_one_must_be_named(tmp_path):
    model = net(1)
    one, two = adam(model), adam(model)
    trained(model, one), trained(model, two, steps=3)
    obj = {"state_dict": model.state_dict(), "optimizer_states": [one.state_dict(), two.state_dict()]}  # fmt: skip
    path = saved(obj, tmp_path / "a.pth")  # as Lightning keeps them
    fresh = net(2)
    other = adam(fresh)

    with pytest.raises(UsageError, match=r"2 optimizers in the file fit: 'optimizer_states.0', 'optimizer_states.1'"):  # fmt: skip
        ckptool.load_into(fresh, path, optimizer=other)
    report = ckptool.load_into(fresh, path, optimizer=other, optimizer_at="optimizer_states.1")
    assert float(other.state[fresh.fc.bias]["step"]) == 3
    assert report.extras == {}
    with pytest.raises(UsageError, match="there is no optimizer at 'x'"):
        ckptool.load_into(fresh, path, optimizer=other, optimizer_at="x")


def test_an_optimizer_that_has_not_stepped_yet(tmp_path):
    model = net(1)
    path = checkpoint(tmp_path / "a.pth", model, torch.optim.Adam(model.parameters(), 0.03))
    other = adam(model)

    ckptool.load_into(model, path, optimizer=other)

    assert other.param_groups[0]["lr"] == 0.03
    assert not other.state


def test_the_optimizer_of_a_wrapped_model_follows(tmp_path):
    """load_into(device=…) moves a model in place: the optimizer's parameters stay the model's."""
    model = net(1)
    optimizer = adam(model)
    path = checkpoint(tmp_path / "a.pth", trained(model, optimizer), optimizer)
    wrapped = nn.DataParallel(net(2))
    other = adam(wrapped)

    ckptool.load_into(wrapped, path, optimizer=other, device="cpu")

    assert {id(p) for p in wrapped.parameters()} == set(map(id, other.state))
    assert all(s["exp_avg"].device == p.device for p, s in other.state.items())


# -- ids that became texts ---------------------------------------------------------------------
@pytest.mark.parametrize("made", ["folder", "dcp_to_torch_save", "convert"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_state_out_of_a_dcp_folder_is_taken(tmp_path, made, kind):
    """DCP keeps the numbers of parameters as texts; torch takes none of such a state, silently."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    saved = kind(net.parameters(), lr=0.1, **options)
    net(torch.ones(2, 3)).sum().backward()
    saved.step()
    dcp.save({"model": net.state_dict(), "optimizer": saved.state_dict()},
             checkpoint_id=tmp_path / "step", no_dist=True)  # fmt: skip
    path = tmp_path / "step" if made == "folder" else tmp_path / "net.pth"
    if made == "dcp_to_torch_save":
        dcp_to_torch_save(tmp_path / "step", path)
    elif made == "convert":
        ckptool.convert(tmp_path / "step", path)

    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = kind(fresh.parameters(), lr=0.5, **options)
    ckptool.load_into(fresh, path, optimizer=optimizer)
    assert set(optimizer.state) == set(fresh.parameters())
    for ours, theirs in zip(fresh.parameters(), net.parameters(), strict=True):
        assert optimizer.state[ours].keys() == saved.state[theirs].keys()
        for name, value in saved.state[theirs].items():
            assert torch.equal(torch.as_tensor(optimizer.state[ours][name]), torch.as_tensor(value))
    assert optimizer.param_groups[0]["lr"] == 0.1
    notes = [
        note for note in ckptool.inspect(path).checkpoint.notes if note.slug == "optimizer-ids"
    ]
    assert [note.text.partition(":")[0] for note in notes] == ["'optimizer'"]
    done = ckptool.convert(path, tmp_path / "weights.safetensors")
    assert [note.slug for note in done.notes if note.slug == "optimizer-ids"] == []


def test_no_word_of_ids_where_torch_takes_the_state(tmp_path):
    """Numbers on both sides, names on both sides, no state yet."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    torch.save({"optimizer": optimizer.state_dict(), "w": torch.ones(1)}, tmp_path / "empty.pth")
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    torch.save({"optimizer": state, "w": torch.ones(1)}, tmp_path / "numbers.pth")
    names = dict(enumerate(("0", "1")))
    state = {
        "state": {names[at]: value for at, value in state["state"].items()},
        "param_groups": [group | {"params": ["0", "1"]} for group in state["param_groups"]],
    }
    torch.save({"optimizer": state, "w": torch.ones(1)}, tmp_path / "names.pth")
    for name in ("empty", "numbers", "names"):
        found = ckptool.inspect(tmp_path / f"{name}.pth").checkpoint
        assert [note.slug for note in found.notes if note.slug == "optimizer-ids"] == []
