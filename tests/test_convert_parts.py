"""convert --select, --drop-entry, --only, --drop, --compact: which part of a file comes out."""

from __future__ import annotations

import os
from collections import OrderedDict

import pytest
import torch
from fixtures.make_fixtures import Net, save
from formats_support import archive, dictionary, pickled, storage, tensor
from parts_support import Memory, convert, loaded_every_way, moved, stored_bytes
from safetensors.torch import save_file
from torch import nn
from verbs_support import (
    CONVERTIBLE,
    FIXTURES,
    LEGACY,
    TRUTHS,
    Comparison,
    assert_same,
    at,
    cli,
    devices,
    keys,
    left_alone,
    load,
    members,
    notes,
    resume,
    save_resume,
)

from ckptool.errors import RuleMatchesNothing, UnsafePickle, Unsupported, UsageError

BOTH = pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])


@pytest.fixture
def net(tmp_path):
    """A path to save to."""
    return tmp_path / "net.pth"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.pth"


class Shell:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def tied_to_everything():
    """A net whose tensors are the very objects, and views of the memory, of what stands before:
    the first dict of the file holds what the others fetch.
    """
    sd = Net(3).state_dict()
    flat = torch.arange(40.0)
    sd["view"], sd["columns"] = flat[4:10], flat.view(8, 5)[:, 1:3]
    keys = list(sd)
    return {
        "optimizer": {
            "state": {0: {"exp_avg": sd["fc.weight"], "step": torch.tensor(3.0)}},
            "param_groups": [{"params": [0], "lr": 0.1, "names": keys}],
        },
        "ema": OrderedDict((key, sd[key]) for key in keys if "bn" not in key),
        "flat": flat,
        "state_dict": sd,
        "epoch": 3,
    }


# -- --select ----------------------------------------------------------------------------------
@BOTH
def test_select_gives_a_bare_state_dict(options, net, out):
    obj, tags = resume()
    save(obj, net, tags, **options)
    done = convert(net, out, select="state_dict")

    made = loaded_every_way(out)
    assert_same(load(net)["state_dict"], load(out))
    assert type(made["module.scale"]) is nn.Parameter
    assert list(made._metadata.items()) == list(obj["state_dict"]._metadata.items())
    assert b"argparse" not in members(out)["data.pkl"]
    assert set(devices(out).values()) == {"cuda:0"}
    assert len(devices(out)) == len(
        {t.untyped_storage().data_ptr() for t in obj["state_dict"].values()}
    )
    left = {"epoch", "best_key", "args", "history", "optimizer", "rng", "scalar", "curve"}
    assert {name.partition(".")[0] for name in done.entries_left} >= left
    assert done.dropped == ()


@pytest.mark.parametrize("target", ["zip", "legacy"])
@pytest.mark.parametrize(
    ("name", "path"),
    [(n, t["path"]) for n in ("ema.pth", "gan.pth") for t in TRUTHS[n]["tables"]],
    ids=str,
)
def test_select_takes_any_of_several(name, path, target, out):
    convert(FIXTURES / name, out, select=".".join(path), to=target)

    assert assert_same(at(load(FIXTURES / name), path), load(out)) == 9
    assert loaded_every_way(out) is not None


def test_select_of_a_nested_one(net, out):
    sd = Net().state_dict()
    save({"model": {"inner": {"a.b": sd, "n": 3}}, "more": [torch.ones(2)]}, net)
    convert(net, out, select="model.inner.a.b")

    assert_same(sd, loaded_every_way(out))


@BOTH
@pytest.mark.parametrize("name", ["state_dict", "ema"])
def test_select_of_tensors_that_others_hold_too(name, options, net, out):
    obj = tied_to_everything()
    save(obj, net, **options)
    convert(net, out, select=name)

    assert assert_same(obj[name], loaded_every_way(out)) == len(obj[name])


