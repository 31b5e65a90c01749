"""verify of a folder: the index against the shards, and every shard by itself."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from verbs_support import cli
from verify_support import entries, flipped

import ckptool
from ckptool.errors import CkptError

STATE = {f"layer{i}.weight": torch.full((4, 4), float(i)) for i in range(6)}


@pytest.fixture(params=["safetensors", "bin"])
def folder(request, tmp_path):
    """Six tensors in three shards, with an index."""
    suffix = request.param
    files = {}
    for number in range(3):
        name = f"model-0000{number + 1}-of-00003.{suffix}"
        part = {key: STATE[key] for key in list(STATE)[2 * number : 2 * number + 2]}
        if suffix == "bin":
            torch.save(part, tmp_path / name)
        else:
            save_file(part, tmp_path / name)
        files |= dict.fromkeys(part, name)
    write_index(tmp_path, suffix, files)
    return tmp_path


def write_index(folder, suffix, files):
    index = {"metadata": {"total_size": 384}, "weight_map": files}
    (folder / f"model.{suffix}.index.json").write_text(json.dumps(index))


def shards(folder):
    return sorted(path for path in folder.iterdir() if "-of-" in path.name)


def index_of(folder):
    return next(folder.glob("*.index.json"))


def test_a_whole_folder(folder):
    for place in (folder, index_of(folder)):
        found = ckptool.verify(place, finite=True)
        assert (found.exit_status, found.format, found.safe) == (0, "hf-shards", True)
        assert found.tensor_count == found.whole_count == 6
        assert found.numbers.tensor_count == 6
        if index_of(folder).name.endswith("bin.index.json"):
            assert found.loading.weights_only is True
            assert found.coverage.checked_count == found.coverage.record_count > 6
        else:
            assert "no checksums" in found.coverage.text


def test_a_missing_shard_is_named_with_its_keys(folder):
    shards(folder)[1].unlink()
    found = ckptool.verify(folder)
    assert found.exit_status == 2
    (finding,) = found.findings
    assert finding.member == shards(folder)[0].name.replace("00001", "00002", 1)
    assert finding.keys == ("layer2.weight", "layer3.weight")
    assert found.whole_count == 4
    assert "2 of 6 keys" in finding.text


def test_a_cut_shard_costs_what_is_cut(folder):
    path = shards(folder)[2]
    data = path.read_bytes()
    end = data.rindex(STATE["layer5.weight"].numpy().tobytes())
    path.write_bytes(data[: end + 10])
    found = ckptool.verify(folder)
    assert found.exit_status == 2
    assert [key for key, _ in found.lost] == ["layer5.weight"]
    assert all(finding.member.startswith(path.name) for finding in found.findings)


@pytest.mark.parametrize("folder", ["bin"], indirect=True)
def test_wrong_bytes_in_a_shard_are_named(folder):
    path = shards(folder)[0]
    data = path.read_bytes()
    path.write_bytes(flipped(data, entries(data)["data/1"].data_offset))
    found = ckptool.verify(folder)
    assert (found.exit_status, found.whole) == (1, False)
    (finding,) = found.findings
    assert (finding.member, finding.keys) == (f"{path.name}:data/1", ("layer1.weight",))


def test_an_index_that_lies(folder):
    files = json.loads(index_of(folder).read_text())["weight_map"]
    first, second = shards(folder)[0].name, shards(folder)[1].name
    suffix = index_of(folder).name.split(".")[1]
    lies = {
        "elsewhere": files | {"layer0.weight": second},
        "nowhere": files | {"more": first},
        "unknown": {key: name for key, name in files.items() if key != "layer3.weight"},
    }
    for what, lie in lies.items():
        write_index(folder, suffix, lie)
        found = ckptool.verify(folder)
        assert (found.exit_status, found.whole) == (2, False), what
        key = {"elsewhere": "layer0.weight", "nowhere": "more", "unknown": "layer3.weight"}[what]
        assert any(key in finding.text for finding in found.findings), what


def test_an_index_that_cannot_be_read(folder, capsys):
    index_of(folder).write_text('{"weight_map": {"a": "../x"}}')
    found = ckptool.verify(folder)
    assert (found.exit_status, found.safe, found.tensor_count) == (2, None, None)
    assert found.findings[0].slug == "path-escape"
    status, out, _ = cli(capsys, "verify", folder, "--json")
    assert status == 2
    report = json.loads(out)
    assert (report["whole"], report["findings"][0]["slug"]) == (False, "path-escape")


@pytest.mark.parametrize("folder", ["bin"], indirect=True)
def test_code_in_a_shard(folder):
    path = shards(folder)[0]
    from formats_support import archive, call, dictionary, pickled, tensor

    rows = [(key, tensor(size=(2,), stride=(1,))) for key in ("layer0.weight", "layer1.weight")]
    path.write_bytes(archive(pickled(dictionary(*rows, ("x", call("os.system", "true"))))))
    found = ckptool.verify(folder)
    assert (found.exit_status, found.safe) == (1, False)
    assert found.loading.weights_only is False
    assert any(
        row.name == "os.system" and row.member.startswith(path.name)
        for row in found.loading.blockers
    )


def test_a_folder_with_one_file_and_one_with_none(folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    save_file(STATE, alone / "model.safetensors")
    assert ckptool.verify(alone).format == "safetensors"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CkptError):
        ckptool.verify(empty)
