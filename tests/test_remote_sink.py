"""Outputs in a bucket, held in obstore's own memory store: when they are seen, what gives up."""

from __future__ import annotations

import json

import pytest
import torch
from verbs_support import FIXTURES, cli

import ckptool
from ckptool import remote_sink, remote_stores
from ckptool.errors import CkptError

obstore = pytest.importorskip("obstore")
NET = FIXTURES / "dp_cuda.pth"


@pytest.fixture
def bucket(monkeypatch):
    """One bucket for all of s3://."""
    store = obstore.store.MemoryStore()
    monkeypatch.setattr(remote_stores, "_made", lambda place, reading: store)
    return store


@pytest.fixture
def in_parts(monkeypatch):
    """Every output is sent in parts."""
    monkeypatch.setattr(remote_sink, "ONE_REQUEST", 0)


def names(store):
    return sorted(row["path"] for rows in obstore.list(store) for row in rows)


def content(store, name):
    return bytes(obstore.get(store, name).bytes())


def local(tmp_path, capsys, *args):
    out = tmp_path / "local"
    assert cli(capsys, "convert", *args, "-o", out)[0] == 0
    return out.read_bytes()


@pytest.mark.parametrize("request_bytes", [0, 1 << 30], ids=["parts", "at once"])
@pytest.mark.parametrize(("name", "args"), [
    ("dp_cuda.pth", ["--to-cpu"]), ("legacy_cuda1.pth", ["--to-cpu"]),
    ("deflated.pth", ["--unwrap", "--to-cpu"]), ("dp_cuda.pth", ["--to", "safetensors"]),
    ("dp_cuda.pth", ["--to-cpu", "--dtype", "float16"]), ("dp_cuda.pth", ["--to-cpu", "--only", "module.fc*", "--compact"]),
])  # fmt: skip
def test_the_object_is_what_the_file_would_be(
    name, args, request_bytes, bucket, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(remote_sink, "ONE_REQUEST", request_bytes)
    if "--only" in args:
        keys = [
            t["key"] for t in ckptool.inspect(FIXTURES / name).to_dict()["tables"][0]["tensors"]
        ]
        args = [*args[:2], keys[0].removeprefix("module."), args[3]]
    status, _, err = cli(
        capsys, "convert", FIXTURES / name, *args, "-o", "s3://b/x/out.pth", "--json"
    )
    assert status == 0, err
    assert names(bucket) == ["x/out.pth"]
    assert content(bucket, "x/out.pth") == local(tmp_path, capsys, FIXTURES / name, *args)


def test_from_bucket_to_bucket(bucket, in_parts, tmp_path, capsys):
    obstore.put(bucket, "net.pth", NET.read_bytes())
    assert cli(capsys, "convert", "s3://b/net.pth", "--to-cpu", "-o", "s3://b/out.pth")[0] == 0
    assert content(bucket, "out.pth") == local(tmp_path, capsys, NET, "--to-cpu")
    assert ckptool.diff("s3://b/net.pth", "s3://b/out.pth").same


@pytest.mark.parametrize("parts", [True, False])
def test_an_object_is_replaced_only_with_f(parts, bucket, monkeypatch, capsys):
    monkeypatch.setattr(remote_sink, "ONE_REQUEST", 0 if parts else 1 << 30)
    obstore.put(bucket, "out.pth", b"old")
    args = ("convert", NET, "--to-cpu", "-o", "s3://b/out.pth")
    status, out, _ = cli(capsys, *args, "--json")
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-exists")
    assert content(bucket, "out.pth") == b"old"
    assert cli(capsys, *args, "-f")[0] == 0
    assert len(content(bucket, "out.pth")) > 3


@pytest.mark.parametrize("parts", [True, False])
def test_an_object_that_came_meanwhile_stays(parts, bucket, monkeypatch, capsys):
    monkeypatch.setattr(remote_sink, "ONE_REQUEST", 0 if parts else 1 << 30)
    publish = remote_sink.ObjectTarget.publish

    def late(self):
        obstore.put(bucket, "out.pth", b"another's")
        publish(self)

    monkeypatch.setattr(remote_sink.ObjectTarget, "publish", late)
    status, out, _ = cli(capsys, "convert", NET, "--to-cpu", "-o", "s3://b/out.pth", "--json")
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-exists")
    assert content(bucket, "out.pth") == b"another's"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, CkptError], ids=lambda e: e.__name__)
