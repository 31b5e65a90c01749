"""convert to and from Hugging Face shards, with safetensors (and transformers, where there) reading."""

from __future__ import annotations

import errno
import json
import os
from collections import OrderedDict

import pytest
import torch
from fixtures.make_fixtures import Net, element_bytes, save
from parts_support import convert
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from verbs_support import FIXTURES, cli, left_alone, load

import ckptool
from ckptool import writing
from ckptool.errors import CkptError, OutputError, SpecialFile, UsageError
from ckptool.verbs.request import parse_size

INDEX = "model.safetensors.index.json"


def layers(count=7, size=25):
    """`count` float32 tensors of 4 * size bytes, with layer versions."""
    sd = OrderedDict((f"layers.{i}.weight", torch.full((size,), i + 0.5)) for i in range(count))
    sd._metadata = OrderedDict({"": {"version": 1}, "layers.0": {"version": 2}})
    return sd


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.pth"
    save({"epoch": 3, "state_dict": layers()}, path)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def index_of(folder):
    return json.loads((folder / INDEX).read_text("utf-8"))


def shard(number, count):
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def merged(folder):
    """All tensors by the index, as transformers reads them: each from its file."""
    found = OrderedDict()
    for key, name in index_of(folder)["weight_map"].items():
        with safe_open(folder / name, "pt") as f:
            assert f.metadata()["format"] == "pt"
            found[key] = f.get_tensor(key)
    return found


def same(one, two):
    assert list(one) == list(two)
    for key, tensor in one.items():
        assert tensor.dtype is two[key].dtype
        assert element_bytes(tensor.detach()) == element_bytes(two[key].detach()), key
    return len(one)


# -- the files ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limit", "keys_in_shards"),
    [(100, [1] * 7), (200, [2, 2, 2, 1]), (250, [2, 2, 2, 1]), (300, [3, 3, 1]), (699, [6, 1]),
     (99, [1] * 7), (1, [1] * 7)],
)  # fmt: skip
def test_tensors_fill_one_shard_after_another(limit, keys_in_shards, net, folder):
    done = convert(net, folder, max_shard_size=limit)
    count = len(keys_in_shards)
    names = [shard(i + 1, count) for i in range(count)]

    left_alone(folder, *names, INDEX)
    assert [os.path.basename(file) for file, _ in done.outputs] == [*names, INDEX]
    assert all(os.path.getsize(file) == size for file, size in done.outputs)
    index = index_of(folder)
    assert index["metadata"] == {"total_size": 700}
    assert list(index["weight_map"]) == list(layers())
    held = [[k for k, name in index["weight_map"].items() if name == n] for n in names]
    assert [len(row) for row in held] == keys_in_shards
    for name, keys in zip(names, held, strict=True):
        assert list(load_file(folder / name)) == keys
    assert same(layers(), merged(folder)) == 7


