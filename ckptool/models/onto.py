"""A state_dict into a model, through the model's own load hooks.

Knows: wrappers around a model, models on the meta device, what torch's load_state_dict says.
Must not know: files, rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ckptool.models import torch_missing

try:
    import torch  # this room is imported only where torch is asked for
    from torch.nn.parameter import is_lazy
except (ImportError, OSError) as error:
    raise torch_missing(error) from error

from ckptool.errors import DoesNotFit, ModelError, RuleMatchesNothing, UsageError
from ckptool.globs import match_glob
from ckptool.models.spec_words import failed

_COMPILED = "OptimizedModule"
_HEAD = "Error(s) in loading state_dict for "


def bare(model: Any) -> torch.nn.Module:
    """The net inside DataParallel, DistributedDataParallel and torch.compile.

    Raises UsageError for what is no module.
    """
    if not isinstance(model, torch.nn.Module):
        text = f"a {type(model).__name__} is no model: load_into needs a torch.nn.Module"
        raise UsageError(text, hint="call the class first, as in load_into(Net(), path)")
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    net: Any = model
    while True:
        inner = net._modules.get("_orig_mod") if type(net).__name__ == _COMPILED else None
        inner = net.module if isinstance(net, wrappers) else inner
        if inner is None:
            return net  # type: ignore[no-any-return]
        net = inner


def is_on_meta(model: torch.nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def unsaved(model: torch.nn.Module, keys: Collection[str]) -> tuple[str, ...]:
    """Buffers on the meta device that no state_dict holds, so that no load gives them numbers."""
    rows = model.named_buffers(remove_duplicate=False)
    return tuple(name for name, buffer in rows if buffer.is_meta and name not in keys)


def without_numbers(model: torch.nn.Module) -> tuple[str, ...]:
    """Parameters and buffers that are on the meta device."""
    rows = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]  # fmt: skip
    return tuple(name for name, tensor in rows if tensor.is_meta)


def check_wrapped(model: torch.nn.Module, device: torch.device) -> None:
    """Raise UsageError where a wrapper keeps its net on another device than this."""
    home = getattr(model, "src_device_obj", None)
    if isinstance(home, torch.device) and _full(home) != _full(device):
        text = f"the model is wrapped in DataParallel, which keeps it on {home}, not {device}"
        raise UsageError(text, hint="leave device= out, or load before wrapping it")
    ids = getattr(model, "device_ids", None)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and ids:
        raise UsageError(
            "a model in DistributedDataParallel is not moved to another device",
            hint="leave device= out, or load before wrapping it",
        )


def _full(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0


def move(model: torch.nn.Module, device: torch.device) -> None:
    """Move all that has numbers; Parameters stay the objects they are."""
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


# -- loading -----------------------------------------------------------------------------------
def load_state(
    model: torch.nn.Module, state: OrderedDict[str, Any], *, assign: bool, expected: Any
) -> None:
    """Load; `expected` is the Match that was foretold, less what was left out.

    Raises DoesNotFit with torch's words, ModelError for an error of the model's own hooks.
    """
    try:
        if assign:
            said = model.load_state_dict(_assignable(model, state), strict=False, assign=True)
        else:
            said = model.load_state_dict(state, strict=False)
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith(_HEAD):
            lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
            raise DoesNotFit(f"the model does not take it: {'; '.join(lines[:3])}") from error
        raise failed(f"{type(model).__name__}.load_state_dict()", error) from error
    missing = set(getattr(said, "missing_keys", ())) - set(expected.missing_keys)
    unexpected = set(getattr(said, "unexpected_keys", ())) - set(expected.unexpected_keys)
    if missing or unexpected:
        keys = ", ".join(sorted(missing | unexpected)[:3])
        text = f"the model's own hooks took other keys than its shapes told: {keys}"
        raise ModelError(text, hint="look at its _load_from_state_dict and load hooks")


def lacks_numbers(value: Any) -> bool:
    """Whether a value from a file is a tensor on meta."""
    return isinstance(value, torch.Tensor) and not is_lazy(value) and value.is_meta


def lossy(state: Mapping[str, Any], dtypes: Mapping[str, str]) -> list[str]:
    """Keys whose complex numbers go where real ones are, or fractions where whole ones are:
    torch casts them with a warning, or none.
    """
    found = []
    for key, value in state.items():
        goal = getattr(torch, dtypes.get(key, ""), None)
        if (
            not isinstance(value, torch.Tensor)
            or not isinstance(goal, torch.dtype)
            or is_lazy(value)
        ):
            continue
        fraction = value.is_floating_point() and not goal.is_floating_point and not goal.is_complex
        if (value.is_complex() and not goal.is_complex) or fraction:
            found.append(f"{key} ({str(value.dtype)[6:]} to {str(goal)[6:]})")
    return found


def _assignable(model: torch.nn.Module, state: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
    """The state with Parameters that a model on meta can take as its own: in its dtype, one for
    each of its Parameters, so that what is tied stays tied and what is not does not become so.
    """
    owners: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    owners.update(model.named_buffers(remove_duplicate=False))
    last = {id(owners[key]): key for key in state if key in owners}  # torch lets the last one win
    made: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    found = OrderedDict(state)
    for key, owner in owners.items():
        value = state.get(last.get(id(owner), ""))  # also where a tied name stands in for this one
        if not isinstance(value, torch.Tensor) or is_lazy(owner):
            continue
        if id(owner) not in made:
            made[id(owner)] = _owned(value, owner, seen)
        found[key] = made[id(owner)]
    if hasattr(state, "_metadata"):
        found._metadata = state._metadata  # type: ignore[attr-defined]
    return found


def _owned(value: torch.Tensor, owner: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """A value as the owner's own, with memory that nothing else has."""
    made = value.detach()
    if owner.shape == () and made.shape == (1,):
        made = made[0]
    if made.layout is torch.strided and not made.is_quantized:
        made = made.to(owner.dtype)
        storage = made.untyped_storage()
        if storage._cdata in seen or storage.nbytes() != made.numel() * made.element_size():
            made = made.clone()
        seen.add(made.untyped_storage()._cdata)
    if isinstance(owner, torch.nn.Parameter):
        return torch.nn.Parameter(made, owner.requires_grad)
    return made