def test_select_of_the_root_is_the_file(net, out):
    sd = Net().state_dict()
    save(sd, net)
    done = convert(net, out, select=".")

    assert out.read_bytes() == net.read_bytes()
    assert "nothing-to-change" in notes(done)


def test_select_of_the_root_with_another_inside_keeps_both(net, out):
    sd = Net().state_dict()
    sd["inner"] = Net(2).state_dict()
    save(sd, net)
    convert(net, out, select=".")

    assert_same(sd, load(out))


def test_select_of_what_is_not_there(net, out, capsys):
    save({"state_dict": Net().state_dict(), "epoch": 3}, net)
    status, _, err = cli(capsys, "convert", net, "--select", "epoch", "-o", out)

    assert status == 2
    assert "'epoch'" in err
    assert "'state_dict'" in err
    with pytest.raises(UsageError, match="different parts"):
        convert(FIXTURES / "gan.pth", out, select="netG", at=["netD"])
    assert not out.exists()


def test_select_leaves_danger_behind(net, out, tmp_path):
    ran = tmp_path / "ran"
    sd = Net().state_dict()
    save({"before": Shell(ran), "state_dict": sd, "after": [Shell(ran)]}, net)
    with pytest.raises(UnsafePickle, match="system") as caught:
        convert(net, out)
    assert "--select" in caught.value.hint
    done = convert(net, out, select="state_dict")

    assert_same(sd, torch.load(out, weights_only=True))
    assert b"system" not in out.read_bytes()
    assert {"before", "after"} <= set(done.entries_left)
    assert not ran.exists()


@pytest.mark.parametrize("shared", [False, True], ids=["inside", "defined before"])
def test_select_never_takes_danger_along(shared, net, out, tmp_path):
    sd, shell = Net().state_dict(), Shell(tmp_path / "ran")
    sd["extra"] = shell
    save({"before": shell if shared else 1, "state_dict": sd}, net)
    with pytest.raises(UnsafePickle, match="system"):
        convert(net, out, select="state_dict")
    left_alone(tmp_path, net.name)


def test_select_of_a_pickled_model(net, out):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    save({"epoch": 1, "net": model, "other": Net().state_dict()}, net)
    convert(net, out, select="net")

    assert loaded_every_way(out).keys() == model.state_dict().keys()
    assert all(torch.equal(t, load(out)[k]) for k, t in model.state_dict().items())


# -- --drop-entry ------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize(
    "gone",
    [["optimizer"], ["state_dict"], ["epoch", "args"], ["rng", "optimizer", "curve"]],
    ids=str,
)
def test_drop_entry_leaves_the_rest(gone, options, net, out):
    path = save_resume(net, **options)
    done = convert(path, out, drop_entry=gone)

    wanted = {key: value for key, value in load(path).items() if key not in gone}
    assert_same(wanted, loaded_every_way(out, weights_only=False))
    assert done.dropped == tuple(gone)
    assert sum(len(data) for name, data in members(out).items() if name.startswith("data/")) == (
        stored_bytes(wanted)
    )


@BOTH
@pytest.mark.parametrize("gone", ["optimizer", "ema", "flat", "state_dict"])
def test_drop_entry_of_what_others_fetch(gone, options, net, out):
    save(tied_to_everything(), net, **options)
    convert(net, out, drop_entry=gone)

    wanted = load(net)
    del wanted[gone]
    assert_same(wanted, loaded_every_way(out))


def test_the_sizes_of_a_file_without_its_optimizer(net, out):
    model = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, net)
    done = convert(net, out, drop_entry="optimizer")

    assert done.size_bytes == out.stat().st_size
    assert done.size_before == net.stat().st_size
    assert 0.3 < out.stat().st_size / net.stat().st_size < 0.35
    assert "-> " in str(done).splitlines()[0].split("   ")[1]