def test_one_that_is_larger_has_a_shard_of_its_own(tmp_path, folder):
    sd = OrderedDict(a=torch.ones(2), big=torch.ones(50), b=torch.ones(2), c=torch.ones(2))
    save(sd, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", folder, max_shard_size=20)

    held = list(index_of(folder)["weight_map"].values())
    assert held.count(held[1]) == 1
    assert held[2] == held[3]
    assert same(sd, merged(folder)) == 4


@pytest.mark.parametrize("limit", [700, "5GB", None])
def test_a_single_shard_has_no_index(limit, net, folder):
    done = convert(net, folder, to="shards", max_shard_size=limit)

    left_alone(folder, "model.safetensors")
    assert len(done.outputs) == 1
    assert same(layers(), load_file(folder / "model.safetensors")) == 7
    convert(folder, folder.parent / "back.pth")
    assert load(folder.parent / "back.pth")._metadata == layers()._metadata


@pytest.mark.parametrize("way", ["slash", "there", "to", "size"])
def test_what_makes_shards(way, net, folder, capsys):
    if way == "there":
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    flags = {"slash": ["-o", f"{folder}/"], "there": ["-o", folder], "to": ["--to", "shards", "-o", folder],
             "size": ["--max-shard-size", "1GB", "-o", folder]}[way]  # fmt: skip
    status, _, err = cli(capsys, "convert", net, *flags)

    assert status == 0, err
    assert (folder / "model.safetensors").exists()
    assert (folder / "config.json").exists() == (way == "there")


def test_names_types_and_parts_in_shards(net, folder):
    done = convert(
        net, folder, max_shard_size=100, dtype="bfloat16", strip_prefix="layers", drop="6",
        keep_dtype="3.weight",
    )  # fmt: skip
    made = merged(folder)

    assert list(made) == [f"{i}.weight" for i in range(6)]
    assert [made[k].dtype for k in made] == [torch.bfloat16] * 3 + [torch.float32] + [torch.bfloat16] * 2  # fmt: skip
    assert index_of(folder)["metadata"]["total_size"] == 5 * 50 + 100
    assert done.entries_left == ("epoch",)
    assert len(set(index_of(folder)["weight_map"].values())) == 4


def test_odd_keys_and_sizes(tmp_path, folder):
    sd = OrderedDict([("编码器.权重", torch.ones(3, 0)), ("b\n\"", torch.tensor(2.5)),
                      ("c", torch.arange(6.0).view(2, 3).t()), ("d", torch.ones(3, dtype=torch.bool))])  # fmt: skip
    save(sd, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", folder, max_shard_size=8)

    assert same(sd, merged(folder)) == 4
    assert "编码器.权重" in (folder / INDEX).read_text("utf-8")


def test_the_json_result_names_every_file(net, folder, capsys):
    status, out, _ = cli(capsys, "convert", net, "-o", folder, "--max-shard-size", "300", "--json")
    outputs = json.loads(out)["outputs"]

    assert status == 0
    assert [row["file"] for row in outputs] == [
        str(folder / name) for name in (*(shard(i, 3) for i in (1, 2, 3)), INDEX)
    ]
    assert all(os.path.getsize(row["file"]) == row["size_bytes"] for row in outputs)


def test_a_dry_run_makes_no_folder(net, folder, capsys, tmp_path):
    status, out, err = cli(capsys, "convert", net, "-o", folder, "--max-shard-size", "300", "-n")

    assert (status, err) == (0, "")
    assert shard(1, 3) in out
    assert "nothing written" in out
    left_alone(tmp_path, net.name)


# -- back again --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["back.pth", "back.safetensors"])
@pytest.mark.parametrize("given", ["folder", "index"])
def test_shards_merge_again(given, name, tmp_path, folder):
    source, back = FIXTURES / "dtypes.pth", tmp_path / name
    drop = ["complex128", "complex32", "bits*", "q*", "float4*"]
    present = ckptool.inspect(source).checkpoint.tables[0].tensors
    held = {t.key for t in present}
    drop = [glob for glob in drop if any(k.startswith(glob.rstrip("*")) for k in held)]
    convert(source, folder, max_shard_size=64, drop=drop)
    convert(folder if given == "folder" else folder / INDEX, back)

    before = load(source)
    made = load_file(back) if name.endswith("safetensors") else load(back, weights_only=True)
    assert len(made) > 10
    for key, tensor in made.items():
        assert tensor.dtype is before[key].dtype
        assert element_bytes(tensor) == element_bytes(before[key])
    if name == "back.pth":
        assert list(made) == [k for k in before if k in made]


def test_layer_versions_come_back(net, folder, tmp_path):
    convert(net, folder, max_shard_size=100)
    convert(folder, tmp_path / "back.pth")

    made = load(tmp_path / "back.pth", weights_only=True)
    assert made._metadata == layers()._metadata
    assert same(layers(), made) == 7


@pytest.mark.parametrize("limit", [70, 200])
def test_ties_come_back(limit, tmp_path, folder):
    emb = nn.Parameter(torch.arange(8.0).view(4, 2))
    sd = OrderedDict(emb=emb, norm=torch.ones(16), head=emb, last=torch.ones(3))
    save(sd, tmp_path / "net.pth")
    done = convert(tmp_path / "net.pth", folder, max_shard_size=limit)
    (note,) = (n for n in done.notes if n.slug == "tied")
    assert "head = emb written once" in note.text
    if limit < 100:
        assert "head" not in index_of(folder)["weight_map"]
    convert(folder, tmp_path / "back.pth")

    made = load(tmp_path / "back.pth", weights_only=True)
    assert list(made) == list(sd)
    assert made["head"].data_ptr() == made["emb"].data_ptr()
    assert all(torch.equal(made[k], sd[k]) for k in sd)


def test_ties_written_twice(tmp_path, folder):
    w = torch.arange(8.0)
    save(OrderedDict(a=w, b=w), tmp_path / "net.pth")
    convert(tmp_path / "net.pth", folder, max_shard_size=32, tied="duplicate")

    assert same(OrderedDict(a=w, b=w), merged(folder)) == 2
    assert index_of(folder)["metadata"]["total_size"] == 64


def test_bin_shards_merge(tmp_path):
    sd = Net().state_dict()
    keys, files = list(sd), {}
    source = tmp_path / "in"
    source.mkdir()
    for i in range(3):
        part = {k: sd[k] for k in keys[i::3]}
        torch.save(part, source / f"pytorch_model-0000{i + 1}-of-00003.bin")
        files.update(dict.fromkeys(part, f"pytorch_model-0000{i + 1}-of-00003.bin"))
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": {k: files[k] for k in keys}})
    (source / "pytorch_model.bin.index.json").write_text(text)
    for given in (source, source / "pytorch_model.bin.index.json"):
        for name in ("out.pth", "out.safetensors"):
            convert(given, tmp_path / name, force=True)
    convert(source, tmp_path / "shards", max_shard_size=100)

    assert same(OrderedDict((k, sd[k]) for k in keys), load(tmp_path / "out.pth", weights_only=True)) == 9  # fmt: skip
    assert all(torch.equal(t, sd[k]) for k, t in load_file(tmp_path / "out.safetensors").items())
    assert merged(tmp_path / "shards").keys() == sd.keys()


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_a_missing_shard_is_refused_by_name(target, net, folder, tmp_path, capsys):
    convert(net, folder, max_shard_size=300)
    (folder / shard(2, 3)).unlink()
    for given in (folder, folder / INDEX):
        status, _, err = cli(capsys, "convert", given, "-o", tmp_path / target)
        assert status == 2
        assert f"a shard is missing: '{shard(2, 3)}' (3 of 7 keys)" in err
    left_alone(tmp_path, net.name, folder.name)


def test_index_and_shards_that_disagree_are_refused(net, folder, tmp_path):
    convert(net, folder, max_shard_size=300)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace("layers.2.", "layers.9."))
    with pytest.raises(CkptError, match=r"layers\.[29]\.weight") as caught:
        convert(folder, tmp_path / "out.pth")
    assert any("layers.2.weight" in row for row in caught.value.findings)
    left_alone(tmp_path, net.name, folder.name)


def test_a_damaged_shard_leaves_nothing(net, folder, tmp_path):
    convert(net, folder, max_shard_size=300)
    path = folder / shard(3, 3)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CkptError, match="00003-of-00003"):
        convert(folder, tmp_path / "out.pth")
    left_alone(tmp_path, net.name, folder.name)


