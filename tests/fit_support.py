"""The matrix of issue 4: nets, the ways a file of one differs, and what has to come out again."""

from __future__ import annotations

import json
import shlex
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from causes_support import Inside
from expected_nets import PACKED
from expected_support import DDPStyle, Raises, Says, quietly, torch_says
from fit_nets import CASES, Case
from torch import nn
from verbs_support import LEGACY, cli

import ckptool

State = Mapping[str, Any]
SETS = ("missing_keys", "unexpected_keys", "mismatched")


def cells(names: Iterable[str], kinds: Iterable[str], every: int) -> list[Any]:
    """Parameters (name, kind, number) of a whole matrix, of which one in `every` is run by
    default, in diagonals: each name and each kind comes.
    """
    rows = [(i + j, name, kind) for i, name in enumerate(names) for j, kind in enumerate(kinds)]
    return [
        pytest.param(
            name,
            kind,
            number,
            id=f"{name}-{kind}",
            marks=[pytest.mark.long] if number % every else [],
        )
        for number, name, kind in rows
    ]


# -- models ------------------------------------------------------------------------------------
def find(name: str) -> Case:
    if name in CASES:
        return CASES[name]
    from fit_transformers import CASES as MORE

    return MORE[name]


INTO: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda net: net,
    "DataParallel": nn.DataParallel,
    "compiled": torch.compile,
    "DDP": DDPStyle,
    "backbone": lambda net: Inside("backbone", net),
    "compiled_DDP": lambda net: torch.compile(DDPStyle(net)),
}
_INNER = ("_orig_mod", "module", "backbone")


def target(name: str, into: str = "plain") -> Any:
    """The net that is to be loaded; what SPEC names in the commands of these tests."""
    torch.manual_seed(2)
    return INTO[into](find(name).make())


def inner(model: Any, into: str) -> nn.Module:
    """The net inside the wrappers that `target` put around it."""
    for _ in range(into.count("_") + (into != "plain")):
        model = next(model._modules[name] for name in _INNER if name in model._modules)
    return model


def spec(name: str, into: str) -> list[str]:
    """The flags that name `target(name, into)`, after --model or --fit."""
    words = ["fit_support:target", "--model-arg", f"name={name}"]
    return [*words, "--model-arg", f"into={into}"] if into != "plain" else words


def numbered(net: nn.Module, seed: int) -> nn.Module:
    """The net with numbers of its own everywhere, also where layers start with ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in net.state_dict().items():
            if not isinstance(value, torch.Tensor) or value.is_quantized:
                continue
            if value.is_floating_point() or value.is_complex():
                value += 0.1 * torch.rand(value.shape, generator=generator)
            elif key.endswith(("num_batches_tracked", "n_averaged", "steps")):
                value += seed
    for module in net.modules():
        if isinstance(getattr(module, "seen", None), dict):  # extra state
            module.seen["steps"] = seed
        if "scale" in vars(type(module)):
            module.scale = float(seed)
    return net.eval()


def original(name: str) -> nn.Module:
    torch.manual_seed(1)
    return numbered(quietly(find(name).make), 1)


def fresh(name: str, into: str = "plain") -> Any:
    """A model to load, whose numbers are others than the original's."""
    model = quietly(target, name, into)
    numbered(inner(model, into), 2)
    return model


