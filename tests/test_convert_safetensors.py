"""convert between .pth and .safetensors, with torch and the safetensors package as oracles."""

from __future__ import annotations

import argparse
import json
import os
import stat
import zipfile
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from container_support import (
    big_endian,
    convert,
    header,
    metadata,
    promise_kept,
    records_of,
    rezipped,
    same_weights,
    st_loaded,
)
from fixtures.make_fixtures import Net
from torch import nn
from verbs_support import cli, left_alone, load

FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
OTHERS = "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64"
HELD = f"{FLOATS} {OTHERS}".split()


@pytest.fixture
def there_and_back(tmp_path):
    """An object through .safetensors to .pth: what torch reads before and after."""

    def make(obj, path=None, **options):
        source = path or tmp_path / "net.pth"
        if path is None:
            torch.save(obj, source, **options)
        convert(source, tmp_path / "net.safetensors")
        convert(tmp_path / "net.safetensors", tmp_path / "back.pth")
        return load(source), promise_kept(tmp_path / "back.pth")

    return make


def training():
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    args = argparse.Namespace(arch="small", lr=0.5, device="cuda:0", gpus=[0, 1])
    return {"epoch": 7, "state_dict": net.state_dict(), "optimizer": optimizer.state_dict(),
            "args": args, "best": float("nan"), "names": ("a", "b"), "when": None}  # fmt: skip


# -- there and back ----------------------------------------------------------------------------
def test_a_training_file_gives_its_weights_and_says_what_stays_behind(there_and_back, tmp_path):
    before, after = there_and_back(training())

    assert same_weights(before["state_dict"], after) == 9
    assert type(after) is OrderedDict
    assert after._metadata["bn"] == {"version": 2}
    assert type(after._metadata) is OrderedDict
    (tmp_path / "net.safetensors").unlink()
    done = convert(tmp_path / "net.pth", tmp_path / "net.safetensors")
    left = ["epoch", "optimizer", "args", "best", "names", "when"]
    assert sorted(done.entries_left) == sorted(left)
    Net().load_state_dict(after, strict=True)


def views():
    base = torch.arange(48.0)
    image = torch.arange(48.0).view(1, 3, 4, 4)
    return OrderedDict(
        slice=base[3:9], steps=base[1:40:5], matrix=base.view(6, 8), transposed=base.view(6, 8).t(),
        block=base.view(6, 8)[1:4, 2:7], column=base.view(6, 8)[:, 3],
        back=base.view(2, 4, 6).permute(2, 0, 1), last=image.to(memory_format=torch.channels_last),
        windows=base.unfold(0, 8, 4), expanded=torch.tensor([[3.0], [4.0]]).expand(2, 5),
        repeated=torch.tensor(2.0).expand(3, 2), scalar=torch.tensor(7), one=base[5],
        none=torch.empty(0), wide=torch.empty(3, 0, 2), hollow=base[4:4],
        small=torch.arange(9000.0)[17:19], single=base.view(1, 48).t(),
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])  # fmt: skip
def test_views_come_out_as_their_values_not_as_memory(options, there_and_back, tmp_path):
    before, after = there_and_back(views(), **options)

    same_weights(before, after)
    assert all(t.is_contiguous() for t in after.values())
    assert torch.equal(after["transposed"], torch.arange(48.0).view(6, 8).t())  # safetensors#825
    same_weights(before, st_loaded(tmp_path / "net.safetensors"), tied=False)
    assert header(tmp_path / "net.safetensors")[0]["small"]["data_offsets"][1] < 2000


def by_bits(name):
    raw = torch.tensor([0, 1] * 16 if name == "bool" else list(range(32)), dtype=torch.uint8)
    return raw.view(getattr(torch, name))


def test_every_dtype_that_the_format_holds(there_and_back, tmp_path):
    sd = OrderedDict((name, by_bits(name)) for name in HELD)
    before, after = there_and_back(sd)

    assert same_weights(before, after) == len(HELD) == 20
    loaded = safetensors.torch.load_file(tmp_path / "net.safetensors")
    same_weights(before, OrderedDict((key, loaded[key]) for key in before))


def test_transposed_tensors_of_every_width(there_and_back, tmp_path):
    names = [name for name in HELD if name != "float4_e2m1fn_x2"]
    sd = OrderedDict((name, by_bits(name).view(2, -1).t()) for name in names)
    before, after = there_and_back(sd)

    for key in names:
        assert torch.equal(numbers(before[key]), numbers(after[key])), key


