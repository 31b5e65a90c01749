"""Round trips through moto's S3 server, in a virtual environment of its own."""

from __future__ import annotations

import json
import os

import pytest
import torch
from many_support import LAYOUTS, put_tree, whole_folders
from remote_support import refused_as_there
from verbs_support import FIXTURES, cli

import ckptool
from ckptool import remote_sink, remote_stores
from ckptool.errors import CkptError

pytest_plugins = ["moto_support"]
pytestmark = pytest.mark.long
obstore = pytest.importorskip("obstore")
NET = FIXTURES / "dp_cuda.pth"


@pytest.fixture
def big(tmp_path):
    """40 MB: sent in parts."""
    path = tmp_path / "big.pth"
    state = {f"module.{i}": torch.randn(1 << 20).to("cpu") for i in range(10)}
    torch.save(state, path)
    return path


@pytest.mark.parametrize("size", ["small", "big"])
def test_a_round_trip(size, bucket, big, tmp_path, capsys):
    file = big if size == "big" else NET
    there = f"{bucket.url}/a b/out.pth"
    assert cli(capsys, "convert", file, "--to-cpu", "-o", there)[0] == 0
    assert cli(capsys, "convert", file, "--to-cpu", "-o", tmp_path / "here")[0] == 0
    store = obstore.store.S3Store(bucket.name, client_options={"allow_http": True})
    found = bytes(obstore.get(store, "a b/out.pth").bytes())
    assert found == (tmp_path / "here").read_bytes()
    assert ckptool.verify(there).exit_status == 0
    assert cli(capsys, "convert", there, "--add-module", "-o", f"{bucket.url}/back.pth")[0] == 0
    assert ckptool.diff(f"{bucket.url}/back.pth", str(file)).same
    loaded = ckptool.load(there)
    assert loaded.keys() == torch.load(tmp_path / "here", weights_only=False).keys()


@pytest.mark.parametrize("size", ["small", "big"])
def test_create_only_and_force(size, bucket, big, capsys):
    args = (big if size == "big" else NET, "--to-cpu", "-o", f"{bucket.url}/o.pth")
    assert cli(capsys, "convert", *args)[0] == 0
    refused_as_there(capsys, *args)
    assert cli(capsys, "convert", *args, "-f")[0] == 0


def test_a_small_one_is_created_by_the_store_alone(bucket, monkeypatch, capsys):
    """Not by looking first: the look sees nothing here, the request itself is refused."""
    monkeypatch.setattr(remote_sink.ObjectTarget, "_check_free", lambda self: None)
    args = (NET, "--to-cpu", "-o", f"{bucket.url}/o.pth")
    assert cli(capsys, "convert", *args)[0] == 0
    refused_as_there(capsys, *args)


def test_a_large_one_is_read_once(bucket, big, tmp_path, monkeypatch):
    """In large pieces: moto, and whoever bills requests, does not care how many bytes one has."""
    ckptool.convert(big, f"{bucket.url}/big.pth", strip_module=True)
    sizes, get = [], remote_stores.Store.get

    def counted(self, start, end):
        sizes.append(end - start)
        return get(self, start, end)

    monkeypatch.setattr(remote_stores.Store, "get", counted)
    ckptool.convert(f"{bucket.url}/big.pth", tmp_path / "o.pth", add_module=True)
    assert big.stat().st_size <= sum(sizes) <= 1.05 * big.stat().st_size
    assert len([size for size in sizes if size > 100_000]) <= 8


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_upload_given_up_leaves_nothing(error, bucket, big, monkeypatch):
    from ckptool.verbs import convert

    def fails(*args):
        raise error("no")

    monkeypatch.setattr(convert, "confirm", fails)
    with pytest.raises((KeyboardInterrupt, CkptError)):
        ckptool.convert(big, f"{bucket.url}/o.pth", to_cpu=True)
    assert bucket.is_bare()


def test_shards(bucket, big, capsys):
    args = ("convert", big, "--strip-module", "--max-shard-size", "20MB", "-o", f"{bucket.url}/m/")
    assert cli(capsys, *args)[0] == 0
    assert ckptool.verify(f"{bucket.url}/m/").exit_status == 0
    assert ckptool.diff(f"{bucket.url}/m/", str(big)).same


def test_a_missing_bucket(bucket):
    with pytest.raises(CkptError) as caught:
        ckptool.inspect("s3://no-such-bucket/a.pth")
    assert (caught.value.slug, caught.value.text) == ("special-file", "no such bucket")


# -- many objects ------------------------------------------------------------------------------
@pytest.fixture
def runs(bucket, tmp_path):
    """1,250 objects under `flat/`, more than a page of 1,000; a folder of each layout."""
    folder = tmp_path / "runs"
    (folder / "flat").mkdir(parents=True)
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pth")
    for number in range(1_250):
        os.link(tmp_path / "x.pth", folder / "flat" / f"{number:04}.pth")
    whole_folders(folder)
    store = obstore.store.S3Store(bucket.name, client_options={"allow_http": True})
    put_tree(store, folder, "runs")
    for marker in ("runs/", "runs/flat/", "runs/z.ckpt/"):
        bucket.put(marker)
    return folder


def test_a_prefix_of_many_objects_says_what_the_folder_says(bucket, runs, capsys, monkeypatch):
    monkeypatch.chdir(runs.parent)
    count = 1_250 + len(LAYOUTS)
    for verb in ("inspect", "verify"):
        here = cli(capsys, verb, "-r", "runs", "--format", "csv")
        there = cli(capsys, verb, "-r", f"{bucket.url}/runs/", "--format", "csv")
        assert there[1].replace(f"{bucket.url}/", "") == here[1]
        assert (there[0], there[2]) == (here[0], here[2])
        assert here[2].startswith(f"{count:,} files: {count:,} ok")
    pattern = f"{bucket.url}/r*/fl?t/*[05].pth"
    status, out, err = cli(capsys, "inspect", pattern, "--format", "jsonl")
    assert (status, err) == (0, "250 files: 250 ok, 0 could run code, 0 refused\n")
    files = [json.loads(line)["file"] for line in out.splitlines()]
    assert files == [f"{bucket.url}/runs/flat/{n:04}.pth" for n in range(0, 1_250, 5)]


def test_a_key_that_no_path_can_be_is_told(bucket, capsys):
    for key in ("odd/a//b.pth", "odd/c.pth", "odd/a%20b%5B1%5D%3F.pth", "other/d.pth"):
        bucket.put(key, NET.read_bytes())
    status, out, _ = cli(capsys, "inspect", "-r", bucket.url, "--format", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["file"].removeprefix(bucket.url) for row in rows] == [
        "/odd/a b[1]?.pth", "/odd/c.pth", "/odd/a", "/other/d.pth",
    ]  # fmt: skip
    assert status == 2
    assert [row["error"]["text"] for row in rows if "error" in row] == [
        "a key here is no path: an empty name, '..' or a control character is in it"
    ]


def test_a_missing_bucket_is_one_row(bucket, capsys):
    files = ("s3://no-such-bucket/x/", "s3://no-such-bucket/*.pth")
    status, out, _ = cli(capsys, "inspect", "-r", *files, "--format", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (status, [row["file"] for row in rows]) == (2, [files[0], "s3://no-such-bucket"])
    assert {row["error"]["text"] for row in rows} == {"no such bucket"}