@pytest.mark.parametrize("name", ["optimiser", "epoc", "state_dict.fc.weight", "", "*"])
def test_an_entry_that_is_not_there_says_no(name, copy, capsys, tmp_path):
    path = copy("dp_cuda.pth")
    status, _, err = cli(capsys, "convert", path, "--drop-entry", name, "-o", tmp_path / "o.pth")

    assert status == 1
    assert f"no top-level entry '{name}'" in err
    assert "epoch" in err
    left_alone(tmp_path, path.name)


def test_one_of_two_entries_that_is_not_there_says_no(net, out):
    save({"model": Net().state_dict(), "epoch": 3}, net)
    with pytest.raises(RuleMatchesNothing, match="'nothing'"):
        convert(net, out, drop_entry=["epoch", "nothing"])
    assert not out.exists()


def test_a_root_state_dict_loses_an_entry_too(net, out):
    sd = Net().state_dict()
    sd["epoch"] = 3
    save(sd, net)
    for name in ("epoch", "fc.bias"):
        convert(net, out, drop_entry=name, force=True)
        wanted = OrderedDict((key, value) for key, value in sd.items() if key != name)
        wanted._metadata = sd._metadata
        assert_same(wanted, load(out))


def test_keys_of_several_kinds(net, out):
    obj = {"1": "text", 1: "number", None: torch.ones(2), "model": {"w": torch.ones(3)}}
    save(obj, net)
    convert(net, out, drop_entry="1")
    made = load(out)

    assert "1" not in made
    assert made["model"]["w"].tolist() == [1, 1, 1]
    assert made[1] == "number"


# -- --only and --drop -------------------------------------------------------------------------
def without(sd, *names):
    """A state_dict without these; `_metadata` stays."""
    made = type(sd)((key, value) for key, value in sd.items() if key not in names)
    if hasattr(sd, "_metadata"):
        made._metadata = sd._metadata
    return made


@BOTH
def test_the_first_tensor_is_dropped(options, net, out):
    """It holds the definitions of what all others fetch."""
    obj, tags = resume()
    save(obj, net, tags, **options)
    first = next(iter(obj["state_dict"]))
    done = convert(net, out, drop=[first.removeprefix("module.").join(["module.", ""])])

    wanted = load(net)
    wanted["state_dict"] = without(wanted["state_dict"], first)
    assert done.dropped == (first,)
    assert_same(wanted, loaded_every_way(out, weights_only=False))


@BOTH
def test_all_tensors_of_one_table_are_dropped(options, net, out):
    obj = tied_to_everything()
    save(obj, net, **options)
    done = convert(net, out, drop=["**"], at=["ema"])

    wanted = load(net)
    wanted["ema"] = without(wanted["ema"], *wanted["ema"])
    assert_same(wanted, loaded_every_way(out))
    assert "emptied" in notes(done)


GLOBS = [
    ({"only": ["fc"]}, ["fc.weight", "fc.bias"]),
    ({"only": ["*norm*", "conv.bias"]}, ["layernorm.weight", "conv.bias"]),
    ({"only": "conv.*"}, ["conv.weight", "conv.bias"]),
    ({"only": "**.bias"}, ["conv.bias", "fc.bias", "fc2.bias"]),
    ({"drop": ["*.weight"]}, ["conv.bias", "fc.bias", "fc2.bias", "deep.fc2.x"]),
    ({"drop": ["fc", "conv"]}, ["layernorm.weight", "fc2.bias", "deep.fc2.x"]),
    ({"drop": ["fc?"]}, ["conv.weight", "conv.bias", "layernorm.weight", "fc.weight", "fc.bias"]),
    ({"only": ["**.bias"], "drop": ["fc2"]}, ["conv.bias", "fc.bias"]),
]
SEVEN = ["conv.weight", "conv.bias", "layernorm.weight", "fc.weight", "fc.bias", "fc2.bias", "deep.fc2.x"]  # fmt: skip