def numbers(tensor):
    """Elements in order, as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol, there_and_back):
    before, after = there_and_back(training(), pickle_protocol=protocol)

    same_weights(before["state_dict"], after)


def test_parameters_come_out_as_tensors(there_and_back):
    w = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    sd = OrderedDict(w=w, b=nn.Parameter(torch.ones(2), requires_grad=False))
    before, after = there_and_back(sd)

    same_weights(before, after)
    assert {type(t) for t in after.values()} == {torch.Tensor}


NAMES = ["卷积.权重", "🔥.weight", "ß.ü", 'say "hi"', "back\\slash", "line\nbreak", "\u2028", "", " ", "a b", "z", "a.10", "a.9"]  # fmt: skip


def test_names_in_any_script_and_their_order(there_and_back, tmp_path):
    sd = OrderedDict((name, torch.full((i + 1,), float(i))) for i, name in enumerate(NAMES))
    sd["int"] = torch.arange(3)  # wider numbers stand first in the data, not in the names
    before, after = there_and_back(sd)

    assert list(after) == [*NAMES, "int"]
    same_weights(before, after)
    assert set(safetensors.torch.load_file(tmp_path / "net.safetensors")) == {*NAMES, "int"}


# -- zips of other machines and hands ----------------------------------------------------------
def wide_and_narrow():
    return OrderedDict(
        f=torch.arange(6.0).view(2, 3), t=torch.arange(12.0).view(3, 4).t(), i=torch.arange(-3, 4),
        h=torch.arange(5).half(), bf=torch.arange(5).bfloat16(), d=torch.arange(3).double(),
        c=torch.complex(torch.arange(4.0), torch.ones(4)).view(2, 2).t(), s=torch.tensor(-2),
        b=torch.tensor([True, False]), step=torch.arange(20, dtype=torch.int16)[3:17:4],
    )  # fmt: skip


def test_big_endian_numbers_are_swapped(there_and_back, tmp_path):
    path = big_endian(tmp_path / "big.pth", wide_and_narrow())
    before, after = there_and_back(None, path)

    same_weights(wide_and_narrow(), before)  # what torch makes of the file
    same_weights(wide_and_narrow(), after)


def test_a_deflated_zip_is_inflated(there_and_back, tmp_path):
    path = rezipped(tmp_path / "d.pth", records_of(wide_and_narrow()), zipfile.ZIP_DEFLATED)
    before, after = there_and_back(None, path)

    same_weights(before, after)
    same_weights(wide_and_narrow(), after)


# -- the file ----------------------------------------------------------------------------------
def test_the_layout_is_that_of_the_safetensors_package(tmp_path):
    sd = OrderedDict(
        b=torch.ones(3, dtype=torch.bool), f=torch.ones(3), h=torch.ones(3).half(), e=torch.empty(0),
        d=torch.ones(2).double(), u=torch.ones(5, dtype=torch.uint8), c=torch.ones(1) * 1j,
    )  # fmt: skip
    torch.save(sd, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "net.safetensors")
    rows, start = header(tmp_path / "net.safetensors")

    assert rows.pop("__metadata__") == {"format": "pt"}
    assert start % 8 == 0
    for key, row in rows.items():
        assert (start + row["data_offsets"][0]) % sd[key].element_size() == 0, key
    spans = sorted(row["data_offsets"] for row in rows.values())
    assert [a[1] for a in spans[:-1]] == [b[0] for b in spans[1:]]
    assert start + spans[-1][1] == os.path.getsize(tmp_path / "net.safetensors")
    assert list(rows) == list(sd)
    same_weights(sd, st_loaded(tmp_path / "net.safetensors"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_of_the_file_honours_umask(umask, mode, tmp_path):
    torch.save(training(), tmp_path / "net.pth")
    before = os.umask(umask)
    try:
        convert(tmp_path / "net.pth", tmp_path / "o.safetensors", extras=tmp_path / "e.json")
        convert(tmp_path / "o.safetensors", tmp_path / "back.pth")
    finally:
        os.umask(before)
    for name in ("o.safetensors", "e.json", "back.pth"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode, name


def test_other_metadata_is_kept_there_and_back(tmp_path):
    sd = {"w": torch.arange(4.0), "v": torch.ones(2)}
    said = {
        "format": "pt",
        "modelspec.title": "名前",
        "author": "me",
        "empty": "",
        "list": "[1, 2]",
    }
    safetensors.torch.save_file(sd, tmp_path / "a.safetensors", said)
    convert(tmp_path / "a.safetensors", tmp_path / "b.pth")
    promise_kept(tmp_path / "b.pth")
    convert(tmp_path / "b.pth", tmp_path / "c.safetensors")
    convert(tmp_path / "c.safetensors", tmp_path / "d.safetensors", rename={"^w": "x"})

    assert metadata(tmp_path / "c.safetensors") == said
    assert metadata(tmp_path / "d.safetensors") == said
    assert set(st_loaded(tmp_path / "d.safetensors")) == {"x", "v"}
    assert not load(tmp_path / "b.pth").__dict__.get("_metadata")


def test_layer_versions_follow_renames_both_ways(tmp_path):
    net = nn.DataParallel(Net())
    torch.save({"model": net.state_dict()}, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "a.safetensors", strip_module=True)
    convert(tmp_path / "a.safetensors", tmp_path / "b.pth", add_prefix="body.")

    said = json.loads(metadata(tmp_path / "a.safetensors")["ckptool.state_dict_metadata"])
    assert said == dict(Net().state_dict()._metadata)
    after = load(tmp_path / "b.pth")
    assert after._metadata["body.bn"] == {"version": 2}
    wrapped = nn.Module()
    wrapped.body = Net()
    wrapped.load_state_dict(after)
    assert torch.equal(wrapped.body.fc.weight, net.module.fc.weight)


# -- values that are no tensors ----------------------------------------------------------------
def test_the_extras_go_to_json(tmp_path, capsys):
    torch.save(training(), tmp_path / "net.pth")
    status, out, _ = cli(capsys, "convert", tmp_path / "net.pth", "-o", tmp_path / "o.safetensors",
                         "--extras", tmp_path / "e.json", "--json")  # fmt: skip
    said, data = json.loads(out), json.loads((tmp_path / "e.json").read_text())

    assert status == 0
    names = ["epoch", "optimizer", "args", "best", "names", "when"]
    assert sorted(row["path"] for row in said["left_behind"]) == sorted([name] for name in names)
    assert {os.path.basename(row["file"]) for row in said["outputs"]} == {"o.safetensors", "e.json"}
    for row in said["outputs"]:
        assert row["size_bytes"] == os.path.getsize(row["file"])
    rows = {row["path"][0]: row["value"] for row in data["extras"]}
    assert data["schema"] == 1
    assert sorted(rows) == sorted(names)
    assert (rows["epoch"], rows["best"], rows["names"], rows["when"]) == (
        7,
        "nan",
        ["a", "b"],
        None,
    )
    assert rows["args"] == {"arch": "small", "lr": 0.5, "device": "cuda:0", "gpus": [0, 1]}
    assert rows["optimizer"]["groups"][0]["lr"] == 0.5


def test_nothing_is_written_without_extras_to_write(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "net.pth")
    done = convert(tmp_path / "net.pth", tmp_path / "o.safetensors")

    assert done.left_behind == ()
    left_alone(tmp_path, "net.pth", "o.safetensors")


def test_values_among_the_tensors(there_and_back, tmp_path):
    """R26: lists of tensors come out by number, numbers and texts stay behind and are said."""
    sd = OrderedDict(w=torch.ones(2), epoch=5, cfg="resnet", aux=[torch.zeros(1), torch.ones(1)],
                     none=None, lr=0.1)  # fmt: skip
    _, after = there_and_back(sd)
    done = convert(tmp_path / "net.pth", tmp_path / "again.safetensors", extras=tmp_path / "e.json")

    same_weights(OrderedDict([("w", sd["w"]), ("aux.0", sd["aux"][0]), ("aux.1", sd["aux"][1])]), after)  # fmt: skip
    assert sorted(done.entries_left) == ["cfg", "epoch", "lr", "none"]
    rows = json.loads((tmp_path / "e.json").read_text())["extras"]
    assert {tuple(row["path"]): row["value"] for row in rows} == {
        ("cfg",): "resnet", ("epoch",): 5, ("lr",): 0.1, ("none",): None,
    }  # fmt: skip


def test_a_state_dict_inside_a_state_dict(there_and_back, tmp_path):
    """R21."""
    inner = OrderedDict(("model." + key, value) for key, value in Net().state_dict().items())
    outer = OrderedDict(inner)
    outer["state_dict"] = {"extra.weight": torch.ones(2)}
    _, after = there_and_back({"state_dict": outer, "global_step": 3})

    inner["state_dict.extra.weight"] = torch.ones(2)
    assert same_weights(inner, after) == 10
