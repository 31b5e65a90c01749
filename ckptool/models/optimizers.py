"""The state of an optimizer out of a file: what it fits, said before anything is touched.

Knows: state_dicts of optimizers, how torch maps them onto parameters. Must not know: files.
torch goes by position alone. Where both sides know names, names decide; shapes of moments are
compared either way, since torch loads wrong ones without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch  # noqa: TID253 - this room is imported only where torch is asked for
from torch.nn.parameter import is_lazy  # noqa: TID253

from ckptool.errors import DoesNotFit, UsageError
from ckptool.models.spec_words import failed

_LIKE_PARAMETER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "exp_avg_diff", "momentum_buffer",
     "square_avg", "grad_avg", "acc_delta", "sum", "prev", "step_size", "ax", "d_p")
)  # fmt: skip
"""State that has the shape of its parameter, in torch's optimizers and those modelled on them."""
_KINDS = {"betas": "Adam", "dampening": "SGD", "rho": "Adadelta", "lr_decay": "Adagrad",
          "etas": "Rprop", "history_size": "LBFGS"}  # fmt: skip
"""Settings that an optimizer has had since its first version, and those of another kind have not."""
_SHOWN = 4


class _Row(NamedTuple):
    """One parameter of the saved optimizer: its id there, its name where it is known, and the
    shape that its state tells.
    """

    id: Any
    name: str | None
    shape: tuple[int, ...] | None


class _Known(NamedTuple):
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...] | None


def _size(parameter: Any) -> tuple[int, ...] | None:
    return None if is_lazy(parameter) else tuple(parameter.shape)


def prepare(
    optimizer: Any,
    saved: Any,
    model: torch.nn.Module,
    renamed: Callable[[str], str] = lambda name: name,
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, in the order of its own parameters.

    `saved` is the file's state_dict, whose tensors need no numbers yet; `model` gives names to
    the optimizer's parameters, `renamed` the model's names to those of the file.
    Raises DoesNotFit, in a sentence, where groups, names or shapes differ; UsageError for what is
    no optimizer.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not hasattr(optimizer, "load_state_dict"):
        raise UsageError(f"a {type(optimizer).__name__} is no optimizer: it has no param_groups")
    theirs = _groups(saved)
    saved = _numbered(saved, theirs)
    _check_kind(optimizer, groups, theirs)
    names = {id(p): name for name, p in model.named_parameters()}
    known = [_Known(name, _size(p)) for name, p in model.named_parameters()]
    rows = [_rows(group, saved, renamed) for group in theirs]
    own = [list(group["params"]) for group in groups]
    _check_counts(rows, own, known, type(optimizer).__name__)
    ordered = [_ordered(*pair, names) for pair in zip(rows, own, strict=True)]
    for at, (group, parameters) in enumerate(zip(ordered, own, strict=True)):
        _check_shapes(at, group, parameters, names)
    return {**saved, "param_groups": [_regrouped(*pair) for pair in zip(theirs, ordered, strict=True)]}  # fmt: skip


def _groups(saved: Any) -> list[Any]:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    plain = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list | tuple)
        for group in groups
    )
    if not plain or not isinstance(saved.get("state"), dict):
        raise DoesNotFit(
            "the optimizer in the file is not laid out as torch's: no groups of params"
        )
    assert isinstance(groups, list)
    return groups


def _numbered(saved: Mapping[str, Any], groups: Sequence[Any]) -> Mapping[str, Any]:
    """Parameters that have numbers in their groups have them in the state, too: DCP makes all keys
    of dicts texts, and torch passes over what it does not find.
    """
    state = saved["state"]
    ids = [number for group in groups for number in group["params"]]
    texts = {str(number): number for number in ids if type(number) is int and number not in state}
    if not texts.keys() & state.keys():
        return saved
    return {**saved, "state": {texts.get(key, key): value for key, value in state.items()}}


def _rows(
    group: Mapping[str, Any], saved: Mapping[str, Any], renamed: Callable[[str], str]
) -> list[_Row]:
    ids = list(group["params"])
    names = group.get("param_names")
    if all(isinstance(number, str) for number in ids):
        names = ids  # as torch.distributed writes them
    if not isinstance(names, list | tuple) or len(names) != len(ids):
        names = [None] * len(ids)
    return [
        _Row(number, renamed(name) if isinstance(name, str) else None, _shape(saved["state"].get(number)))
        for number, name in zip(ids, names, strict=True)
    ]  # fmt: skip


def _shape(state: Any) -> tuple[int, ...] | None:
    """The shape of the parameter that this state belongs to, where it tells."""
    rows = state.items() if isinstance(state, dict) else ()
    for name, value in rows:
        if name in _LIKE_PARAMETER and isinstance(value, torch.Tensor):
            return tuple(value.shape)
    return None


# -- checks ------------------------------------------------------------------------------------
def _check_kind(optimizer: Any, groups: Sequence[Any], theirs: Sequence[Any]) -> None:
    ours = {name for group in groups for name in group if name in _KINDS}
    found = {name for group in theirs for name in group if name in _KINDS}
    if ours == found or not ours or not theirs:
        return
    kinds = " and ".join(sorted(_KINDS[name] for name in found)) or "none of that kind"
    text = f"the settings of the optimizer in the file are like those of {kinds}, yours is {type(optimizer).__name__}: its state would mean nothing"
    raise DoesNotFit(text, hint="build the optimizer that was saved, or leave optimizer= out")