@pytest.mark.parametrize(("options", "left"), GLOBS, ids=str)
def test_globs(options, left, net, out):
    sd = OrderedDict((key, torch.full((3,), float(i))) for i, key in enumerate(SEVEN))
    save({"model": sd, "optimizer": {"state": {0: {"fc": torch.ones(1)}}, "param_groups": []}}, net)
    done = convert(net, out, **options)

    assert_same(OrderedDict((k, sd[k]) for k in SEVEN if k in left), load(out)["model"])
    assert sorted(done.dropped) == sorted(set(SEVEN) - set(left))
    assert load(out)["optimizer"]["state"][0]["fc"].tolist() == [1]
    assert len(devices(out)) == len(left) + 1


def test_layers_1_is_no_parent_of_layers_10(net, out):
    names = ["layers.1.weight", "layers.10.weight", "layers.18.weight", "layers.1.weight.lora_A"]
    save({name: torch.ones(2) for name in names}, net)
    convert(net, out, only="layers.1")
    assert keys(out) == ["layers.1.weight", "layers.1.weight.lora_A"]
    convert(net, out, drop="layers.1", force=True)
    assert keys(out) == ["layers.10.weight", "layers.18.weight"]


@pytest.mark.parametrize("options", [{"only": "nothing"}, {"drop": ["fc", "nothing"]}], ids=str)
def test_a_glob_that_matches_nothing_says_no(options, out):
    with pytest.raises(RuleMatchesNothing, match="nothing"):
        convert(FIXTURES / "net_plain.pth", out, **options)
    assert not out.exists()


@BOTH
@pytest.mark.parametrize("gone", ["emb.weight", "head.weight"])
def test_a_tied_partner_is_dropped(gone, options, net, out):
    w = nn.Parameter(torch.arange(8.0).view(4, 2))
    sd = OrderedDict([("emb.weight", w), ("head.weight", w), ("ln", torch.ones(2))])
    save({"model": sd, "same": sd["head.weight"]}, net, **options)
    convert(net, out, drop=gone)

    made = loaded_every_way(out)
    kept = ({"emb.weight", "head.weight"} - {gone}).pop()
    assert list(made["model"]) == [key for key in sd if key != gone]
    assert made["same"] is made["model"][kept]
    assert torch.equal(made["same"], w)
    assert len(devices(out)) == 2


@BOTH
def test_a_view_is_dropped_and_its_memory_stays_for_the_others(options, net, out):
    base = torch.arange(24.0)
    sd = OrderedDict(all=base, part=base[3:9], other=base.view(4, 6).t(), one=torch.ones(1))
    save({"model": sd, "beside": base[2:4]}, net, **options)
    for gone in (["all"], ["all", "part", "other"], ["part"]):
        convert(net, out, drop=gone, force=True)
        wanted = {"model": OrderedDict((k, v) for k, v in sd.items() if k not in gone),
                  "beside": sd["all"][2:4]}  # fmt: skip
        assert_same(wanted, loaded_every_way(out))


def test_what_inspect_says_of_what_is_left(out):
    for options in ({"drop": "bn"}, {"only": "fc"}, {"drop_entry": "optimizer"}):
        convert(FIXTURES / "dp_cuda.pth", out, force=True, **options)
        before = keys(FIXTURES / "dp_cuda.pth")
        assert keys(out) == before if "drop_entry" in options else set(keys(out)) < set(before)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_parts_of_newer_protocols(protocol, net, out):
    obj = tied_to_everything()
    save(obj, net, pickle_protocol=protocol)
    convert(net, out, drop_entry="optimizer", drop="conv")

    wanted = load(net)
    del wanted["optimizer"]
    for name in ("ema", "state_dict"):
        wanted[name] = without(wanted[name], "conv.weight", "conv.bias")
    assert_same(wanted, loaded_every_way(out))