def test_nothing_is_seen_before_the_check_and_nothing_after_a_failure(
    error, bucket, in_parts, monkeypatch
):
    from ckptool.verbs import convert

    seen = []

    def fails(*args):
        seen.append(names(bucket))
        raise error("no")

    monkeypatch.setattr(convert, "confirm", fails)
    with pytest.raises((KeyboardInterrupt, CkptError)):
        ckptool.convert(NET, "s3://b/out.pth", to_cpu=True)
    assert seen == [[]]
    assert names(bucket) == []


def test_the_check_sees_a_wrong_pickle_before_it_is_seen(bucket, in_parts, monkeypatch):
    """The bytes that are checked are those that were sent."""
    from ckptool.verbs import convert

    checked = []

    def look(checkpoint, made, target, written, limits, name):
        checked.append(written.read(0, written.size))

    monkeypatch.setattr(convert, "confirm", look)
    ckptool.convert(NET, "s3://b/out.pth", to_cpu=True)
    assert checked == [content(bucket, "out.pth")]


def test_an_upload_that_fails_is_an_error(bucket, in_parts, monkeypatch):
    def breaks(self, pieces, part_bytes, at_once):
        next(pieces)
        raise OSError("the line is cut")

    monkeypatch.setattr(remote_stores.Store, "put_parts", breaks)
    with pytest.raises(CkptError) as caught:
        ckptool.convert(NET, "s3://b/out.pth", to_cpu=True)
    assert "writing failed" in caught.value.text
    assert names(bucket) == []


def test_shards_under_a_prefix(bucket, in_parts, tmp_path, capsys):
    torch.save({"a.weight": torch.ones(500), "b.weight": torch.zeros(700)}, tmp_path / "net.pth")
    args = ("convert", tmp_path / "net.pth", "--max-shard-size", "2KB", "-o", "s3://b/m/")
    status, _, err = cli(capsys, *args)
    assert status == 0, err
    assert [name.rpartition(".")[2] for name in names(bucket)] == [
        "safetensors",
        "safetensors",
        "json",
    ]
    found = ckptool.inspect("s3://b/m/").to_dict()
    assert [t["key"] for t in found["tables"][0]["tensors"]] == ["a.weight", "b.weight"]
    assert ckptool.verify("s3://b/m").exit_status == 0
    assert ckptool.diff("s3://b/m/", str(tmp_path / "net.pth")).same
    obstore.put(bucket, "m/other.safetensors", b"x")
    status, out, _ = cli(capsys, *args, "-f", "--json")
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-mixed")


def test_the_output_is_the_input(bucket, capsys):
    obstore.put(bucket, "net.pth", NET.read_bytes())
    args = ("convert", "s3://b/net.pth", "--to-cpu", "-f", "-o", "s3://b/net.pth", "--json")
    status, out, _ = cli(capsys, *args)
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-same")


def test_an_empty_prefix_and_a_missing_object(bucket):
    for url in ("s3://b/none/", "s3://b/none.pth", "s3://b/none"):
        with pytest.raises(CkptError) as caught:
            ckptool.inspect(url)
        assert caught.value.slug == "special-file"


def test_memory_stays_bounded_while_parts_wait(bucket, tmp_path, monkeypatch):
    """A slow line holds the writer back: no more than a few pieces wait."""
    waiting = []
    hand = remote_sink._Upload.hand

    def watched(self, piece):
        waiting.append(self._queue.qsize())
        hand(self, piece)

    monkeypatch.setattr(remote_sink._Upload, "hand", watched)
    torch.save({"w": torch.zeros(6 << 20)}, tmp_path / "net.pth")
    ckptool.convert(tmp_path / "net.pth", "s3://b/out.pth", to_cpu=True)
    assert len(waiting) > 20
    assert max(waiting) <= 2
