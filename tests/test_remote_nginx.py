"""URLs of a real web server: nginx, with ranges and without, that refuses, leads away, packs, is slow."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil

import pytest
import torch
from nginx_support import PROGRAM, nginx
from verbs_support import FIXTURES, cli

import ckptool
from ckptool.errors import CkptError

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="nginx is not installed"),
]
pytest.importorskip("obstore")
NET = FIXTURES / "dp_cuda.pth"
NAMES = ["dp_cuda.pth", "legacy_cuda1.pth", "model.safetensors", "deflated.pth", "tar_01x.pth"]
WITHOUT = "max_ranges 0;"


@pytest.fixture
def serve(tmp_path):
    """Start a server with all fixtures; `serve(inside, name)` for more than one."""
    with contextlib.ExitStack() as running:

        def start(inside="", name="server"):
            made = running.enter_context(nginx(tmp_path / name, inside))
            for path in FIXTURES.iterdir():
                if path.is_file():
                    shutil.copy(path, made.files)
            return made

        yield start


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory):
    """1 GB of 300 tensors, most of it a hole."""
    path = tmp_path_factory.mktemp("gigabyte") / "big.pth"
    with torch.serialization.skip_data():
        torch.save({f"layers.{i}.weight": torch.empty(840_000) for i in range(300)}, path)
    return path


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """48 MB with checksums: more than is sent whole, and read by several threads."""
    path = tmp_path_factory.mktemp("net") / "net.pth"
    torch.save({f"module.{i}.w": torch.randn(300_000) for i in range(40)}, path)
    return path


def place(server, path):
    """Serve one more file."""
    os.link(path, server.files / path.name)
    return server.url(path.name)


def refused(capsys, *args):
    """The error of a command as --json, which a screen says too."""
    status, out, _ = cli(capsys, *args, "--json")
    error = json.loads(out)["error"]
    again, _, screen = cli(capsys, *args)
    assert (status, again) == (2, 2)
    assert " ".join(error["text"].split())[:40] in " ".join(screen.split())
    return error


# -- with ranges -------------------------------------------------------------------------------
def test_inspect_of_a_gigabyte(serve, gigabyte):
    server = serve()
    found = ckptool.inspect(place(server, gigabyte)).to_dict()
    asked = server.asked()
    assert gigabyte.stat().st_size > 1_000_000_000
    assert len(asked) <= 4
    assert sum(line.sent_bytes for line in asked) <= 300_000
    assert {(line.status, line.method) for line in asked} == {(206, "GET")}
    here = ckptool.inspect(str(gigabyte)).to_dict()
    assert here["tables"] == found["tables"]


@pytest.mark.parametrize("inside", ["", WITHOUT], ids=["ranges", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_file(name, inside, serve, tmp_path, capsys, monkeypatch):
    """A small file is read whole where there are no ranges."""
    server = serve(inside)
    url = server.url(name)
    monkeypatch.chdir(FIXTURES)
    for verb in (ckptool.inspect, ckptool.verify):
        there = json.dumps(verb(url).to_dict()).replace(url, name)
        assert json.loads(there) == json.loads(json.dumps(verb(name).to_dict()))
    assert cli(capsys, "diff", url, name)[0] == 0
    other = next(one for one in NAMES if one != name)
    assert cli(capsys, "diff", url, other)[0] == cli(capsys, "diff", name, other)[0] == 1
    results = []
    for file, out in ((url, "there"), (name, "here")):
        results.append(cli(capsys, "convert", file, "--to-cpu", "-o", tmp_path / out)[0])
    assert results[0] == results[1]
    if not results[0]:
        assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert {line.status for line in server.asked()} == {200 if inside else 206}


@pytest.mark.parametrize("verb", ["verify", "convert", "load"])
def test_a_file_is_fetched_once(verb, serve, net, tmp_path):
    server, size = serve(), net.stat().st_size
    url = place(server, net)
    if verb == "verify":
        assert ckptool.verify(url).exit_status == 0
    elif verb == "convert":
        ckptool.convert(url, tmp_path / "o.pth", strip_module=True)
    else:
        assert torch.equal(ckptool.load(url)["module.7.w"], torch.load(net)["module.7.w"])
    asked = server.asked()
    assert size <= sum(line.sent_bytes for line in asked) <= 1.05 * size
    assert len([line for line in asked if line.sent_bytes > 10_000]) <= 30


# -- what goes wrong ---------------------------------------------------------------------------
def test_a_large_file_without_ranges(serve, net, tmp_path, capsys):
    url = place(serve(WITHOUT), net)
    for verb in (
        ["inspect", url],
        ["verify", url],
        ["convert", url, "--to-cpu", "-o", tmp_path / "o"],
    ):
        error = refused(capsys, *verb)
        assert error["slug"] == "remote-no-ranges"
        assert "download it first" in error["hint"]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("inside", "slug", "text"), [
    ("location / { deny all; error_page 403 /page.html; } location = /page.html { allow all; }",
     "remote-denied", "403"),
    ("location / { return 401; }", "remote-denied", "401"),
    ("", "special-file", "no such file there"),
    ("location / { return 503; }", "remote-error", "503"),
    ("location / { return 429; }", "remote-error", "429"),
], ids=["403", "401", "404", "503", "429"])  # fmt: skip
def test_a_page_with_a_bad_status(inside, slug, text, serve, tmp_path, capsys):
    server = serve(inside)
    (server.files / "page.html").write_text("<html>\x1b[31msecret page</html>")
    for verb in (["inspect"], ["verify"], ["convert", "--to-cpu", "-o", tmp_path / "o"]):
        error = refused(capsys, verb[0], server.url("none.pth"), *verb[1:])
        assert error["slug"] == slug
        assert text in error["text"]
        assert "secret" not in json.dumps(error)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("who", ["password", "token"])
def test_a_redirect_to_another_host_carries_no_credentials(who, serve, monkeypatch):
    store = serve("", "store")
    front = serve(f"location / {{ return 302 http://localhost:{store.port}/{NET.name}; }}", "front")
    if who == "password":
        url = front.url(NET.name).replace("//", "//user:pass@")
    else:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{front.port}")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        url = f"hf://org/name/{NET.name}"
    assert ckptool.inspect(url).to_dict()["format"] == "torch-zip"
    word = {"password": "Basic ", "token": "Bearer hf_secret"}[who]
    assert all(line.authorization.startswith(word) for line in front.asked())
    assert store.asked()
    assert {line.authorization for line in store.asked()} == {"-"}


def test_a_redirect_to_the_same_host_keeps_them(serve):
    server = serve(f"location /old/ {{ return 301 /{NET.name}; }}")
    ckptool.verify(server.url("old/a.pth").replace("//", "//user:pass@"))
    first = [line.path for line in server.asked()][:2]
    assert first == ["/old/a.pth", f"/{NET.name}"]
    assert all(line.authorization.startswith("Basic ") for line in server.asked())


def test_a_redirect_in_a_circle(serve, capsys):
    server = serve("location / { return 302 /again.pth; }")
    error = refused(capsys, "inspect", server.url("a.pth"))
    assert error["slug"] == "remote-error"


@pytest.mark.parametrize("inside", ["", WITHOUT], ids=["ranges", "none"])
def test_packed_answers_do_not_change_lengths(inside, serve, tmp_path):
    """We do not ask for gzip; a server that may pack must not."""
    server = serve(f"gzip on; gzip_types *; gzip_proxied any; gzip_min_length 1; {inside}")
    torch.save({"w": torch.zeros(100_000)}, server.files / "zeros.pth")
    url = server.url("zeros.pth")
    assert ckptool.verify(url).exit_status == 0
    assert torch.equal(ckptool.load(url)["w"], torch.zeros(100_000))


def test_a_file_that_is_only_there_packed(serve, capsys):
    """Sent with `Content-Encoding: gzip` though we did not ask for it: what came is refused as
    what it is, not unpacked and read at offsets of something else.
    """
    server = serve("gzip_static always;")
    packed = gzip.compress(NET.read_bytes())
    (server.files / f"{NET.name}.gz").write_bytes(packed)
    error = refused(capsys, "inspect", server.url(NET.name))
    assert error["slug"] == "not-a-checkpoint"
    assert "gzip" in error["text"] + error["hint"]


def test_a_file_that_is_replaced_between_two_requests(serve, net, tmp_path, monkeypatch):
    from ckptool.remote_stores import Store

    server = serve()
    url = place(server, net)
    other = tmp_path / "other.pth"
    torch.save({f"module.{i}.w": torch.randn(300_000) for i in range(40)}, other)
    get, count = Store.get, []

    def replaced(self, start, end):
        count.append(start)
        if len(count) == 6:
            os.replace(other, server.files / net.name)
        return get(self, start, end)

    monkeypatch.setattr(Store, "get", replaced)
    with pytest.raises(CkptError) as caught:
        ckptool.convert(url, tmp_path / "o.pth", strip_module=True)
    assert caught.value.slug == "input-changed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server"]


def test_a_slow_server(serve, tmp_path):
    """1 MB a second and connection: slow is no error."""
    server = serve("limit_rate 1m;")
    torch.save({"w": torch.arange(600_000)}, server.files / "slow.pth")
    assert torch.equal(ckptool.load(server.url("slow.pth"))["w"], torch.arange(600_000))


def test_a_server_that_goes_away(serve, net, tmp_path):
    with nginx(tmp_path / "brief") as server:
        url = place(server, net)
        ckptool.inspect(url)
    with pytest.raises(CkptError) as caught:
        ckptool.inspect(url)
    assert caught.value.slug == "remote-unreachable"


def test_shards_by_their_index(serve, net, tmp_path, capsys):
    server = serve()
    args = ("--max-shard-size", "20MB", "-o", server.files / "m")
    assert cli(capsys, "convert", net, *args)[0] == 0
    index = next(path.name for path in (server.files / "m").iterdir() if path.suffix == ".json")
    url = server.url(f"m/{index}")
    assert ckptool.diff(url, str(net)).same
    assert ckptool.verify(url).exit_status == 0
    assert cli(capsys, "convert", url, "-o", tmp_path / "one.pth")[0] == 0
    assert ckptool.diff(tmp_path / "one.pth", str(net)).same
