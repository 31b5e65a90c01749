"""Many objects in one run: prefixes walked and patterns matched in a bucket, held in memory."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import zero_support as zero
from many_support import LAYOUTS, put_tree, whole_folders
from verbs_support import FIXTURES, cli

from ckptool import remote_stores
from ckptool.errors import CkptError, SpecialFile, Unsupported
from ckptool.places import Folder
from ckptool.remote_urls import locate
from ckptool.verbs.gathering import gather
from ckptool.verbs.matching import is_glob
from ckptool.verbs.walking import Skipped, files_below

obstore = pytest.importorskip("obstore")


@pytest.fixture
def asked():
    """Prefixes that were listed."""
    return []


@pytest.fixture
def bucket(monkeypatch, asked):
    """One bucket for all of s3://, gs:// and az://."""
    store = obstore.store.MemoryStore()
    monkeypatch.setattr(remote_stores, "_made", lambda place, reading: store)
    real = remote_stores.Store.listed

    def listed(self, prefix):
        asked.append(prefix)
        return real(self, prefix)

    monkeypatch.setattr(remote_stores.Store, "listed", listed)
    return store


@pytest.fixture
def tree(tmp_path, bucket):
    """A folder of all that a walk meets; the same is in the bucket under `runs/`."""
    folder = tmp_path / "runs"
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / "a-b").mkdir()
    (folder / ".git").mkdir()
    torch.save({"w": torch.zeros(3)}, folder / "z.PTH")
    torch.save({"w": torch.zeros(3)}, folder / ".git" / "x.pth")
    shutil.copy(FIXTURES / "evil.pth", folder / "b" / "evil.pth")
    shutil.copy(FIXTURES / "model.safetensors", folder / "a-b" / "m.safetensors")
    (folder / "b" / "deep" / "broken.pt").write_bytes(b"PK\3\4 nothing")
    for name in ("notes.txt", "._z.pth", "b/tokenizer.model"):
        (folder / name).write_bytes(b"\n\x0e\n\x05<unk>")
    whole_folders(folder)
    put_tree(bucket, folder, "runs")
    return folder


def paths(words, recursive=True, skipped=None):
    found = list(gather(words, recursive, skipped or Skipped()))
    assert [str(place.error) for place in found if place.error] == []
    return [place.path for place in found]


def error_of(word, recursive=True):
    (found,) = gather([word], recursive, Skipped())
    return found.error


def without_commands(found):
    """What mends an object is written beside us, what mends a file beside the file."""
    return {name: value for name, value in found.items() if name != "command"}


# -- prefixes ----------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_prefix_is_walked_as_a_folder_is(tree, scheme, end):
    here, there = Skipped(), Skipped()
    local = [os.path.relpath(p.path, tree) for p in files_below(Folder(tree), here)]
    url = f"{scheme}://bucket/runs"

    found = paths([url + end], skipped=there)

    assert [path.removeprefix(f"{url}/").rstrip("/") for path in found] == local
    assert len(local) == 4 + len(LAYOUTS)
    assert (there.files, there.links) == (here.files, here.links)
    assert {path.rpartition("/")[2] for path in found if path.endswith("/")} == {""}


def test_each_prefix_is_listed_once_and_hidden_ones_never(tree, asked):
    paths(["s3://bucket/runs/"])
    named = [f"runs/zero/{zero.TAG}", "runs/epoch=1.ckpt/checkpoint"]  # by `latest`, too
    inner = [f"runs/{name}" for name in ("net/data", "a-b", "b", "b/deep")]
    rest = [f"runs/{name.partition('/m')[0]}" for name in LAYOUTS]
    assert sorted(asked) == sorted(["runs/", *inner[1:], *rest, *named, *named])


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_the_reports_are_those_of_the_folder(tree, verb, capsys, monkeypatch):
    monkeypatch.chdir(tree.parent)
    status, here, said = cli(capsys, verb, "-r", "runs", "--format", "jsonl")
    there = cli(capsys, verb, "-r", "s3://bucket/runs", "--format", "jsonl")

    assert (there[0], there[2]) == (status, said) == (2, said)
    rows, far = (
        [json.loads(line, object_hook=without_commands) for line in text.splitlines()]
        for text in (here, there[1].replace("s3://bucket/", ""))
    )
    assert far == rows
    assert [row["file"] for row in rows if row.get("error")] == (
        ["runs/b/deep/broken.pt"] if verb == "inspect" else []
    )


