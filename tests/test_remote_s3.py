"""Round trips through moto's S3 server, in a virtual environment of its own."""

from __future__ import annotations

import json

import pytest
import torch
from verbs_support import FIXTURES, cli

import ckptool
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
    args = (
        "convert",
        big if size == "big" else NET,
        "--to-cpu",
        "-o",
        f"{bucket.url}/o.pth",
        "--json",
    )
    assert cli(capsys, *args)[0] == 0
    status, out, _ = cli(capsys, *args)
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-exists")
    assert cli(capsys, *args, "-f")[0] == 0


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