# -- --compact ---------------------------------------------------------------------------------
def test_52_bytes_of_4_megabytes(net, out):
    big = torch.arange(1_000_000.0)
    save({"a": big[100:110], "b": torch.arange(3.0)}, net)
    assert net.stat().st_size > 4_000_000
    done = convert(net, out, compact=True)

    assert stored_bytes(load(out)) == 52
    assert moved({"a": big[100:110], "b": torch.arange(3.0)}, loaded_every_way(out)) == 2
    assert done.size_before > 4_000_000 > 2_500 > done.size_bytes


def views(flat):
    """Views, and what compaction leaves of `flat`'s 1,000 elements."""
    grid = flat.view(10, 100)
    return {
        "one row": ({"a": grid[3]}, 100),
        "a column": ({"a": grid[:, 7]}, 10),
        "some columns": ({"a": grid[:, 7:10]}, 30),
        "a scalar": ({"a": grid[2, 5]}, 1),
        "transposed columns": ({"a": grid[:, :2].t()}, 20),
        "every third": ({"a": flat[::3]}, 334),
        "two apart": ({"a": flat[:10], "b": flat[500:510]}, 20),
        "two that overlap": ({"a": flat[10:20], "b": flat[15:30]}, 20),
        "one inside another": ({"a": flat[100:200], "b": grid[1, 10:20]}, 100),
        "columns that interleave": ({"a": grid[:3, 0], "b": grid[:3, 1]}, 202),
        "tied": ({"a": flat[5:9], "b": flat[5:9]}, 4),
        "empty": ({"a": flat[7:7], "b": flat[:0].view(0, 3)}, 0),
        "empty and not": ({"a": flat[999:999], "b": flat[3:4]}, 1),
        "expanded": ({"a": flat[4].expand(20, 30)}, 1),
        "expanded rows": ({"a": grid[:, :1].expand(10, 5)}, 10),
        "overlapping windows": ({"a": flat[10:20].unfold(0, 4, 1)}, 10),
        "all": ({"a": flat}, 1000),
        "all, in pieces": ({str(i): grid[i] for i in range(10)}, 1000),
    }


@BOTH
@pytest.mark.parametrize("case", views(torch.zeros(1000)))
def test_compact(case, options, net, out):
    sd, left = views(torch.arange(1000.0))[case]
    save({"model": sd, "epoch": 1}, net, **options)
    convert(net, out, compact=True)

    made = loaded_every_way(out)
    assert moved({"model": sd, "epoch": 1}, made) == len(sd)
    assert stored_bytes(made) == 4 * left


@BOTH
def test_what_is_used_whole_is_not_touched(options, net, out):
    flat = torch.arange(1000.0)
    sd = {f"p{i}": flat[i * 100 : (i + 1) * 100].view(10, 10) for i in range(10)}
    save({"model": sd, "one": torch.ones(3)}, net, **options)
    convert(net, out, compact=True)

    assert_same(load(net), loaded_every_way(out))
    assert len(devices(out)) == 2


def test_a_storage_that_something_uses_as_a_whole_stays(net, out):
    flat = torch.arange(100, dtype=torch.uint8).view(torch.float8_e5m2)
    save({"model": {"w": flat[3:5]}, "bare": flat.untyped_storage()}, net)
    convert(net, out, compact=True)

    made = load(out, weights_only=True)
    bare = made["bare"]._untyped_storage
    assert bare.nbytes() == 100
    assert bare.data_ptr() == made["model"]["w"].untyped_storage().data_ptr()
    assert made["model"]["w"].view(torch.uint8).tolist() == [3, 4]


def test_compact_takes_the_optimizer_too(net, out):
    big = torch.arange(1000.0)
    obj = {
        "model": {"w": big[3:7]},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(500)[:4], "step": big[900]}},
                      "param_groups": [{"params": [0], "lr": 0.1}]},
        "list": [torch.arange(64).view(8, 8)[2], (torch.ones(9)[4:5],)],
    }  # fmt: skip
    save(obj, net)
    convert(net, out, compact=True)

    made = loaded_every_way(out)
    assert moved(obj, made) == 5
    assert stored_bytes(made) == 4 * (4 + 4 + 1) + 8 * 8 + 4


FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", [*FLOAT8, "uint16", "uint32", "uint64", "bfloat16", "bool", "complex128"])  # fmt: skip
def test_compact_of_every_kind_of_storage(dtype, net, out):
    wide = getattr(torch, dtype)
    size = torch.empty(0, dtype=wide).element_size()
    raw = torch.arange(480, dtype=torch.uint8) % 2
    base = raw.view(wide)
    save({"a": base[3:6], "b": base[5:9], "c": base.view(-1, 2)[10:, 1]}, net)
    convert(net, out, compact=True)

    made = loaded_every_way(out)
    before = load(net)
    assert moved(before, made) == 3
    assert stored_bytes(made) == size * (6 + len(before["c"]))


def test_views_of_two_types_of_one_untyped_storage(net, out):
    wide = torch.arange(64, dtype=torch.int64).view(torch.uint32)
    narrow, wide = wide.view(torch.uint16)[41:60], wide[22:25]
    obj = {"a": narrow, "b": wide, "c": narrow[1:2]}
    save(obj, net)
    convert(net, out, compact=True)

    made = loaded_every_way(out)
    assert moved(obj, made) == 3
    assert stored_bytes(made) < 50


def test_a_storage_that_goes_by_two_types_stays_whole(net, out):
    half = b"ctorch\nHalfStorage\n"
    rows = (
        ("a", tensor(storage(count=6), 4, (2,), (1,))),
        ("b", tensor(storage(count=12, kind=half), 3, (2,), (1,))),
        ("c", tensor(storage(count=6), 0, (2,), (1,))),
    )
    net.write_bytes(archive(pickled(dictionary(*rows))))
    for options in ({"compact": True}, {"drop": "c"}, {"dtype": "float64", "keep_dtype": "*"}):
        convert(net, out, force=True, **options)
        wanted = load(net)
        assert moved({key: wanted[key] for key in load(out)}, load(out)) >= 2
    with pytest.raises(Unsupported, match="another dtype"):
        convert(net, out, dtype="float64", force=True)


def test_compact_finds_nothing_to_cut(net, out):
    save(Net().state_dict(), net)
    done = convert(net, out, compact=True)

    assert_same(load(net), loaded_every_way(out))
    assert done.size_bytes <= done.size_before


# -- contradictions between parts --------------------------------------------------------------
def test_the_weights_are_dropped_and_the_others_come_out(tmp_path):
    out = tmp_path / "out.safetensors"
    convert(FIXTURES / "ema.pth", out, drop_entry="state_dict")
    assert keys(out) == keys(FIXTURES / "ema.pth", "state_dict_ema")
    before = load(FIXTURES / "ema.pth")["state_dict_ema"]
    convert(out, tmp_path / "back.pth")
    assert all(torch.equal(t, before[k]) for k, t in load(tmp_path / "back.pth").items())


@pytest.mark.parametrize("options", [{"select": "netG"}, {"at": "netG"}], ids=str)
def test_what_is_dropped_is_not_selected(options, tmp_path):
    out = tmp_path / "out.safetensors"
    with pytest.raises(UsageError, match="netG"):
        convert(FIXTURES / "gan.pth", out, drop_entry="netG", **options)
    with pytest.raises(UsageError, match="every state_dict"):
        convert(FIXTURES / "gan.pth", out, drop_entry=["netG", "netD"])
    left_alone(tmp_path)


def test_a_dropped_entry_of_the_root_is_in_no_container(net, tmp_path):
    sd = OrderedDict(a=torch.ones(2), b=torch.ones(3), n=7)
    save(sd, net)
    for out in (tmp_path / "out.safetensors", tmp_path / "out.pth"):
        done = convert(net, out, drop_entry=["b", "n"], dtype="float16")
        assert keys(out) == ["a"]
        assert done.dropped == ("b", "n")
        assert done.dtypes == {"float16": 1}
        assert done.left_behind == ()


