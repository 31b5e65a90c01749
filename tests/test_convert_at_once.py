"""convert with parts, types, names and devices at once, on random files, against torch."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch
from fixtures.make_fixtures import element_bytes, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts_support import addresses, convert, loaded_every_way, moved
from torch import nn
from verbs_support import LEGACY, devices, load

from ckptool.errors import RuleMatchesNothing, Unsupported

TABLES = ("model", "ema")
FLOATS = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn")


@st.composite
def files(draw):
    """Two state_dicts, an optimizer and a list over views of a few storages; what to do."""
    legacy = draw(st.booleans())
    kinds = [name for name in (*FLOATS, "int64", "bool") if not (legacy and "float8" in name)]
    bases = [
        (torch.arange(draw(st.integers(0, 24))) % 7).to(
            getattr(torch, draw(st.sampled_from(kinds)))
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    pool = [draw(view(draw(st.sampled_from(bases)))) for _ in range(draw(st.integers(1, 7)))]
    names = ["a.w", "a.b", "bn.w", "c"]
    one = st.sampled_from(pool)
    tables = {
        name: OrderedDict((key, draw(one)) for key in names if draw(st.integers(0, 3)))
        for name in TABLES
    }
    state = {i: {"exp_avg": draw(one)} for i in range(draw(st.integers(0, 2)))}
    obj = {
        **{name: sd or OrderedDict(x=draw(one)) for name, sd in tables.items()},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "list": [draw(one) for _ in range(draw(st.integers(0, 2)))],
        "epoch": 3,
    }
    order = draw(st.permutations(list(obj)))
    options = {
        "select": draw(st.sampled_from((None, None, "model", "ema"))),
        "drop_entry": draw(st.sets(st.sampled_from(("ema", "optimizer", "list", "epoch")))),
        "drop": draw(st.sets(st.sampled_from(names), max_size=2)),
        "dtype": draw(st.sampled_from((None, *FLOATS))),
        "keep": draw(st.sets(st.sampled_from(names), max_size=2)),
        "compact": draw(st.booleans()),
        "prefix": draw(st.sampled_from(("", "net."))),
        "to": draw(st.sampled_from((None, "zip", "legacy"))),
        "to_cpu": draw(st.booleans()),
    }
    if options["select"] in options["drop_entry"]:
        options["select"] = None
    return {key: obj[key] for key in order}, options, LEGACY if legacy else {}


@st.composite
def view(draw, base):
    """A strided view, or a Parameter of it."""
    left, shape, stride = max(base.numel() - 1, 0), [], []
    for size in draw(st.lists(st.integers(0, 3), max_size=2)):
        step = draw(st.integers(0, left // max(size - 1, 1)))
        left -= step * max(size - 1, 0)
        shape.append(size)
        stride.append(step)
    if not base.numel():
        shape, stride, left = [0], [1], 0
    made = base.as_strided(shape, stride, draw(st.integers(0, left)))
    return nn.Parameter(made, False) if draw(st.integers(0, 4)) == 0 else made


def wanted_of(obj, options):
    """What should come out, in the old types; {path: new type}; {table path: names}."""
    select, gone = options["select"], options["drop_entry"]
    left = {k: v for k, v in obj.items() if k not in gone and select in (None, k)}
    dtypes, floats = {}, set()
    for name in TABLES:
        if name not in left:
            continue
        left[name] = OrderedDict((k, v) for k, v in left[name].items() if k not in options["drop"])
        for key, one in left[name].items():
            if one.is_floating_point():
                floats.add(options["prefix"] + key)
                if options["dtype"] and key not in options["keep"]:
                    dtypes[(key,) if select else (name, key)] = getattr(torch, options["dtype"])
    keep = [options["prefix"] + key for key in options["keep"]]
    return (left[select] if select else left), dtypes, [key for key in keep if key in floats]


def spans(obj, path=()):
    """(path, tensor, the bytes it reads) of every tensor."""
    if isinstance(obj, torch.Tensor):
        size = obj.element_size()
        yield path, obj, {a + i for a in addresses(obj).tolist() for i in range(size)}
    elif isinstance(obj, dict | list):
        for key, value in obj.items() if isinstance(obj, dict) else enumerate(obj):
            yield from spans(value, (*path, key))


def must_refuse(wanted, dtypes, options, legacy):
    rows = [(dtypes.get(path, t.dtype), t, read) for path, t, read in spans(wanted)]
    torn = any(
        one[0] is not two[0] and (one[1] is two[1] or one[2] & two[2])
        for one, two in itertools.combinations(rows, 2)
    )
    target = options["to"] or ("legacy" if legacy else "zip")
    old = all("float8" not in str(dtype) for dtype, _, _ in rows)
    return torn or (target == "legacy" and options["to"] == "legacy" and not old)


def outcome(net, out, words):
    try:
        convert(net, out, **words)
    except (Unsupported, RuleMatchesNothing) as error:
        return error
    return None


@given(files())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_parts_types_names_and_devices_at_once(tmp_path_factory, case):
    obj, options, legacy = case
    folder = tmp_path_factory.mktemp("all")
    net, out = folder / "net.pth", folder / "out.pth"
    save(obj, net, "cuda:0", **legacy)
    before = load(net)
    wanted, dtypes, keep = wanted_of(before, options)
    inside = {key for name in TABLES if name not in options["drop_entry"] and options["select"] in (None, name) for key in before[name]}  # fmt: skip
    words = {
        "select": options["select"], "drop_entry": sorted(options["drop_entry"]),
        "drop": sorted(options["drop"] & inside), "compact": options["compact"],
        "dtype": options["dtype"], "to": options["to"], "to_cpu": options["to_cpu"],
        "keep_dtype": keep if options["dtype"] else (), "add_prefix": options["prefix"] or (),
    }  # fmt: skip
    refused = outcome(net, out, words)
    if refused is not None:
        if isinstance(refused, Unsupported):
            assert must_refuse(wanted, dtypes, options, legacy), refused
        else:  # no name is left to get the prefix
            assert "prefix" in str(refused)
            assert not any(dict(wanted) if options["select"] else map(wanted.get, TABLES))
        assert not out.exists()
        return
    assert not must_refuse(wanted, dtypes, options, legacy)
    tables = {()} if options["select"] else {("model",), ("ema",)}
    moved(
        wanted, loaded_every_way(out),
        dtype=lambda path, tensor: dtypes.get(path, tensor.dtype),
        names=lambda path, key: options["prefix"] + key if path in tables else key,
    )  # fmt: skip
    assert set(devices(out).values()) <= ({"cpu"} if options["to_cpu"] else {"cuda:0"})


@given(files())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_same_in_safetensors_and_back(tmp_path_factory, case):
    obj, options, legacy = case
    folder = tmp_path_factory.mktemp("st")
    net, out, back = folder / "net.pth", folder / "out.safetensors", folder / "back.pth"
    save(obj, net, "cuda:0", **legacy)
    options = {**options, "select": options["select"] or "model", "drop_entry": set()}
    wanted, dtypes, keep = wanted_of(load(net), options)
    if not wanted:
        return
    target = getattr(torch, options["dtype"]) if options["dtype"] else None
    convert(
        net, out, select=options["select"], dtype=options["dtype"], add_prefix=options["prefix"] or (),
        drop=sorted(options["drop"] & obj[options["select"]].keys()), compact=options["compact"],
        keep_dtype=keep if target else (),
    )  # fmt: skip
    convert(out, back)
    made = load(back, weights_only=True)
    assert list(made) == [options["prefix"] + key for key in wanted]
    for key, one in wanted.items():
        found = made[options["prefix"] + key]
        goal = dtypes.get((key,), one.dtype)
        assert (found.dtype, found.shape) == (goal, one.shape)
        assert element_bytes(found) == element_bytes(one.detach().to(goal).contiguous())
