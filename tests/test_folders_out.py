"""What is made of folders: shards of each kind, weights in a net; and what makes no sense of one."""

import json
import os
import zipfile

import pytest
import torch
import zero_support as zero
from dcp_support import MIXED, oracle, raw, save_apart, saved
from safetensors import safe_open
from safetensors.torch import save_file
from verbs_support import cli

import ckptool
from ckptool.errors import CkptError

MODEL = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))  # fmt: skip


def weights():
    torch.manual_seed(5)
    return {key: torch.randn(v.shape).to(v.dtype) for key, v in MODEL.state_dict().items()}


def training():
    return {"state_dict": weights(), "epoch": 3}


# -- a folder of each kind: (folder, what is in it by key) --------------------------------------
def of_dcp(place):
    return MIXED, oracle(MIXED, place)["model"]


def of_ranks_apart(place):
    value = weights()
    first, rest = dict(list(value.items())[:3]), dict(list(value.items())[3:])
    rows = [({"model": first, "step": 3}, {}), ({"model": rest, "step": 3}, {})]
    return save_apart(place / "run", *rows), value


def of_zero(stage):
    def make(place):
        made = zero.net()
        return zero.write(place / "run", made, stage, 2), made.expected

    return make


def of_lightning_dcp(place):
    folder = saved(place / "epoch=3.ckpt", training())
    torch.save({"epoch": 3}, folder / "meta.pt")
    return folder, weights()


def of_lightning_zero(place):
    made = zero.net()
    return zero.write(place / "epoch=3.ckpt", made, 2, 2, tag="checkpoint"), made.expected


def of_lightning_file(place):
    (place / "run").mkdir()
    torch.save(training(), place / "run" / "epoch=3.ckpt")
    return place / "run", weights()


def of_unpacked(place):
    torch.save(training(), place / "net.pth")
    with zipfile.ZipFile(place / "net.pth") as z:
        z.extractall(place / "run")
    return place / "run", weights()


def of_shards(suffix):
    def make(place):
        folder = place / "run"
        folder.mkdir()
        value = weights()
        keys = list(value)
        places = {}
        for number, names in enumerate((keys[:4], keys[4:]), 1):
            name = f"model-0000{number}-of-00002{suffix}"
            part = {key: value[key] for key in names}
            (torch.save if suffix == ".bin" else save_file)(part, folder / name)
            places |= dict.fromkeys(names, name)
        index = {"metadata": {}, "weight_map": places}
        stem = "pytorch_model" if suffix == ".bin" else "model"
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
        return folder, value

    return make


KINDS = {
    "dcp": of_dcp,
    "dcp without collectives": of_ranks_apart,
    "zero 1": of_zero(1),
    "zero 2": of_zero(2),
    "zero 3": of_zero(3),
    "lightning dcp": of_lightning_dcp,
    "lightning zero": of_lightning_zero,
    "lightning file": of_lightning_file,
    "unpacked": of_unpacked,
    "shards": of_shards(".safetensors"),
    "bin shards": of_shards(".bin"),
}


@pytest.fixture(params=KINDS)
def made(request, tmp_path):
    return KINDS[request.param](tmp_path)