def test_a_whole_bucket(bucket):
    for name in ("x/1.pth", "0.pth", "y/z/2.pth"):
        obstore.put(bucket, name, b"")
    expected = ["0.pth", "x/1.pth", "y/z/2.pth"]
    for url in ("s3://b", "s3://b/"):
        assert paths([url]) == [f"s3://b/{name}" for name in expected]


def test_with_r_one_object_is_itself(bucket):
    obstore.put(bucket, "runs/v1.2/net.pth", b"")
    assert paths(["s3://b/runs/v1.2/net.pth"]) == ["s3://b/runs/v1.2/net.pth"]
    assert paths(["s3://b/runs/v1.2"]) == ["s3://b/runs/v1.2/net.pth"]


def test_a_prefix_of_nothing(bucket):
    error = error_of("s3://b/runs/")
    assert isinstance(error, SpecialFile)
    assert str(error) == "s3://b/runs/: nothing lies under this prefix"


@pytest.mark.parametrize(
    "url", ["https://host/models/", "hf://org/name", "hf://org/name/*.safetensors", "sftp://h/x/"]
)
def test_where_nothing_can_be_listed_that_is_told(url):
    error = error_of(url)
    assert isinstance(error, Unsupported)
    assert error.hint
    assert "cannot be listed" in str(error)


@pytest.mark.parametrize(
    "url", ["https://host/a.pth?x=*", "http://host/a[1].pth", "hf://o/n/x.bin"]
)
def test_a_file_on_the_web_is_a_file_also_with_r(url):
    assert paths([url]) == [url]


def test_a_prefix_that_cannot_be_listed_is_told_and_the_others_are_read(bucket, monkeypatch):
    for name in ("r/a/1.pth", "r/b/2.pth", "r/c/3.pth"):
        obstore.put(bucket, name, b"")
    real = remote_stores.Store.listed

    def listed(self, prefix):
        if "b" in prefix:
            raise CkptError(
                "the server refuses it: 403", path=self.place.name, slug="remote-denied"
            )
        return real(self, prefix)

    monkeypatch.setattr(remote_stores.Store, "listed", listed)
    found = list(gather(["s3://x/r"], True, Skipped()))
    assert [place.path for place in found] == ["s3://x/r/a/1.pth", "s3://x/r/b", "s3://x/r/c/3.pth"]
    assert [place.error and place.error.slug for place in found] == [None, "remote-denied", None]


def test_thousands_of_prefixes_keep_few_listings(bucket, asked):
    for number in range(2_000):
        obstore.put(bucket, f"r/{number:04}/net.pth", b"")
    found = gather(["s3://x/r"], True, Skipped())
    assert next(found).path == "s3://x/r/0000/net.pth"
    assert len(asked) <= 1 + 2 * 8
    assert sum(1 for _ in found) == 1_999