@pytest.mark.parametrize("target", ["out.safetensors", "out.pth", "out"])
def test_parts_of_safetensors(target, tmp_path, capsys):
    path, out = tmp_path / "in.safetensors", tmp_path / target
    save_file({"fc.w": torch.ones(2), "fc2.w": torch.ones(3), "norm.b": torch.ones(4)}, path)
    options = {"to": "shards"} if target == "out" else {}
    convert(path, out, drop="fc", compact=True, **options)
    assert keys(out) == ["fc2.w", "norm.b"]
    convert(path, out, only=["norm", "fc.w"], select=".", force=True, **options)
    assert keys(out) == ["fc.w", "norm.b"]
    with pytest.raises(UsageError, match="no state_dict at 'fc'"):
        convert(path, out, select="fc", force=True, **options)
    flags = ["--drop-entry", "fc.w", "-o", out, "-f", *(["--to", "shards"] if options else [])]
    status, _, err = cli(capsys, "convert", path, *flags)
    assert status == 1
    assert "--drop" in err.splitlines()[1]


# -- every fixture -----------------------------------------------------------------------------
LOADABLE = [n for n in CONVERTIBLE if n != "omegaconf_like.pth"]


def is_cast(one):
    dense = one.layout is torch.strided and not one.is_meta and not one.is_quantized
    return dense and one.is_floating_point() and "float4" not in str(one.dtype)


class Odd(Memory):
    """Sparse, quantized and meta tensors too; objects by their classes alone."""

    def same(self, one, two, path=()):
        if isinstance(one, torch.Tensor) and (one.layout is not torch.strided or one.is_quantized or one.is_meta):  # fmt: skip
            self.tensors += 1
            Comparison().same(one, two, path)
        elif isinstance(one, torch.Tensor | dict | list | tuple) or not hasattr(one, "__dict__"):
            assert getattr(one, "_metadata", None) == getattr(two, "_metadata", None)
            super().same(one, two, path)
        else:
            assert type(one).__name__ == type(two).__name__


@pytest.mark.parametrize("name", LOADABLE)
def test_every_fixture_loses_a_tensor_is_cast_and_compacted(name, out):
    before = load(FIXTURES / name)
    tables = {tuple(t["path"]): [x["key"] for x in t["tensors"]] for t in TRUTHS[name]["tables"]}
    tables = {path: names for path, names in tables.items() if names}
    for path, names in tables.items():
        gone, where = names[0], ".".join(path) or "."
        convert(
            FIXTURES / name, out, drop=gone.replace("*", "?"), at=where, compact=True,
            dtype="bfloat16", force=True,
        )  # fmt: skip
        cast = {(*path, key) for key in names}
        memory = Odd(
            lambda p, t, cast=cast: torch.bfloat16 if p in cast and is_cast(t) else t.dtype
        )
        memory.same(replaced(before, path, lambda sd, gone=gone: without(sd, gone)), load(out))
        assert memory.tensors >= len(names) - 1
        convert(FIXTURES / name, out, select=where, to="zip", force=True)
        Odd().same(at(before, path), load(out))


def replaced(obj, path, function):
    """A copy in which what stands at `path` is another."""
    if not path:
        return function(obj)
    return {k: replaced(v, path[1:], function) if k == path[0] else v for k, v in obj.items()}


def test_compact_says_when_there_is_nothing_to_cut(tmp_path):
    whole = torch.arange(6.0)
    torch.save({"w": whole}, tmp_path / "whole.pth")
    torch.save({"w": whole[1:]}, tmp_path / "slice.pth")
    slugs = {
        name: [
            note.slug
            for note in convert(
                tmp_path / f"{name}.pth", tmp_path / f"{name}.small.pth", compact=True
            ).notes
        ]
        for name in ("whole", "slice")
    }
    assert slugs == {"whole": ["nothing-to-cut"], "slice": []}