# -- where they go -----------------------------------------------------------------------------
def test_old_shards_that_would_be_mixed_in_are_refused(net, folder):
    convert(net, folder, max_shard_size=300)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for options in ({}, {"force": True}):
        for limit in (200, None):
            with pytest.raises(OutputError) as caught:
                convert(net, folder, max_shard_size=limit, to="shards", **options)
            assert caught.value.slug in ("output-mixed", "output-exists")
            assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    with pytest.raises(OutputError, match="it exists already"):
        convert(net, folder, max_shard_size=300)
    convert(net, folder, max_shard_size=300, force=True, dtype="float16", keep_dtype="**")
    assert same(layers(), merged(folder)) == 7


def test_shards_onto_themselves_are_refused(net, folder):
    convert(net, folder, max_shard_size=300)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for limit in (300, 200):
        with pytest.raises(OutputError):
            convert(folder, folder, max_shard_size=limit, dtype="float16", force=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left")], ids=str
)
def test_a_failure_leaves_no_folder(error, there, net, folder, tmp_path, monkeypatch):
    if there:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    calls = []
    real = os.fsync

    def fails(fd):
        calls.append(fd)
        if len(calls) == 3:
            raise error
        real(fd)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OutputError):
        ckptool.convert(net, folder, max_shard_size=100)
    left_alone(tmp_path, net.name, *([folder.name] if there else []))
    if there:
        left_alone(folder, "config.json")