def read_shards(folder):
    """By the index alone, as transformers does; every shard holds what the index says of it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        with safe_open(folder / name, "pt") as file:
            mine = {key for key, place in index["weight_map"].items() if place == name}
            assert set(file.keys()) == mine
            assert file.metadata()["format"] == "pt"
            found |= {key: file.get_tensor(key) for key in mine}
    sizes = sum(value.nbytes for value in found.values())
    assert index["metadata"]["total_size"] == sizes
    return found


# -- shards out --------------------------------------------------------------------------------
@pytest.mark.parametrize("jobs", [1, 2])
def test_shards_of_a_folder(made, jobs, tmp_path):
    folder, wanted = made
    out = tmp_path / "out"
    ckptool.convert(folder, out, max_shard_size="150B", tied="duplicate", jobs=jobs, fsync=False)
    assert len(list(out.glob("model-*.safetensors"))) >= 2
    found = read_shards(out)
    assert {k: (v.dtype, v.shape, raw(v)) for k, v in found.items()} == {
        k: (v.dtype, v.shape, raw(v)) for k, v in wanted.items()
    }


def test_a_slash_behind_the_name_asks_for_shards(made, tmp_path, capsys):
    folder, wanted = made
    status, _, err = cli(capsys, "convert", folder, "-o", f"{tmp_path}/out/", "--tied", "duplicate")
    assert status == 0, err
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "model.safetensors"
    with safe_open(file, "pt") as opened:
        assert {key: raw(opened.get_tensor(key)) for key in opened.keys()} == {  # noqa: SIM118
            key: raw(value) for key, value in wanted.items()
        }


def test_shards_of_other_types_and_names(tmp_path):
    folder, wanted = of_zero(3)(tmp_path)
    out = tmp_path / "out"
    ckptool.convert(
        folder, out, max_shard_size="150B", tied="duplicate", dtype="bf16", add_prefix="net.",
        jobs=2, fsync=False,
    )  # fmt: skip
    found = read_shards(out)
    for key, value in wanted.items():
        cast = value.to(torch.bfloat16) if value.is_floating_point() else value
        assert raw(found[f"net.{key}"]) == raw(cast), key


# -- into a net --------------------------------------------------------------------------------
def test_load_into_a_net(made, request):
    """Each key of the net gets the numbers of the folder, to the byte."""
    folder, wanted = made
    net = torch.nn.Module()
    for key, value in wanted.items():
        *path, name = key.split(".")
        home = net
        for part in path:
            if not hasattr(home, part):
                home.add_module(part, torch.nn.Module())
            home = getattr(home, part)
        home.register_buffer(name, torch.zeros_like(value))
    report = ckptool.load_into(net, folder)
    assert set(report.loaded) == set(wanted)
    assert {k: raw(v) for k, v in net.state_dict().items()} == {
        k: raw(v) for k, v in wanted.items()
    }


@pytest.mark.parametrize("kind", ["zero 2", "lightning dcp", "dcp without collectives", "bin shards", "unpacked"])  # fmt: skip
def test_a_net_that_differs_is_left_alone(kind, tmp_path):
    folder, wanted = KINDS[kind](tmp_path)
    key = next(iter(wanted))
    net = torch.nn.ParameterDict({"other": torch.nn.Parameter(torch.zeros(2))})
    with pytest.raises(CkptError) as caught:
        ckptool.load_into(net, folder)
    assert key in str(caught.value) + " ".join(caught.value.findings)
    assert net["other"].tolist() == [0.0, 0.0]


# -- what makes no sense of a folder -----------------------------------------------------------
def listed(folder):
    return sorted(os.path.join(top, name) for top, _, names in os.walk(folder) for name in names)


def test_nothing_is_edited_in_place_in_a_folder(made, capsys):
    folder, _ = made
    before = listed(folder)
    status, _, err = cli(capsys, "convert", folder, "--to-cpu", "--in-place")
    assert status == 2
    assert "one file is edited in place, not a folder" in err
    assert "hint: write another with -o OUT" in err
    status, _, err = cli(capsys, "convert", folder, "--to-cpu")
    assert (status, "hint: give one with -o OUT" in err) == (2, True)
    for option in ("--undo", "--recover"):
        status, _, err = cli(capsys, "convert", folder, option)
        assert status != 0
        assert "a folder is never edited in place" in err
    assert listed(folder) == before


@pytest.mark.parametrize("kind", ["dcp without collectives", "lightning dcp", "bin shards"])
def test_an_index_is_taken_for_its_folder_there_too(kind, tmp_path, capsys):
    """`.metadata` is a pickle: nothing of its own may be made of it, and nothing beside it."""
    folder, wanted = KINDS[kind](tmp_path)
    index = next(f for f in sorted(folder.iterdir()) if f.name.endswith((".metadata", ".json")))
    before = listed(folder)
    for options in (["--to-cpu"], ["--to-cpu", "--in-place"], ["--undo"]):
        assert cli(capsys, "convert", index, *options)[0] != 0
    assert listed(folder) == before
    assert cli(capsys, "convert", index, "--salvage", "-o", tmp_path / "all.safetensors")[0] == 0
    assert ckptool.load(tmp_path / "all.safetensors").keys() == wanted.keys()
