"""convert --salvage: what is whole comes out to the bit, what is not is listed, nothing is made up."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch
from fixtures.make_fixtures import Net
from formats_support import archive, call, dictionary, pickled, saved, saved_legacy, tensor
from safetensors.torch import load_file, save_file
from verbs_support import FIXTURES, cli
from verify_support import FILES, TRAINING, WEIGHTS, ZIP, entries, flipped, same_bits

import ckptool
from ckptool.errors import CkptError


@pytest.fixture
def salvage(tmp_path):
    """Salvage bytes: (what torch loads of the output, the report); the input is untouched."""

    def run(data, suffix=".pth", name="net.pth", **options):
        path, out = tmp_path / name, tmp_path / f"out{suffix}"
        for old in tmp_path.iterdir():
            old.unlink()
        path.write_bytes(data)
        done = ckptool.convert(path, out, salvage=True, fsync=False, **options)
        assert path.read_bytes() == data
        assert sorted(tmp_path.iterdir()) == sorted([path, out])
        loaded = load_file(out) if suffix == ".safetensors" else torch.load(out)
        assert ckptool.verify(out).exit_status == 0
        return loaded, done

    return run


def check(loaded, done, kind):
    """Every tensor that came out is as it was, every other is listed."""
    weights = loaded if "epoch" not in loaded else loaded["state_dict"]
    for key, value in weights.items():
        assert same_bits(value, WEIGHTS[key]), key
    lost = dict(done.lost)
    for key in WEIGHTS.keys() - weights.keys():
        assert key in lost
    assert not weights.keys() & lost.keys()
    if "epoch" in loaded:
        assert (loaded["epoch"], loaded["args"]) == (7, {"lr": 0.1})
        assert ("optimizer" in loaded) != ("optimizer" in lost)
    for group in loaded.get("optimizer", {}).get("state", {}).items():
        for name, value in group[1].items():
            assert same_bits(value, TRAINING["optimizer"]["state"][group[0]][name])
    return len(weights)


# -- cut files ---------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_cut_anywhere(kind, suffix, salvage):
    data = FILES[kind]
    counts = set()
    for size in range(len(data) - 1, 60, -len(data) // 24):
        try:
            loaded, done = salvage(data[:size], suffix)
        except CkptError:
            continue
        counts.add(check(loaded, done, kind))
    assert len(counts) >= 3
    assert max(counts) <= len(WEIGHTS)


def test_what_is_before_the_cut_is_there(salvage):
    """The optimizer is written behind the weights: it goes first, and as a whole."""
    stored = entries(ZIP)
    cut = stored["data/10"].data_offset  # the optimizer's second storage
    loaded, done = salvage(ZIP[:cut])
    assert list(loaded) == ["epoch", "state_dict", "args"]
    assert list(loaded["state_dict"]) == list(WEIGHTS)
    lost = dict(done.lost)
    assert "left out as a whole" in lost["optimizer"]
    assert [name for name in lost if name.startswith("optimizer.state.")]
    assert loaded["state_dict"]._metadata == TRAINING["state_dict"]._metadata


def test_legacy_stays_legacy_and_says_that_nothing_is_proven(salvage, tmp_path):
    data = FILES["legacy"]
    loaded, done = salvage(data[:-40])
    assert check(loaded, done, "legacy") >= 5
    assert ckptool.inspect(tmp_path / "out.pth").checkpoint.format == "torch-legacy"
    assert any("no checksum is recorded" in note.text for note in done.notes)


# -- flipped bits ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["zip", "repacked", "deflated"])
def test_a_flipped_bit_anywhere(kind, salvage):
    data = FILES[kind]
    generator = random.Random(3)
    pickle = entries(data)["data.pkl"]
    inside = range(pickle.data_offset, pickle.data_offset + pickle.compressed_size)
    for _ in range(60):
        at = generator.randrange(len(data))
        damaged = flipped(data, at, generator.randrange(8))
        if at in inside:
            with pytest.raises(CkptError):
                salvage(damaged)
            continue
        loaded, done = salvage(damaged, generator.choice([".pth", ".safetensors"]))
        assert check(loaded, done, kind) >= len(WEIGHTS) - 1


def test_one_storage_of_each_kind(salvage):
    for record, name in {"data/1": "0.bias", "data/8": "2.bias"}.items():
        loaded, done = salvage(flipped(ZIP, entries(ZIP)[record].data_offset))
        assert [key for key, _ in done.lost] == [name]
        assert list(loaded["state_dict"]) == [key for key in WEIGHTS if key != name]
        assert "optimizer" in loaded
    loaded, done = salvage(flipped(ZIP, entries(ZIP)[".data/serialization_id"].data_offset))
    assert done.lost == ()
    assert any("'.data/serialization_id' is damaged" in note.text for note in done.notes)


# -- shapes of files ---------------------------------------------------------------------------
def test_ties_and_views_go_together(salvage):
    base = torch.arange(10.0)
    state = {"a": base, "b": base, "half": base[5:], "other": torch.ones(2), "none": torch.zeros(0)}
    data = saved(state)
    loaded, done = salvage(flipped(data, entries(data)["data/0"].data_offset))
    assert list(loaded) == ["other", "none"]
    assert [key for key, _ in done.lost] == ["a", "b", "half"]
    loaded, done = salvage(flipped(data, entries(data)["data/1"].data_offset))
    assert [key for key, _ in done.lost] == ["other"]
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["half"].storage_offset() == 5


def test_a_pickled_model_comes_out_as_what_is_whole_of_its_state_dict(salvage, tmp_path):
    path = tmp_path / "whole.pth"
    torch.save(Net(), path)
    data = path.read_bytes()
    path.unlink()
    loaded, done = salvage(flipped(data, entries(data)["data/0"].data_offset))
    assert [key for key, _ in done.lost] == ["conv.weight"]
    expected = {key: value for key, value in Net().state_dict().items() if key != "conv.weight"}
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_tensors_inside_other_entries_of_a_state_dict(salvage):
    state = {"w": torch.ones(3), "stats": [torch.ones(2), torch.zeros(2)], "v": torch.ones(4)}
    data = saved({"net": state, "step": 3})
    loaded, done = salvage(flipped(data, entries(data)["data/2"].data_offset))
    assert list(loaded["net"]) == ["w", "v"]
    assert loaded["step"] == 3
    assert [key for key, _ in done.lost] == ["net.stats.1"]


def dense(value):
    """The numbers of a tensor of whatever kind."""
    value = value.to_dense() if value.is_sparse else value
    return value.dequantize() if value.is_quantized else value


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_sparse_and_scalars(salvage):
    state = {
        "s": torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse(),
        "q": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
        "n": torch.tensor(7), "w": torch.ones(2, 2),
    }  # fmt: skip
    data = saved(state)
    for record in (name for name in entries(data) if name.startswith("data/")):
        loaded, done = salvage(flipped(data, entries(data)[record].data_offset))
        (gone,) = state.keys() - loaded.keys()
        assert gone in {name.split(".")[0] for name, _ in done.lost}
        assert all(torch.equal(dense(loaded[key]), dense(state[key])) for key in loaded)


def test_tensors_that_cannot_be_cut_out(salvage):
    data = saved([torch.ones(3), torch.zeros(2)])
    damaged = flipped(data, entries(data)["data/0"].data_offset)
    with pytest.raises(CkptError, match="cannot be cut out") as caught:
        salvage(damaged)
    assert ".safetensors" in caught.value.hint
    loaded, _ = salvage(damaged, ".safetensors")
    assert list(loaded) == ["1"]


def test_safetensors_that_are_cut(salvage, tmp_path):
    state = {"a": torch.ones(8, dtype=torch.float64), "b": torch.ones(5), "c": torch.ones(3, dtype=torch.int8)}  # fmt: skip
    save_file(state, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").unlink()
    for suffix in (".safetensors", ".pth"):
        loaded, done = salvage(data[:-1], suffix, name="net.safetensors")
        assert {key: value.tolist() for key, value in loaded.items()} == {
            key: state[key].tolist() for key in ("a", "b")
        }
        assert [key for key, _ in done.lost] == ["c"]
    with pytest.raises(CkptError, match="4 bytes after the last tensor"):
        salvage(data + b"    ")  # perhaps the length of the header is wrong: no guess


# -- with other options ------------------------------------------------------------------------
def test_the_rules_see_only_what_is_whole(salvage):
    state = {f"module.{key}": value for key, value in WEIGHTS.items()}
    data = saved({"state_dict": state, "epoch": 1})
    damaged = flipped(data, entries(data)["data/0"].data_offset)
    loaded, done = salvage(damaged, to_cpu=True, dtype="float16")
    assert list(loaded["state_dict"]) == list(WEIGHTS)[1:]
    assert loaded["state_dict"]["0.bias"].dtype is torch.float16
    assert "module.0.weight" not in done.renames
    loaded, _ = salvage(damaged, only="**.bias", select="state_dict")
    assert sorted(loaded) == [f"module.{key}" for key in ("0.bias", "1.bias", "2.bias")]
    with pytest.raises(CkptError, match="matches no key"):
        salvage(damaged, drop="module.0.weight")


def test_a_whole_file_is_converted_as_ever(salvage):
    for kind in FILES:
        loaded, done = salvage(FILES[kind])
        assert check(loaded, done, kind) == len(WEIGHTS)
        assert done.lost == ()
        assert any("nothing is damaged" in note.text for note in done.notes)


def test_code_does_not_come_out(salvage):
    rows = [("w", tensor()), ("x", call("os.system", "true"))]
    damaged = archive(pickled(dictionary(*rows)), version=b"11\n")
    with pytest.raises(CkptError) as caught:
        salvage(damaged)
    assert caught.value.slug == "unsafe-pickle"
    loaded, done = salvage(damaged, ".safetensors")
    assert loaded["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert any("os.system" in note.text for note in done.notes)


# -- refusals ----------------------------------------------------------------------------------
def test_nothing_whole_writes_nothing(salvage, tmp_path):
    data = saved({"w": torch.ones(4)})
    with pytest.raises(CkptError, match="no tensor of a state_dict is whole"):
        salvage(flipped(data, entries(data)["data/0"].data_offset))
    assert [path.name for path in tmp_path.iterdir()] == ["net.pth"]


@pytest.mark.parametrize("name", ["html.pth", "lfs.pth", "empty.pth", "truncated.pth"])
def test_what_cannot_be_salvaged_is_refused_as_by_inspect(name, tmp_path):
    with pytest.raises(CkptError) as known:
        ckptool.inspect(FIXTURES / name)
    if name == "truncated.pth":
        ckptool.convert(FIXTURES / name, tmp_path / "o.pth", salvage=True)
        return
    with pytest.raises(CkptError) as caught:
        ckptool.convert(FIXTURES / name, tmp_path / "o.pth", salvage=True)
    assert str(caught.value) == str(known.value)
    assert list(tmp_path.iterdir()) == []


def test_misuse_and_folders(capsys, tmp_path):
    net = FIXTURES / "net_plain.pth"
    for words in (["--in-place"], ["--keep-object", "-o", "o.pth"], []):
        assert cli(capsys, "convert", net, "--salvage", *words)[0] == 2
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    status, _, err = cli(capsys, "convert", tmp_path, "--salvage", "-o", tmp_path / "o.pth")
    assert status == 2
    assert "the index has no weight_map" in err  # nothing says what is in the shards


# -- the command -------------------------------------------------------------------------------
def test_the_command_lists_what_is_lost(tmp_path, capsys):
    path, out = tmp_path / "net.pth", tmp_path / "part.pth"
    path.write_bytes(FILES["zip"][:3000])
    status, stdout, err = cli(capsys, "convert", path, "--salvage", "-o", out)
    assert (status, stdout) == (1, "")
    assert "the input is damaged: cut at 3,000 bytes: no zip directory" in err
    lost = [line.strip() for line in err.splitlines() if line.strip().startswith("lost: ")]
    assert len(lost) == len(ckptool.verify(path).lost)
    status, stdout, _ = cli(capsys, "convert", path, "--salvage", "-o", out, "-f", "--json")
    report = json.loads(stdout)
    assert status == 1
    assert {row["key"] for row in report["lost"]} > {"2.bias", "optimizer"}
    status, stdout, _ = cli(capsys, "convert", path, "--salvage", "-n", "-o", tmp_path / "x.pth")
    assert status == 1
    assert "dry run: nothing written" in stdout
    assert not (tmp_path / "x.pth").exists()
    whole = tmp_path / "whole.pth"
    whole.write_bytes(FILES["zip"][:-30])  # only the directory is gone
    assert cli(capsys, "convert", whole, "--salvage", "-o", tmp_path / "y.pth")[0] == 0


def test_a_legacy_count_that_was_hit(salvage):
    data = saved_legacy({"a": torch.ones(4), "b": torch.ones(5), "c": torch.ones(6)})
    loaded, done = salvage(flipped(data, data.rindex(struct.pack("<q", 5)), 3))
    assert list(loaded) == ["a", "c"]
    assert [key for key, _ in done.lost] == ["b"]