# -- freezing ----------------------------------------------------------------------------------
class Frozen(NamedTuple):
    """Names of parameters, of the net without its wrappers, in its order."""

    frozen: tuple[str, ...]
    kept: tuple[str, ...]


def freeze(model: Any, keep: Sequence[str], only: Sequence[str] | None) -> Frozen:
    """Set requires_grad to False for all parameters, or those that `only` names, but those that
    `keep` names: whole names, or globs. A tied one is kept when one of its names is.

    Raises RuleMatchesNothing for a name or glob of nothing, before anything is changed.
    """
    net = bare(model)
    rows = list(net.named_parameters(remove_duplicate=False))
    names = [name for name, _ in rows]
    known = dict.fromkeys([*names, *net.state_dict(keep_vars=True)])
    held = {id(p) for name, p in rows if name in _taken(keep, names, known)}
    wanted = names if only is None else _taken(only, names, known)
    frozen: list[str] = []
    for name, parameter in rows:
        if name in wanted and id(parameter) not in held:
            parameter.requires_grad_(False)
            frozen.append(name)
    gone = set(frozen)
    return Frozen(tuple(frozen), tuple(name for name in names if name not in gone))


def _taken(patterns: Sequence[str], names: Sequence[str], known: Mapping[str, None]) -> set[str]:
    """The names that any pattern takes; a buffer's whole name takes nothing and is no mistake."""
    taken: set[str] = set()
    for pattern in patterns:
        if pattern in known:
            taken.add(pattern)
            continue
        found = [name for name in names if match_glob(pattern, name)]
        if not found:
            text = f"{pattern!r} matches no parameter; nothing was frozen"
            raise RuleMatchesNothing(text, hint=f"there are {', '.join(names[:8])}")
        taken.update(found)
    return taken
