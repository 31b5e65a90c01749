"""Round trips through gs:// (calls of Google's XML interface) and az:// (Azurite)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from azurite_support import ACCOUNT, KEY, ask, azurite, blobs, find_program
from gcs_support import gcs
from remote_support import refused_as_there, serving
from verbs_support import FIXTURES, cli

import ckptool
from ckptool import remote_book, remote_sink, remote_tasks
from ckptool.errors import CkptError

obstore = pytest.importorskip("obstore")
NET = FIXTURES / "dp_cuda.pth"
KILLED = Path(__file__).with_name("engine_killed.py")
NAMES = ["dp_cuda.pth", "legacy_cuda1.pth", "model.safetensors", "deflated.pth", "tar_01x.pth"]


@dataclass
class Bucket:
    url: str
    names: object  # () -> all names, also of what is not complete

    def content(self, key):
        with ckptool.places.open_source(f"{self.url}/{key}") as source:
            return source.read(0, source.size)


@pytest.fixture(scope="module")
def cloud():
    with gcs() as made:
        yield made


@pytest.fixture(scope="module")
def azure(pytestconfig, tmp_path_factory):
    program = find_program(lambda: pytestconfig.cache.mkdir("azurite"))
    if program is None:
        pytest.skip("Azurite is not installed, and npm cannot install it")
    with azurite(program, tmp_path_factory.mktemp("azurite")) as url:
        yield url


@pytest.fixture(params=["gs", pytest.param("az", marks=pytest.mark.long)])
def bucket(request, monkeypatch):
    """An empty bucket whose server the environment names."""
    name = f"b{abs(hash(request.node.name)):x}"
    if request.param == "gs":
        cloud = request.getfixturevalue("cloud")
        monkeypatch.setenv("GOOGLE_BASE_URL", cloud.url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "x")
        cloud.buckets[name] = {}
        return Bucket(f"gs://{name}", lambda: [*sorted(cloud.buckets[name]), *cloud.uploads])
    url = request.getfixturevalue("azure")
    for variable, value in {
        "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url,
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY,
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    ask(url, "PUT", name, restype="container")
    return Bucket(f"az://{name}", lambda: blobs(url, name))


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """24 MB: sent in parts."""
    path = tmp_path_factory.mktemp("big") / "big.pth"
    torch.save({f"module.{i}": torch.randn(1 << 20) for i in range(6)}, path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_an_object_is_the_file(name, bucket, tmp_path, capsys):
    """Sent as it is, read, converted back: every format."""
    there = f"{bucket.url}/a/{name}"
    args = ("convert", FIXTURES / name, "--to-cpu", "-o")
    status = cli(capsys, *args, tmp_path / name)[0]
    assert cli(capsys, *args, there)[0] == status
    if status:
        return
    assert bucket.content(f"a/{name}") == (tmp_path / name).read_bytes()
    found, here = (ckptool.inspect(place).to_dict() for place in (there, str(tmp_path / name)))
    assert found["tables"] == here["tables"]
    assert [note["slug"] for note in found["notes"]] == [note["slug"] for note in here["notes"]]
    assert ckptool.verify(there).exit_status == 0
    assert ckptool.diff(there, str(tmp_path / name)).same


def test_a_large_one_goes_and_comes_in_parts(bucket, big, tmp_path, capsys):
    assert cli(capsys, "convert", big, "--strip-module", "-o", f"{bucket.url}/a b/o.pth")[0] == 0
    assert bucket.names() == ["a b/o.pth"]
    assert cli(capsys, "convert", big, "--strip-module", "-o", tmp_path / "o.pth")[0] == 0
    assert bucket.content("a b/o.pth") == (tmp_path / "o.pth").read_bytes()
    there = (f"{bucket.url}/a b/o.pth", "--add-module", "-o")
    assert cli(capsys, "convert", *there, f"{bucket.url}/back.pth")[0] == 0
    assert ckptool.diff(f"{bucket.url}/back.pth", str(big)).same
    loaded, here = ckptool.load(f"{bucket.url}/back.pth"), torch.load(big)
    assert all(torch.equal(loaded[key], here[key]) for key in here)


@pytest.mark.parametrize("size", ["small", "big"])
def test_an_object_is_replaced_only_with_f(size, bucket, big, capsys):
    file = big if size == "big" else NET
    args = (file, "--to", "safetensors", "-o", f"{bucket.url}/o.safetensors")
    assert cli(capsys, "convert", *args)[0] == 0
    refused_as_there(capsys, *args)
    assert cli(capsys, "convert", *args, "-f")[0] == 0


def test_a_small_one_is_created_by_the_store_alone(bucket, monkeypatch, capsys):
    """Not by looking first: the look sees nothing here, the request itself is refused."""
    monkeypatch.setattr(remote_sink.ObjectTarget, "_check_free", lambda self: None)
    args = (NET, "--to-cpu", "-o", f"{bucket.url}/o.pth")
    assert cli(capsys, "convert", *args)[0] == 0
    before = bucket.content("o.pth")
    refused_as_there(capsys, *args)
    assert bucket.content("o.pth") == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_upload_given_up_shows_nothing(error, bucket, big, monkeypatch):
    from ckptool.verbs import convert

    def fails(*args):
        raise error("no")

    monkeypatch.setattr(convert, "confirm", fails)
    with pytest.raises((KeyboardInterrupt, CkptError)):
        ckptool.convert(big, f"{bucket.url}/o.pth", strip_module=True)
    with pytest.raises(CkptError) as caught:
        ckptool.inspect(f"{bucket.url}/o.pth")
    assert caught.value.slug == "special-file"
    if bucket.url.startswith("gs:"):  # Azure drops blocks that were not committed after a week
        assert bucket.names() == []


def test_shards_under_a_prefix(bucket, big, tmp_path, capsys):
    args = ("convert", big, "--max-shard-size", "10MB", "-o", f"{bucket.url}/x/m/")
    assert cli(capsys, *args)[0] == 0
    assert len(bucket.names()) == 4
    assert ckptool.verify(f"{bucket.url}/x/m/").exit_status == 0
    assert ckptool.diff(f"{bucket.url}/x/m/", str(big)).same
    assert cli(capsys, "convert", f"{bucket.url}/x/m/", "-o", tmp_path / "one.safetensors")[0] == 0
    assert ckptool.diff(tmp_path / "one.safetensors", str(big)).same


def test_an_input_whose_header_lies_sends_nothing(bucket, big, tmp_path, capsys):
    """Its headers are compared when they have passed: the parts are sent by then, and given up."""
    data = bytearray(big.read_bytes())
    at = data.index(b"big/data/3", len(data) // 3)  # in the local header
    data[at + 9 : at + 10] = b"9"
    (tmp_path / "big.pth").write_bytes(data)
    with serving(files={"big.pth": tmp_path / "big.pth"}) as site:
        for out in ("o.pth", "o/"):
            url = f"{bucket.url}/{out}"
            status, said, _ = cli(capsys, "convert", site.url("big.pth"), "-o", url, "--json")
            error = json.loads(said)["error"]
            assert (status, error["slug"]) == (2, "zip-ambiguous")
            assert "no local header of that name" in error["text"]
            with pytest.raises(CkptError):
                ckptool.inspect(url)
    if bucket.url.startswith("gs:"):
        assert bucket.names() == []


# -- one object a task -------------------------------------------------------------------------
def local(big, tmp_path):
    """What one process makes of it, on the disk."""
    ckptool.convert(big, tmp_path / "plain", max_shard_size="9MB")
    return {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}


def there(bucket):
    return {name.removeprefix("out/"): bucket.content(name) for name in bucket.names()}


SHARDS = ("--max-shard-size", "9MB", "--jobs", "2")


@pytest.mark.parametrize("size", ["9MB", "20MB"])
def test_tasks_send_what_the_files_would_be(size, bucket, big, tmp_path, capsys):
    """Shards of 8 MB go at once, those of 20 MB in parts: the mark is kept either way."""
    args = ("convert", big, "-o", f"{bucket.url}/out/", "--max-shard-size", size, "--jobs", "2")
    assert cli(capsys, *args)[0] == 0
    ckptool.convert(big, tmp_path / "plain", max_shard_size=size)
    assert there(bucket) == {p.name: p.read_bytes() for p in (tmp_path / "plain").iterdir()}
    assert ckptool.verify(f"{bucket.url}/out/").exit_status == 0
    refused_as_there(capsys, *args[1:])
    assert cli(capsys, *args, "-f")[0] == 0


def test_tasks_read_a_prefix_of_the_same_bucket(bucket, big, tmp_path, capsys):
    args = ("convert", big, "--max-shard-size", "20MB", "-o", f"{bucket.url}/in/")
    assert cli(capsys, *args)[0] == 0
    args = ("convert", f"{bucket.url}/in/", "-o", f"{bucket.url}/out/", *SHARDS)
    assert cli(capsys, *args)[0] == 0
    found = {name: data for name, data in there(bucket).items() if not name.startswith("in/")}
    assert found == local(big, tmp_path)


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_broken_run_is_gone_on_with(how, bucket, big, tmp_path, monkeypatch, capsys):
    args = ("convert", big, "-o", f"{bucket.url}/out/", *SHARDS)
    if how == "killed":
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, KILLED, big, f"{bucket.url}/out/", "2", *SHARDS]
        done = subprocess.run(command, env=env, capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        with monkeypatch.context() as patch:
            real, count = remote_tasks.write_whole, []

            def fails(*words, **named):
                count.append(1)
                if len(count) == 3:
                    raise OSError(5, "Input/output error")
                return real(*words, **named)

            patch.setattr(remote_tasks, "write_whole", fails)
            assert cli(capsys, *args, "--resume")[0] == 2
    left = {name for name in bucket.names() if name.startswith("out/")}
    assert f"out/{remote_book.NAME}" in left
    assert not any(name.endswith(".json") for name in left)
    status, out, _ = cli(capsys, *args, "--json")
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-busy")
    sent, real = [], remote_tasks.write_whole

    def counted(output, *words, **named):
        sent.append(output.name)
        return real(output, *words, **named)

    monkeypatch.setattr(remote_tasks, "write_whole", counted)
    assert cli(capsys, *args, "--resume")[0] == 0
    wanted = local(big, tmp_path)
    assert there(bucket) == wanted
    assert 0 < len(sent) < len(wanted) - 1


def test_an_interruption_removes_what_was_sent(bucket, big, monkeypatch):
    real, count = remote_tasks.write_whole, []

    def stopped(*words, **named):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return real(*words, **named)

    monkeypatch.setattr(remote_tasks, "write_whole", stopped)
    with pytest.raises(KeyboardInterrupt):
        ckptool.convert(big, f"{bucket.url}/out/", max_shard_size="9MB", jobs=2)
    assert bucket.names() == []


def test_what_is_not_there(bucket):
    for url in (f"{bucket.url}/none.pth", f"{bucket.url}/none/"):
        with pytest.raises(CkptError) as caught:
            ckptool.inspect(url)
        assert caught.value.slug == "special-file"
    for url in (f"{bucket.url}no-such/a.pth", f"{bucket.url}no-such/a/"):
        with pytest.raises(CkptError) as caught:
            ckptool.inspect(url)
        assert caught.value.text == "no such bucket"