def outputs(name: str, net: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return _tensors(quietly(find(name).run, net.eval()))


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    values = found.values() if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping | tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


@lru_cache(maxsize=8)
def wanted_outputs(name: str) -> list[torch.Tensor]:
    return outputs(name, original(name))


def is_the_original(name: str, net: nn.Module) -> bool:
    """Whether the net computes what the original does, bit for bit."""
    return same(outputs(name, net), wanted_outputs(name))


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    assert len(found) == len(wanted) > 0
    return all(
        one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
        for one, two in zip(found, wanted, strict=True)
    )


# -- files -------------------------------------------------------------------------------------
class Variant(NamedTuple):
    """How the net is kept when it is saved, and when it is loaded."""

    save: Callable[[nn.Module], nn.Module]
    into: str = "plain"


def _part_wrapped(net: nn.Module) -> nn.Module:
    """DataParallel around the part that has most keys, as VGG's features in the tutorials."""
    parts = {name: len(child.state_dict()) for name, child in net.named_children()}
    name = max(parts, key=lambda key: parts[key])
    setattr(net, name, nn.DataParallel(getattr(net, name)))
    return net


def _detector(net: nn.Module) -> nn.Module:
    neck = nn.Sequential(OrderedDict(aux_backbone=nn.Linear(3, 3), conv=nn.Conv2d(2, 2, 1)))
    return Inside("backbone", net, neck=neck)


VARIANTS = {
    "plain": Variant(lambda net: net),
    "DataParallel": Variant(nn.DataParallel),
    "compiled": Variant(torch.compile),
    "DDP": Variant(DDPStyle),
    "compiled DDP": Variant(INTO["compiled_DDP"]),
    "twice": Variant(lambda net: nn.DataParallel(nn.DataParallel(net))),
    "part wrapped": Variant(_part_wrapped),
    "backbone": Variant(INTO["backbone"]),
    "of a detector": Variant(_detector),
    "into DataParallel": Variant(lambda net: net, "DataParallel"),
    "into compiled DDP": Variant(lambda net: net, "compiled_DDP"),
    "into a backbone": Variant(lambda net: net, "backbone"),
    "DataParallel into compiled": Variant(nn.DataParallel, "compiled"),
}


class Saved(NamedTuple):
    """A file and the place of the weights in it."""

    file: str
    at: str | None

    def state(self, file: str | None = None) -> Any:
        found = torch.load(file or self.file, weights_only=False)
        return found if self.at is None else found[self.at]


def save(state: State, number: int = 0) -> Saved:
    """One of three containers: a resume file, the bare state_dict, a file of torch 1.5."""
    at = (None, "state_dict", "model")[number % 3]
    whole = state if at is None else {"epoch": 7, at: state, "args": {"arch": "module.net"}}
    torch.save(whole, "net.pth", **(LEGACY if number % 3 == 2 else {}))
    return Saved("net.pth", at)


# -- what must hold ----------------------------------------------------------------------------
def check_variant(capsys: Any, name: str, variant: Variant, number: int) -> None:
    saved = save(quietly(variant.save, original(name)).state_dict(), number)
    check_mended(capsys, saved, name, variant.into)


def check_mended(capsys: Any, saved: Saved, name: str, into: str = "plain") -> dict[str, Any]:
    """The sets are torch's; the command, --fit and load_into give the original back."""
    found = inspected(capsys, saved, name, into)
    check_sets(found, saved, name, into)
    assert not any(found["after"][word] for word in SETS), found["cause"]
    assert not is_the_original(name, inner(fresh(name, into), into))

    if found["fits"]:
        assert found["fix"] is None
        check_strict(saved, saved.file, name, into)
    else:
        check_command(capsys, found["fix"], saved, name, into)
    check_fit(capsys, saved, name, into)
    check_load_into(saved, name, into)
    return found


def inspected(capsys: Any, saved: Saved, name: str, into: str) -> dict[str, Any]:
    status, out, err = cli(capsys, "inspect", saved.file, "--json", "--model", *spec(name, into))
    assert status in (0, 1), err
    match = json.loads(out)["match"]
    assert match["fits"] == (status == 0)
    return match


def check_sets(match: dict[str, Any], saved: Saved, name: str, into: str) -> None:
    """Torch's own sets, in torch's order."""
    says = torch_says(lambda: target(name, into), saved.state())
    if isinstance(says, Raises) and name in PACKED:
        return  # KeyError: torch's quantized layers load their own names or nothing
    assert isinstance(says, Says), says
    assert match["missing_keys"] == says.missing
    assert match["unexpected_keys"] == says.unexpected
    rows = [(m["key"], m["file_shape"], m["model_shape"]) for m in match["mismatched"]]
    assert rows == [(key, list(file), list(own)) for key, file, own in says.mismatched]
    assert match["fits"] == (not (says.missing or says.unexpected or says.mismatched))


def check_command(capsys: Any, fix: str, saved: Saved, name: str, into: str) -> None:
    """The command that is printed, run as it is."""
    words = shlex.split(fix)
    assert words[:2] == ["ckptool", "convert"]
    assert cli(capsys, *words[1:], "--no-fsync")[0] == 0
    check_strict(saved, words[words.index("-o") + 1], name, into)


def check_fit(capsys: Any, saved: Saved, name: str, into: str) -> None:
    words = ("convert", saved.file, "--fit", *spec(name, into), "-o", "fit.pth", "-f", "--no-fsync")
    status, _, err = cli(capsys, *words)
    assert status == 0, err
    check_strict(saved, "fit.pth", name, into)


def check_strict(saved: Saved, file: str, name: str, into: str) -> None:
    """Torch loads it strictly, and the net is the original."""
    model = fresh(name, into)
    quietly(model.load_state_dict, saved.state(file), strict=True)
    assert is_the_original(name, inner(model, into))


def check_load_into(saved: Saved, name: str, into: str) -> None:
    model = fresh(name, into)
    report = quietly(ckptool.load_into, model, saved.file)
    assert report.match.fits
    net = model
    while isinstance(net, nn.DataParallel) or hasattr(net, "_orig_mod"):  # names are those inside
        net = net.module if isinstance(net, nn.DataParallel) else net._orig_mod
    assert set(report.loaded) >= {key for key, _ in net.named_parameters()}
    assert report.extras.get("epoch") == (None if saved.at is None else 7)
    assert is_the_original(name, inner(model, into))
