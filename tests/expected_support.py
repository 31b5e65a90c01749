"""What torch itself says of a state_dict, on a real copy, and the ways to spoil one."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import nn


class Says(NamedTuple):
    missing: list
    unexpected: list
    mismatched: list
    loaded: list
    unseen: list


class Raises(NamedTuple):
    error: Exception


class DDPStyle(nn.Module):
    """A net one level down under `module`, as DistributedDataParallel keeps it."""

    def __init__(self, net):
        super().__init__()
        self.module = net


WRAPS = {
    "plain": lambda net: net,
    "DataParallel": nn.DataParallel,
    "compiled": torch.compile,
    "DDP": DDPStyle,
}


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def shapes_of(state):
    """What a reader of the file would know: shapes, None for what is no tensor."""
    out = {}
    for key, value in state.items():
        lazy = torch.nn.parameter.is_lazy(value)
        tensor = isinstance(value, torch.Tensor) and not lazy
        out[key] = tuple(value.shape) if tensor else None
    return out


def versions_of(state):
    found = getattr(state, "_metadata", None)
    return None if found is None else {path: dict(entry) for path, entry in found.items()}


def with_metadata(rows, metadata):
    state = OrderedDict(rows)
    if metadata is not None:
        state._metadata = OrderedDict((k, dict(v)) for k, v in metadata.items())
    return state


def trained(model):
    """A state_dict of the model in which every number differs from the model's."""
    state = model.state_dict()
    rows = [(key, _changed(value)) for key, value in state.items()]
    return with_metadata(rows, versions_of(state))


def _changed(value):
    if torch.nn.parameter.is_lazy(value):
        return value
    if not isinstance(value, torch.Tensor) or value.is_quantized:
        return value
    if value.dtype == torch.bool:
        return ~value
    return torch.nan_to_num(value, posinf=8, neginf=-8) + 3


def torch_says(make, state):
    """Missing, unexpected and mismatched of a real load into a real model, in torch's words."""
    model = quietly(make)
    before = _numbers(model)
    try:
        result = quietly(model.load_state_dict, copied(state), strict=False)
        sets = list(result.missing_keys), list(result.unexpected_keys), []
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            return Raises(error)
        sets = _spelled_out(make, state)
    except Exception as error:
        return Raises(error)
    after = _numbers(model)
    changed = [key for key, value in after.items() if _differ(value, before.get(key))]
    return Says(*sets, changed, [key for key, value in after.items() if not _visible(value)])


def copied(state):
    return with_metadata(state.items(), versions_of(state))


def _numbers(model):
    return {
        key: value.clone() if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value) else value
        for key, value in model.state_dict().items()
    }  # fmt: skip


def _visible(value):
    """Whether loading other numbers into it could be seen at all."""
    return (
        isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value) and value.numel()
    )


def _differ(now, before):
    if not _visible(now):
        return False
    if not isinstance(before, torch.Tensor) or torch.nn.parameter.is_lazy(before):
        return True
    return now.shape != before.shape or not torch.equal(now, before)


def _spelled_out(make, state):
    """A strict load names every set in its message."""
    try:
        quietly(quietly(make).load_state_dict, copied(state), strict=True)
    except RuntimeError as error:
        lines = str(error).split("\n\t")[1:]
    keys = {"Missing": [], "Unexpected": []}
    shapes = []
    for line in lines:
        word = line.split(" ")[0]
        if word in keys and "key(s) in state_dict: " in line:
            keys[word] = re.findall(r'"([^"]*)"', line)
        elif line.startswith("size mismatch"):
            name, file, model = re.fullmatch(
                r"size mismatch for (.*): copying .*\((.*)\) from .* is torch.Size\((.*)\)\.", line
            ).groups()
            shapes.append((name, _numbers_in(file), _numbers_in(model)))
        elif "expected torch.Tensor" in line:
            shapes.append((line.split('"')[1], None, None))
    return keys["Missing"], keys["Unexpected"], shapes


def _numbers_in(text):
    return tuple(int(number) for number in re.findall(r"\d+", text))


# --- ways to spoil a state_dict ---------------------------------------------------------


def same(state):
    return state


def dropped(state):
    rows = list(state.items())
    gone = {0, len(rows) // 2, len(rows) - 1}
    return with_metadata([r for i, r in enumerate(rows) if i not in gone], versions_of(state))


def added(state):
    rows = list(state.items())
    first = rows[0][0]
    extra = torch.zeros(2)
    rows.insert(0, ("head.weight", extra))
    rows += [(first + "_extra", extra), (first + ".deeper", extra), ("total_ops", extra[0])]
    rows += [("_extra_state", extra), (first.rpartition(".")[0] + "._extra_state", extra)]
    return with_metadata(rows, versions_of(state))


def prefixed(state):
    versions = {
        f"module.{path}".rstrip("."): row for path, row in (versions_of(state) or {}).items()
    }
    return with_metadata([(f"module.{key}", value) for key, value in state.items()], versions)


def reshaped(state):
    """Every third tensor gets one row more; a scalar a dimension of two."""
    rows = []
    for number, (key, value) in enumerate(state.items()):
        plain = isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
        if plain and not value.is_quantized and number % 3 == 0:
            value = torch.zeros(
                (value.shape[0] + 1, *value.shape[1:]) if value.dim() else (2,), dtype=value.dtype
            )
        rows.append((key, value))
    return with_metadata(rows, versions_of(state))


def one_element(state):
    """Scalars as torch 0.3 wrote them: one element in one dimension; and vectors of one as scalars."""
    rows = []
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and not torch.nn.parameter.is_lazy(value)
            and value.numel() == 1
        ):
            value = value.reshape(1) if value.dim() == 0 else value.reshape(())
        rows.append((key, value))
    return with_metadata(rows, versions_of(state))


def no_versions(state):
    """As safetensors keep it: without `_metadata`, and without the counters that came later."""
    return with_metadata([row for row in state.items() if "num_batches" not in row[0]], None)


def old_versions(state):
    old = {path: {**row, "version": 1} for path, row in (versions_of(state) or {}).items()}
    return with_metadata([row for row in state.items() if "num_batches" not in row[0]], old)


def no_tensors(state):
    """Every fourth value is a list."""
    rows = [(key, [1] if n % 4 == 1 else value) for n, (key, value) in enumerate(state.items())]
    return with_metadata(rows, versions_of(state))


def backwards(state):
    return with_metadata(reversed(state.items()), versions_of(state))


def empty(state):
    return with_metadata([], versions_of(state))


SPOILS = [
    same, dropped, added, prefixed, reshaped, one_element, no_versions, old_versions, no_tensors,
    backwards, empty,
]  # fmt: skip
FEW = [same, dropped, prefixed, reshaped]


# --- whether a model was left alone ------------------------------------------------------


def fingerprint(model):
    """Everything a match could disturb: objects by identity, tensors by version, hooks, classes."""
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            rows.append((name, [(k, v._version) for k, v in module.state_dict().items()]))
            continue
        for key, value in module.__dict__.items():
            rows.append((name, type(module), key, id(value), _inside(value)))
    return rows


def _inside(value):
    if isinstance(value, dict):
        return [(key, id(item), _inside(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [(id(item), _inside(item)) for item in value]
    if isinstance(value, torch.Tensor):
        lazy = torch.nn.parameter.is_lazy(value)
        return type(value), None if lazy else (value._version, value.data_ptr(), value.shape)
    return value if isinstance(value, set) else None
