"""`compare.match` says of records what torch says of tensors."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict

import pytest
import torch
from causes_support import VGG, Inside, ResNet, Transformer, prefixed, table_of, wanted_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptool.checkpoint import Match, Mismatched, Wanted
from ckptool.compare import match, takes

_KEY = re.compile(r'"([^"]*)"')
_SIZE = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[([^\]]*)\]\) from "
    r"checkpoint, the shape in current model is torch\.Size\(\[([^\]]*)\]\)"
)


def torch_says(model, state):
    """(missing, unexpected, mismatched) by load_state_dict, read from its error."""
    try:
        copy.deepcopy(model).load_state_dict(state, strict=True)
    except RuntimeError as error:
        text = str(error)
    else:
        return set(), set(), set()
    shapes = {(key, ints(ours), ints(theirs)) for key, ours, theirs in _SIZE.findall(text)}
    return listed(text, "Missing"), listed(text, "Unexpected"), shapes


def listed(text, word):
    line = next((line for line in text.splitlines() if f"{word} key(s)" in line), "")
    return set(_KEY.findall(line))


def ints(text):
    return tuple(int(part) for part in text.split(",") if part.strip())


def we_say(model, state):
    found = match(wanted_of(model), shapes_of(state), getattr(state, "_metadata", None))
    shapes = {(m.key, m.file_shape, m.model_shape) for m in found.mismatched}
    return set(found.missing_keys), set(found.unexpected_keys), shapes


def shapes_of(state):
    return {k: tuple(v.shape) if isinstance(v, torch.Tensor) else None for k, v in state.items()}


NETS = {
    "resnet": ResNet(blocks=(1, 1), width=2),
    "vgg": VGG(),
    "wrapped": VGG(wrap=True),
    "tied": Transformer(layers=1),
    "lstm": nn.LSTM(3, 4, 2),
    "norms": nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False),
                           nn.SyncBatchNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3, affine=True)),
    "dp": nn.DataParallel(VGG()),
}  # fmt: skip


def changed(draw, model):
    """A state_dict near the model's: keys gone, keys more, shapes and layer versions changed."""
    state = model.state_dict()
    versions = state._metadata
    keys = list(state)
    for key in draw(st.lists(st.sampled_from(keys), max_size=4, unique=True)):
        del state[key]
    for key in draw(st.lists(st.sampled_from(keys), max_size=3, unique=True)):
        state[key + draw(st.sampled_from([".below", "_more"]))] = torch.ones(2)
    for key in draw(st.lists(st.sampled_from(keys), max_size=3, unique=True)):
        if key in state:
            shape = tuple(state[key].shape)
            new = draw(st.sampled_from([(1,), (), (2,), (*shape, 1), shape[1:]]))
            state[key] = torch.ones(new)
    for path in draw(st.lists(st.sampled_from(list(versions)), max_size=3, unique=True)):
        version = draw(st.sampled_from([None, 1, 2, 3]))
        if version is None:
            versions.pop(path, None)
        else:
            versions[path] = {"version": version}
    if draw(st.booleans()):
        named = OrderedDict(state)
        if draw(st.booleans()):
            named._metadata = versions
        return named
    return state


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_sets_are_torchs(data):
    model = NETS[data.draw(st.sampled_from(sorted(NETS)))]
    state = changed(data.draw, model)
    assert we_say(model, state) == torch_says(model, state)


@pytest.mark.parametrize("name", NETS)
def test_a_net_takes_its_own_keys(name):
    model = NETS[name]
    found = match(wanted_of(model), shapes_of(model.state_dict()), model.state_dict()._metadata)
    assert found == Match(loaded=tuple(model.state_dict()))
    assert found.fits


def test_the_order_is_the_models_and_the_files():
    wanted = [Wanted("b", (1,)), Wanted("a", (1,)), Wanted("c", (1,))]
    found = match(wanted, {"z": (1,), "c": (1,), "y": (1,)})
    assert found == Match(("c",), ("b", "a"), ("z", "y"))


def test_a_scalar_takes_one_element_and_nothing_else():
    """torch 0.3 wrote scalars as one element."""
    assert takes((), (1,))
    assert not takes((), (1, 1))
    assert not takes((), (2,))
    assert not takes((1,), ())
    assert takes(None, (3, 4))
    assert takes(None, None)
    assert not takes((3,), None)


def test_what_is_no_tensor_is_neither_missing_nor_unexpected():
    found = match([Wanted("w", (2,)), Wanted("e._extra_state", None, kind="extra")],
                  {"w": None, "e._extra_state": None, "epoch": None})  # fmt: skip
    assert found.mismatched == (Mismatched("w", None, (2,)),)
    assert found.loaded == ("e._extra_state",)
    assert found.missing_keys == ()
    assert found.unexpected_keys == ("epoch",)


@pytest.mark.parametrize(
    ("version", "missing"),
    [(None, False), (1, False), (1.5, False), (2, True), (3, True), ("1", True), (True, False)],
)
def test_a_counter_is_forgiven_by_the_version_of_its_layer(version, missing):
    bn = nn.BatchNorm1d(3)
    wanted = [w._replace(key=f"bn.{w.key}") for w in wanted_of(bn)]
    have = {w.key: w.shape for w in wanted if "num_batches" not in w.key}
    found = match(wanted, have, {"bn": {"version": version}, "": {"version": 9}})
    assert (found.missing_keys == ("bn.num_batches_tracked",)) is missing


def test_a_counter_of_no_batch_norm_is_missing():
    wanted = [Wanted("x.num_batches_tracked", ())]
    assert match(wanted, {}).missing_keys == ("x.num_batches_tracked",)


def test_metadata_of_any_kind_is_borne():
    wanted = wanted_of(nn.BatchNorm1d(3))
    have = {w.key: w.shape for w in wanted[:-1]}
    for odd in ({"": None}, {"": 3}, {"": {"version": {}}}, {"": {"version": float("nan")}}):
        match(wanted, have, odd)


def test_records_of_a_table_serve(tmp_path):
    model = Inside("net", VGG())
    torch.save(prefixed(model.state_dict(), "module."), tmp_path / "net.pth")
    import ckptool

    with ckptool.open(tmp_path / "net.pth") as file:
        table = file.tables[0]
    have = {tensor.key: tensor.shape for tensor in table.tensors}
    assert table.metadata
    found = match(wanted_of(nn.DataParallel(model)), have, table.metadata)
    assert found.fits
    assert [t.key for t in table_of(prefixed(model.state_dict(), "module.")).tensors] == list(have)