# -- patterns ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pattern", "names", "listed"),
    [
        ("runs/*.PTH", ["runs/z.PTH"], ["runs"]),
        ("runs/*/m.*", ["runs/a-b/m.safetensors"], None),
        ("runs/b/**/*.pt", ["runs/b/deep/broken.pt"], ["runs/b", "runs/b/deep"]),
        ("runs/[ab]/evil.pth", ["runs/b/evil.pth"], ["runs", "runs/b"]),
        ("runs/?/deep/*", ["runs/b/deep/broken.pt"], ["runs", "runs/b/deep"]),
        ("runs/?cp", ["runs/dcp/"], ["runs"]),
        ("runs/**/evil.pth", ["runs/b/evil.pth"], None),
        ("runs/.g*/*.pth", ["runs/.git/x.pth"], ["runs", "runs/.git"]),
        ("**/deep/*.pt", ["runs/b/deep/broken.pt"], None),
    ],
)
def test_patterns(tree, asked, pattern, names, listed):
    url = f"s3://bucket/{pattern}"
    assert is_glob(url)
    asked.clear()
    assert paths([url], recursive=False) == [f"s3://bucket/{name}" for name in names]
    if listed is not None:
        assert sorted({*asked} - {pattern}) == listed


def test_a_pattern_matches_what_it_matches_here(tree, monkeypatch):
    monkeypatch.chdir(tree.parent)
    for pattern in ("runs/*", "runs/**", "runs/*/*", "runs/**/*.p[tk]*", "*/b/*.???"):
        here = paths([pattern], recursive=False)
        there = paths([f"s3://bucket/{pattern}"], recursive=False)
        assert [path.removeprefix("s3://bucket/").rstrip("/") for path in there] == here
        assert here


def test_folders_that_match_are_walked_with_r(tree):
    assert paths(["s3://bucket/runs/[ab]*"]) == [
        "s3://bucket/runs/a-b/m.safetensors", "s3://bucket/runs/b/evil.pth",
        "s3://bucket/runs/b/deep/broken.pt",
    ]  # fmt: skip


def test_an_object_may_be_called_like_a_pattern(bucket, capsys):
    net = (FIXTURES / "net_plain.pth").read_bytes()
    for name in ("a[1].pth", "a1.pth"):
        obstore.put(bucket, name, net)
    assert not is_glob("s3://b/a[1].pth")
    assert paths(["s3://b/a[1].pth"], recursive=False) == ["s3://b/a[1].pth"]
    assert paths(["s3://b/a[0-2].pth"], recursive=False) == ["s3://b/a1.pth"]
    status, out, _ = cli(capsys, "inspect", "s3://b/a[1].pth", "--json")
    assert (status, json.loads(out)["file"]) == (0, "s3://b/a[1].pth")


def test_a_pattern_for_nothing(bucket, capsys):
    assert str(error_of("s3://b/*.pth", False)) == "s3://b/*.pth: no file matches"
    status, out, err = cli(capsys, "inspect", "s3://b/*.pth")
    assert (status, out.count("no file matches"), err) == (
        2,
        1,
        "1 file: 0 ok, 0 could run code, 1 refused\n",
    )


def test_a_pattern_that_cannot_be_looked_up_is_one_error(monkeypatch):
    def fails(self, *_):
        raise CkptError("the server refuses it: 403", path=self.place.name, slug="remote-denied")

    monkeypatch.setattr(remote_stores, "_made", lambda place, reading: None)
    monkeypatch.setattr(remote_stores.Store, "listed", fails)
    monkeypatch.setattr(remote_stores.Store, "head", fails)
    assert error_of("s3://b/*.pth", False).slug == "remote-denied"


# -- the store ---------------------------------------------------------------------------------
def test_a_bucket_is_connected_to_once_for_each_environment(monkeypatch):
    monkeypatch.setattr(remote_stores, "_new", lambda place, reading: object())
    monkeypatch.setattr(remote_stores, "_kept", {})
    one, two = (remote_stores.Store(locate(f"s3://b/{key}")).store for key in "xy")
    assert one is two
    assert remote_stores.Store(locate("s3://c/x")).store is not one
    assert remote_stores.Store(locate("s3://b/x"), reading=False).store is not one
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert remote_stores.Store(locate("s3://b/x")).store is not one
    for number in range(50):
        remote_stores.Store(locate(f"s3://b{number}/x"))
    assert len(remote_stores._kept) == 8
