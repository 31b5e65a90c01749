"""Files that no rule makes fit, a layer missing or a head of another size: exactly that is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expected_support import copied, quietly
from fit_support import (
    VARIANTS,
    Saved,
    State,
    check_sets,
    fresh,
    inspected,
    is_the_original,
    original,
    save,
    spec,
)
from torch import nn
from verbs_support import cli

import ckptool
from ckptool.errors import DoesNotFit


def owners(net: nn.Module) -> dict[str, list[str]]:
    """{path of a layer: its keys}, of those whose tensors no other layer has."""
    state = net.state_dict(keep_vars=True)
    places: dict[Any, int] = {}
    for value in state.values():
        places[_place(value)] = places.get(_place(value), 0) + 1
    found: dict[str, list[str]] = {}
    for key, value in state.items():
        path = key.rpartition(".")[0]
        found.setdefault(path, [])
        if (
            isinstance(value, torch.Tensor)
            and places[_place(value)] == 1
            and not value.is_quantized
        ):
            found[path].append(key)
    return {path: keys for path, keys in found.items() if any(state[key].dim() for key in keys)}


def _place(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) and value.numel() else id(value)


def without_a_layer(state: State, keys: list[str]) -> Any:
    """The state_dict less these, with its versions."""
    left = copied(state)
    for key in keys:
        del left[key]
    return left


def with_another_head(state: State, keys: list[str]) -> Any:
    """One row more in each tensor of a layer."""
    changed = copied(state)
    for key in keys:
        if changed[key].dim():
            changed[key] = torch.cat([changed[key], changed[key][:1]])
    return changed


def put_in(net: nn.Module, name: str, keys: list[str]) -> nn.Module:
    """The net with these keys from the original."""
    state = net.state_dict()
    state.update({key: value for key, value in original(name).state_dict().items() if key in keys})
    quietly(net.load_state_dict, state)
    return net


def numbers(net: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(dict(net.state_dict()))


def unchanged(net: nn.Module, before: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key]
        for key, value in net.state_dict().items()
    )


def spoiled(
    name: str, wrap: str, spoil: Callable[..., Any], number: int
) -> tuple[Saved, list[str]]:
    """A file of the net that is not right in one layer, and that layer's keys: one in the middle
    for `without_a_layer`, the last for `with_another_head`.
    """
    net = original(name)
    rows = list(owners(net).values())
    keys = rows[len(rows) // 2 if spoil is without_a_layer else -1]
    lead = "module." if wrap == "DataParallel" else ""
    state = spoil(VARIANTS[wrap].save(net).state_dict(), [lead + key for key in keys])
    return save(state, number), keys


def check_a_missing_layer(capsys: Any, name: str, wrap: str, number: int) -> None:
    saved, keys = spoiled(name, wrap, without_a_layer, number)
    found = inspected(capsys, saved, name, "plain")
    check_sets(found, saved, name, "plain")
    wanted = [key for key in original(name).state_dict() if key in keys]
    assert found["after"]["missing_keys"] == wanted
    assert found["after"]["unexpected_keys"] == found["after"]["mismatched"] == []
    check_partial(capsys, saved, name, wanted, f"{len(wanted)} missing ({wanted[0]}")

    model = fresh(name)
    before = numbers(model)
    with pytest.raises(DoesNotFit, match=f"{len(wanted)} missing"):
        quietly(ckptool.load_into, model, saved.file)
    assert unchanged(model, before)
    report = quietly(ckptool.load_into, model, saved.file, strict=False)
    assert (list(report.missing_keys), report.unexpected_keys) == (wanted, ())
    assert is_the_original(name, put_in(model, name, wanted))


def check_another_head(capsys: Any, name: str, wrap: str, number: int) -> None:
    saved, keys = spoiled(name, wrap, with_another_head, number)
    found = inspected(capsys, saved, name, "plain")
    check_sets(found, saved, name, "plain")
    state = original(name).state_dict()
    wanted = [key for key in state if key in keys and state[key].dim()]
    after = found["after"]
    assert [row["key"] for row in after["mismatched"]] == wanted
    assert after["missing_keys"] == after["unexpected_keys"] == []
    for row in after["mismatched"]:
        own = list(state[row["key"]].shape)
        assert (row["model_shape"], row["file_shape"]) == (own, [own[0] + 1, *own[1:]])
    check_partial(capsys, saved, name, wanted, f"{len(wanted)} mismatched ({wanted[0]}")

    model = fresh(name)
    before = numbers(model)
    with pytest.raises(DoesNotFit, match=f"{len(wanted)} of another shape"):
        quietly(ckptool.load_into, model, saved.file, strict=False)
    assert unchanged(model, before)
    report = quietly(ckptool.load_into, model, saved.file, mismatched="skip")
    assert [row.key for row in report.mismatched] == wanted
    assert (report.missing_keys, report.unexpected_keys) == ((), ())
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in wanted)
    assert is_the_original(name, put_in(model, name, wanted))


def check_partial(capsys: Any, saved: Saved, name: str, left: list[str], said: str) -> None:
    """--fit refuses with these words; with --partial all but `left` is written."""
    words = ["convert", saved.file, "--fit", *spec(name, "plain"), "-o", "fit.pth", "--no-fsync"]
    status, _, err = cli(capsys, *words)
    assert status == 1
    assert said in err
    assert not Path("fit.pth").exists()
    assert cli(capsys, *words, "--partial")[0] == 0
    model = fresh(name)
    found = quietly(model.load_state_dict, saved.state("fit.pth"), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (left, [])
    assert is_the_original(name, put_in(model, name, left))