def test_a_self_check_that_fails_leaves_no_folder(net, folder, tmp_path, monkeypatch):
    real = writing._Out.put
    monkeypatch.setattr(
        writing._Out, "put", lambda self, data: real(self, data.replace(b'"F32"', b'"I32"'))
    )
    with pytest.raises(CkptError, match="self-check failed"):
        convert(net, folder, max_shard_size=100)
    left_alone(tmp_path, net.name)


def test_the_parent_must_be_there(net, tmp_path):
    with pytest.raises(OutputError, match="no folder"):
        convert(net, tmp_path / "a" / "b", max_shard_size=100)
    with pytest.raises((OutputError, SpecialFile)):
        convert(net, f"{net}/", max_shard_size=100)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="not a folder"):
        convert(net, tmp_path / "file", max_shard_size=100, force=True)
    left_alone(tmp_path, net.name, "file")


# -- sizes on the command line -----------------------------------------------------------------
SIZES = {
    "5GB": 5 * 10**9, "500MB": 500 * 10**6, "2GiB": 2 << 30, "1kb": 1000, "1KiB": 1024, "7": 7,
    "5 GB": 5 * 10**9, "0.5M": 500_000, "1.5k": 1500, "1TB": 10**12, " 3MB ": 3 * 10**6, "12B": 12,
}  # fmt: skip


@pytest.mark.parametrize("word", SIZES)
def test_sizes(word):
    assert parse_size(word) == SIZES[word]
    assert parse_size(SIZES[word]) == SIZES[word]


@pytest.mark.parametrize("word", ["", "0", "0.1", "-5GB", "5XB", "1e3", "GB", "5GBs", "1,000", "nan", 0, -1, 2.5e-9, True])  # fmt: skip
def test_what_is_no_size(word, net, folder, tmp_path):
    with pytest.raises(UsageError, match=r"size|byte"):
        convert(net, folder, max_shard_size=word)
    left_alone(tmp_path, net.name)


@pytest.mark.parametrize("target", ["zip", "legacy", "safetensors"])
def test_shards_are_safetensors_in_a_folder(target, net, folder):
    with pytest.raises(UsageError, match="max-shard-size"):
        convert(net, folder, max_shard_size="1GB", to=target)


def test_a_size_and_a_file_name_that_is_no_folder(net, tmp_path):
    """`-o net.safetensors --max-shard-size` would make a folder of that name."""
    for name in ("net.safetensors", "out.pth", "out.BIN", "model.safetensors.index.json"):
        for options in (
            {"max_shard_size": 100},
            {"to": "shards"},
            {"to": "shards", "dry_run": True},
        ):
            with pytest.raises(UsageError, match="folder"):
                convert(net, tmp_path / name, **options)
    left_alone(tmp_path, net.name)
    (tmp_path / "v1.pth").mkdir()
    convert(net, tmp_path / "v1.pth", to="shards")
    convert(net, tmp_path / "v1.5", to="shards")
    left_alone(tmp_path, net.name, "v1.pth", "v1.5")


# -- transformers ------------------------------------------------------------------------------
def test_from_pretrained_reads_the_folder(tmp_path, folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=30,
    )
    model = transformers.BertModel(config)
    torch.save({"model": nn.DataParallel(model).state_dict()}, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", folder, strip_module=True, max_shard_size=2000)
    config.save_pretrained(folder)
    found, info = transformers.BertModel.from_pretrained(folder, output_loading_info=True)

    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key


def test_load_model_reads_a_single_shard_with_a_tie(tmp_path, folder):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
            self.head.weight = self.emb.weight

    model, other = Tied(), Tied()
    save(model.state_dict(), tmp_path / "net.pth")
    convert(tmp_path / "net.pth", f"{folder}/")
    load_model(other, folder / "model.safetensors")
    assert torch.equal(other.head.weight, model.head.weight)


def test_what_save_file_wrote_is_split(tmp_path, folder):
    sd = {f"w{i}": torch.randn(10, dtype=torch.float64) for i in range(5)}
    save_file(sd, tmp_path / "in.safetensors", metadata={"format": "pt", "note": "kept"})
    convert(tmp_path / "in.safetensors", folder, max_shard_size=200)

    assert merged(folder).keys() == sd.keys()
    assert all(torch.equal(t, sd[k]) for k, t in merged(folder).items())
    with safe_open(folder / shard(1, 3), "pt") as f:
        assert f.metadata()["note"] == "kept"