def _check_counts(
    rows: Sequence[Sequence[_Row]], own: Sequence[Sequence[Any]], known: Sequence[_Known], kind: str
) -> None:  # fmt: skip
    counts, ours = [len(group) for group in rows], [len(group) for group in own]
    if counts == ours:
        return
    text = f"the optimizer in the file has {_counted(counts)}, yours has {_counted(ours)}"
    saved = [row for group in rows for row in group]
    named = [row.name for row in saved if row.name is not None]
    alike = named if len(named) == len(saved) else _alike(saved, known)
    if alike and len(alike) == len(known):
        text += "; the file's are all those of the model"
    elif alike:
        text += f"; {'' if named else 'by their shapes '}the file's are {_listed(alike)}"
    hint = f"build {kind} over the parameters it was saved with, in the same groups, or leave optimizer= out"
    if alike and len(counts) == len(ours) == 1 and counts < ours:
        hint = f"build {kind} over those alone, as when the others were frozen, or leave optimizer= out"
    raise DoesNotFit(text, hint=hint)


def _counted(counts: Sequence[int]) -> str:
    """`1 group of 2 parameters`."""
    if len(counts) == 1:
        return f"1 group of {counts[0]:,} parameter{'s' * (counts[0] != 1)}"
    return f"{len(counts)} groups of {', '.join(f'{n:,}' for n in counts[:8])} parameters"


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name)[1:-1] for name in names[:_SHOWN]]
    if len(names) > _SHOWN:
        return f"{', '.join(shown)} and {len(names) - _SHOWN:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[1:] else shown)


def _alike(saved: Sequence[_Row], known: Sequence[_Known]) -> list[str]:
    """The model's parameters that have the shapes of the saved ones in their order; nothing where
    a shape is not told, or where there is more than one way.
    """
    shapes = [row.shape for row in saved]
    if not shapes or None in shapes:
        return []
    runs = [
        start
        for start in range(len(known) - len(shapes) + 1)
        if [row.shape for row in known[start : start + len(shapes)]] == shapes
    ]
    if len(runs) == 1:
        return [row.name for row in known[runs[0] : runs[0] + len(shapes)]]
    first, last = _places(shapes, known), _places(shapes[::-1], known[::-1])
    if first is None or last is None or first != [len(known) - 1 - at for at in last[::-1]]:
        return []
    return [known[at].name for at in first]


def _places(shapes: Sequence[Any], known: Sequence[_Known]) -> list[int] | None:
    """The earliest parameters that have these shapes in this order."""
    places, at = [], 0
    for shape in shapes:
        while at < len(known) and known[at].shape != shape:
            at += 1
        if at == len(known):
            return None
        places.append(at)
        at += 1
    return places


# -- order -------------------------------------------------------------------------------------
def _ordered(
    rows: Sequence[_Row], own: Sequence[Any], names: Mapping[int, str]
) -> list[_Row]:  # fmt: skip
    """The saved parameters in the order of ours: by name where both sides know all of them."""
    ours = [names.get(id(parameter)) for parameter in own]
    theirs = {row.name: row for row in rows}
    if None in ours or None in theirs or len(theirs) != len(rows):
        return list(rows)
    if set(ours) == set(theirs):
        return [theirs[name] for name in ours]
    strange = [str(name) for name in theirs if name not in ours]
    if len(strange) == len(theirs):
        return list(rows)  # other names altogether say nothing
    lacking = [str(name) for name in ours if name not in theirs]
    raise DoesNotFit(
        f"the optimizer in the file has state of {_listed(strange)}, yours is over {_listed(lacking)} instead",
        hint="build the optimizer over the parameters it was saved with, or leave optimizer= out",
    )


def _check_shapes(
    at: int, rows: Sequence[_Row], own: Sequence[Any], names: Mapping[int, str]
) -> None:  # fmt: skip
    wrong = [
        (place, row, parameter)
        for place, (row, parameter) in enumerate(zip(rows, own, strict=True))
        if row.shape is not None and row.shape != _size(parameter)
    ]
    if not wrong:
        return
    place, row, parameter = wrong[0]
    name = names.get(id(parameter), f"parameter {place} of group {at}")
    more = f", and {len(wrong) - 1:,} more differ" if wrong[1:] else ""
    ours, theirs = sorted(_size(p) or () for p in own), sorted(r.shape or () for r in rows)
    why = "it was saved of another model, or of other parameters"
    if ours == theirs:
        why = "the shapes are the same in another order, so the parameters were listed in another order when it was saved"
    raise DoesNotFit(
        f"the optimizer in the file has state of the shape {list(row.shape or ())} where yours has {repr(name)[1:-1]} {list(_size(parameter) or ())}{more}; {why}",
        hint="build the optimizer over the parameters it was saved with, or leave optimizer= out",
    )


def _regrouped(group: Mapping[str, Any], rows: Sequence[_Row]) -> dict[str, Any]:
    made = {**group, "params": [row.id for row in rows]}
    if "param_names" in group:
        made["param_names"] = [row.name for row in rows]
    return made


def load(optimizer: Any, state: dict[str, Any]) -> None:
    """Hand the state over: moments go to the device and dtype of their parameter, as torch does
    it. Raises ModelError for an error of the optimizer's own.
    """
    try:
        optimizer.load_state_dict(state)
    except Exception as error:
        raise failed(f"{type(optimizer).__name__}.load_state_dict()", error) from error
