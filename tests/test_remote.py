"""URLs to read: what they cost, what comes back, every way a server can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from remote_support import serving
from verbs_support import FIXTURES, ROOT, cli, run

import ckptool
from ckptool.errors import CkptError
from ckptool.places import reopen
from ckptool.remote_urls import locate
from ckptool.spans import Address
from ckptool.urls import mask_within, masked
from ckptool.verbs import opening

pytest.importorskip("obstore")
NET = FIXTURES / "dp_cuda.pth"


@pytest.fixture
def site():
    with serving(files={path.name: path for path in FIXTURES.iterdir() if path.is_file()}) as made:
        yield made


def refused(url):
    with pytest.raises(CkptError) as caught:
        ckptool.inspect(url)
    return caught.value


# -- the price ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory):
    """1 GB of 300 tensors with checksums, most of it a hole."""
    path = tmp_path_factory.mktemp("gigabyte") / "net.pth"
    torch.serialization.set_crc32_options(False)
    try:
        with torch.serialization.skip_data():
            torch.save({f"layers.{i}.weight": torch.empty(840_000) for i in range(300)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    return path


def test_inspect_of_a_gigabyte_takes_few_requests_and_bytes(site, gigabyte):
    site.files["net.pth"] = gigabyte
    found = ckptool.inspect(site.url("net.pth")).to_dict()

    assert gigabyte.stat().st_size > 1_000_000_000
    assert len(site.asked) <= 4
    assert site.sent_bytes <= 300_000
    local = ckptool.inspect(str(gigabyte)).to_dict()
    assert found.pop("file") == site.url("net.pth")
    local.pop("file")
    assert found == local


def test_diff_by_checksum_reads_no_storage(site, tmp_path):
    state = {f"layers.{i}.weight": torch.randn(20_000) for i in range(100)}
    torch.save(state, tmp_path / "a.pth")
    state["layers.7.weight"][3] += 1
    torch.save(state, tmp_path / "b.pth")
    site.files |= {name: tmp_path / name for name in ("a.pth", "b.pth")}
    found = ckptool.diff(site.url("a.pth"), site.url("b.pth"))

    assert len(site.asked) <= 8
    assert site.sent_bytes <= 2 * 300_000
    assert not found.same
    here = ckptool.diff(str(tmp_path / "a.pth"), str(tmp_path / "b.pth")).to_dict()
    assert found.to_dict()["changed"] == here["changed"] != []


def test_a_safetensors_header_takes_one_request(site):
    ckptool.inspect(site.url("model.safetensors"))
    assert len(site.asked) == 1


def test_reading_on_and_on_takes_few_requests_and_bounded_memory(site, tmp_path):
    (tmp_path / "big").write_bytes(bytes(40 << 20))
    site.files["big"] = tmp_path / "big"
    with reopen(Address(site.url("big"), 40 << 20, ('"one"',))) as source:
        block = memoryview(bytearray(1 << 20))
        for offset in range(0, source.size, len(block)):
            source.read_into(offset, block)
        assert len(site.asked) < 20
        assert source._kept.size <= (32 << 20) + (8 << 20)
    assert site.sent_bytes <= 45 << 20


# -- the same as a file ------------------------------------------------------------------------
NAMES = ["dp_cuda.pth", "legacy_cuda1.pth", "model.safetensors", "deflated.pth", "tar_01x.pth"]


@pytest.mark.parametrize("name", NAMES)
def test_inspect_and_verify_say_what_they_say_of_the_file(site, name, monkeypatch):
    monkeypatch.chdir(FIXTURES)
    for verb in (ckptool.inspect, ckptool.verify):
        there, here = verb(site.url(name)).to_dict(), verb(name).to_dict()
        text = json.dumps(there).replace(site.url(name), name)
        assert json.loads(text) == json.loads(json.dumps(here))


@pytest.mark.parametrize("name", NAMES[:4])
def test_convert_writes_the_same_bytes(site, name, tmp_path, capsys):
    status, _, err = cli(capsys, "convert", site.url(name), "--to-cpu", "-o", tmp_path / "there")
    assert status == 0, err
    cli(capsys, "convert", FIXTURES / name, "--to-cpu", "-o", tmp_path / "here")
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()


def test_load_and_open_give_the_tensors(site):
    there, here = ckptool.load(site.url("dp_cuda.pth")), ckptool.load(str(NET))
    assert all(
        torch.equal(there["state_dict"][key], here["state_dict"][key]) for key in here["state_dict"]
    )
    with (
        ckptool.open(site.url("model.safetensors")) as one,
        ckptool.open(FIXTURES / "model.safetensors") as two,
    ):
        assert list(one.weights) == list(two.weights)
        key = next(iter(one.weights))
        assert (one.weights[key].numpy() == two.weights[key].numpy()).all()


def test_shards_by_their_index(site, tmp_path, capsys):
    torch.save({"a.weight": torch.ones(500), "b.weight": torch.zeros(700)}, tmp_path / "net.pth")
    cli(capsys, "convert", tmp_path / "net.pth", "--max-shard-size", "2KB", "-o", tmp_path / "out")
    site.files |= {f"m/{path.name}": path for path in (tmp_path / "out").iterdir()}
    index = next(name for name in site.files if name.endswith(".index.json"))
    found = ckptool.inspect(site.url(index)).to_dict()
    assert [t["key"] for t in found["tables"][0]["tensors"]] == ["a.weight", "b.weight"]
    assert ckptool.verify(site.url(index)).exit_status == 0


# -- what can go wrong -------------------------------------------------------------------------
def test_a_server_without_ranges(site, tmp_path):
    site.ranges = False
    assert ckptool.inspect(site.url(NET.name)).to_dict()["format"] == "torch-zip"  # a small file
    (tmp_path / "big").write_bytes(bytes(17 << 20))
    site.files["big"] = tmp_path / "big"
    assert refused(site.url("big")).slug == "remote-no-ranges"


@pytest.mark.parametrize(("status", "slug", "word"), [
    (403, "remote-denied", "403"), (401, "remote-denied", "401"), (404, "special-file", "no such file"),
    (500, "remote-error", "500"),
])  # fmt: skip
def test_a_page_with_a_bad_status(site, status, slug, word):
    site.status, site.page = status, b"<html>secret page</html>"
    error = refused(site.url("x.pth?X-Amz-Signature=s3cr3t"))
    assert error.slug == slug
    assert word in error.text
    assert "s3cr3t" not in f"{error}{error.hint}"
    assert error.hint
    asked = [row for row in site.asked if row[1] != "bytes=0-0"]  # but where it leads
    assert len(asked) == (4 if status == 500 else 1)  # three more tries, and no more


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_page_instead_of_a_file(site, ranges):
    site.ranges = ranges
    site.files["page.pth"] = b"<!DOCTYPE html><html><body>Log in</body></html>"
    error = refused(site.url("page.pth"))
    assert error.slug == "not-a-checkpoint"
    assert "HTML" in error.text or "web page" in error.text


def test_a_short_answer(site):
    site.short = True
    assert refused(site.url(NET.name)).slug == "truncated"


def test_an_empty_object(site):
    site.files["empty.pth"] = b""
    assert refused(site.url("empty.pth")).slug in ("not-a-checkpoint", "truncated")


def test_an_object_that_changes_while_it_is_read(site, tmp_path):
    torch.save({"w": torch.randn(300_000)}, tmp_path / "a.pth")
    site.files["a.pth"] = tmp_path / "a.pth"
    site.change_after = 2
    with pytest.raises(CkptError) as caught:
        ckptool.convert(site.url("a.pth"), tmp_path / "out.pth", to_cpu=True)
    assert caught.value.slug == "input-changed"
    assert not (tmp_path / "out.pth").exists()


def test_reopen_refuses_another_tag(site):
    with reopen(Address(site.url(NET.name), NET.stat().st_size, ('"one"',))) as source:
        assert source.unchanged()
        site.tag = '"two"'
        source._heard -= 10
        assert not source.unchanged()
    with pytest.raises(CkptError) as caught:
        reopen(Address(site.url(NET.name), NET.stat().st_size, ('"one"',)))
    assert caught.value.slug == "input-changed"


def test_without_a_tag_the_date_tells(site):
    site.tag = None
    with opening.open_source(site.url(NET.name)) as source:
        assert source.address.identity == ("2015-10-21T07:28:00+00:00",)


@pytest.mark.parametrize(("url", "slug"), [
    ("http://127.0.0.1:1/a.pth", "remote-unreachable"),
    ("http://no-such-host.invalid/a.pth", "remote-unreachable"),
    ("http:///a.pth", "usage"), ("s3:///a.pth", "usage"), ("hf://onlyone", "usage"),
    ("nosuchscheme://host/a.pth", "remote-missing"),
])  # fmt: skip
def test_nobody_there(url, slug):
    assert refused(url).slug == slug


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "HTTP://[",
        "http://a:b/x",
        "http://a:99999/x",
        "https://exa\u2100.com/x",
        "http://@/x",
    ],
)
def test_a_url_that_cannot_be(url):
    with pytest.raises(CkptError) as caught:
        ckptool.inspect(url)
    assert (caught.value.exit_status, caught.value.slug) == (2, "usage")


def test_tls_that_is_none(site):
    assert refused(site.url("a.pth").replace("http:", "https:")).slug == "remote-tls"


def test_obstore_that_is_not_installed(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    error = refused(site.url(NET.name))
    assert (error.slug, error.hint) == ("remote-missing", "pip install 'ckptool[remote]'")


def test_other_schemes_by_fsspec():
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/net.pth", NET.read_bytes())
    assert ckptool.inspect("memory://net.pth").to_dict()["format"] == "torch-zip"
    assert refused("memory://none.pth").slug == "special-file"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/o.pth", "https://x.org/o.pth", "hf://o/n/o.pth"]
)
def test_the_web_is_read_only(url, capsys):
    status, _, err = cli(capsys, "convert", NET, "--to-cpu", "-o", url, "--json")
    assert (status, json.loads(_)["error"]["slug"] if _ else err) == (2, "output-read-only")


def test_beside_a_url_is_the_current_folder(site, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli(capsys, "convert", site.url(NET.name), "--to-cpu")[0] == 0
    assert (tmp_path / "dp_cuda.cpu.pth").exists()


# -- who is told what --------------------------------------------------------------------------
def test_a_token_does_not_follow_a_redirect_to_another_host(site, monkeypatch):
    with serving(redirect=site.url(NET.name, "localhost")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.port}")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        found = ckptool.inspect(f"hf://org/name@v1/sub/{NET.name}").to_dict()

        assert hub.asked[0][0] == f"org/name/resolve/v1/sub/{NET.name}"
        assert hub.asked[0][2]["authorization"] == "Bearer hf_secret"
    assert site.asked
    assert all("authorization" not in headers for _, _, headers in site.asked)
    assert found["file"] == f"hf://org/name@v1/sub/{NET.name}"


def test_a_password_in_the_url_does_not_follow_either(site):
    with serving(redirect=site.url(NET.name, "localhost")) as first:
        ckptool.inspect(first.url(NET.name).replace("//", "//user:pw@"))
        assert first.asked[0][2]["authorization"].startswith("Basic ")
    assert all("authorization" not in headers for _, _, headers in site.asked)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_secret_in_the_query_does_not_follow_either(site, host, tmp_path):
    """obstore's client would tell the next host the whole address, as Referer."""
    target = site.url(NET.name + "?v=1", host)
    with serving(redirect=target) as between, serving(redirect=between.url("b?own=word2")) as first:
        url = first.url("a?token=word1").replace("//", "//user:pw@")
        found = ckptool.inspect(url).to_dict()
        ckptool.convert(url, tmp_path / "o.safetensors")
        assert first.asked[0][2]["authorization"].startswith("Basic ")
    assert found["tensor_count"] == ckptool.inspect(NET).to_dict()["tensor_count"]
    assert site.asked
    for _, _, headers in [*between.asked, *site.asked]:
        assert "authorization" not in headers
        assert "word" not in headers.get("referer", "")


def test_redirects_in_a_circle_end_with_a_query_too(site):
    with serving(redirect="/again?x=1") as first:
        assert refused(first.url("a?x=1")).slug == "remote-error"
        assert len(first.asked) < 40


def test_a_query_costs_one_request_more(site):
    ckptool.inspect(site.url(NET.name))
    plain = len(site.asked)
    ckptool.inspect(site.url(NET.name + "?signature=x"))
    assert len(site.asked) == 2 * plain + 1
    assert site.asked[plain][1] == "bytes=0-0"


@pytest.mark.parametrize(
    ("fault", "slug"),
    [({"change_after": 1}, "input-changed"), ({"fail_after": 1}, "remote-error")],
    ids=["changed", "gone"],
)
def test_verify_calls_no_file_damaged_that_it_could_not_read(fault, slug, tmp_path, capsys):
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "net.pth")
    with serving(files={"net.pth": tmp_path / "net.pth"}, **fault) as site:
        code, out, _ = cli(capsys, "verify", site.url("net.pth"), "--json")
    assert code == 2
    assert json.loads(out)["error"]["slug"] == slug


@pytest.mark.parametrize(("url", "address"), [
    ("hf://org/name/a.pth", "https://huggingface.co/org/name/resolve/main/a.pth"),
    ("hf://datasets/org/name/d/a b.pth", "https://huggingface.co/datasets/org/name/resolve/main/d/a%20b.pth"),
    ("hf://org/name@refs%2Fpr%2F1/a.pth", "https://huggingface.co/org/name/resolve/refs%2Fpr%2F1/a.pth"),
])  # fmt: skip
def test_where_the_hub_keeps_files(url, address, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert locate(url).root == address


def test_the_hub_wants_a_token(site, monkeypatch):
    site.status = 401
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{site.port}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "HF_TOKEN" in refused("hf://org/name/a.pth").hint


@pytest.mark.parametrize(("url", "shown"), [
    ("https://u:p@h/a.pth", "https://***@h/a.pth"),
    ("https://h/a?X-Amz-Date=1&X-Amz-Signature=ab&b=c", "https://h/a?X-Amz-Date=1&X-Amz-Signature=***&b=c"),
    ("https://h/a?sv=1&sig=q%2B&x=1", "https://h/a?sv=***&sig=***&x=1"),
    ("dir/a?sig=b", "dir/a?sig=b"),
])  # fmt: skip
def test_secrets_of_a_url_are_not_shown(url, shown):
    assert masked(url) == shown
    assert masked(shown) == shown


def test_secrets_in_a_text_of_another_program():
    assert (
        mask_within("GET http://u:p@h/a?Signature=abc failed")
        == "GET http://***@h/a?Signature=*** failed"
    )


@pytest.mark.parametrize("verb", [("inspect",), ("verify",), ("convert", "--to-cpu", "-o", "OUT")])
def test_no_secret_on_the_screen_or_in_json(site, verb, tmp_path, capsys):
    url = site.url(f"{NET.name}?X-Amz-Signature=s3cr3t").replace("//", "//user:pw0rd@")
    args = [str(tmp_path / "out.pth") if word == "OUT" else word for word in verb]
    for style in ([], ["--json"]):
        _, out, err = cli(capsys, args[0], url, *args[1:], *style)
        assert "s3cr3t" not in out + err
        assert "pw0rd" not in out + err
        (tmp_path / "out.pth").unlink(missing_ok=True)


# -- a local file ------------------------------------------------------------------------------
def test_a_local_file_needs_no_network_code():
    code = (
        f"import sys, ckptool; ckptool.inspect({str(NET)!r})\n"
        "print([n for n in sys.modules if 'obstore' in n or 'ckptool.remote' in n or 'fsspec' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_the_command_in_a_process_of_its_own_ends(site):
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}  # obstore may lie elsewhere
    done = run("inspect", site.url(NET.name), timeout=20, env=env)
    assert done.returncode == 0, done.stderr


# -- who is let in -----------------------------------------------------------------------------
@pytest.mark.parametrize(("scheme", "said", "text", "hint"), [
    ("s3", "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - "
     "Server returned non-2xx status code: 403 Forbidden: denied", "no credentials", "AWS_ACCESS_KEY_ID"),
    ("gs", "Generic GCS error: Error performing token request: Error performing GET "
     "http://metadata.google.internal/computeMetadata/v1/x - Server returned non-2xx status code: 404 Not Found",
     "no credentials", "GOOGLE_APPLICATION_CREDENTIALS"),
    ("az", "Generic MicrosoftAzure error: Account must be specified\n\nDebug source:\nMissingAccount",
     "no account", "AZURE_STORAGE_ACCOUNT_NAME"),
    ("s3", "Generic S3 error: status code: 500 x\n<html>169.254.169.254</html>", "answers 500", "later"),
])  # fmt: skip
def test_no_login_is_told_as_that(scheme, said, text, hint):
    """Outside of a cloud anything may answer where a machine's login is asked for."""
    from ckptool.remote_errors import explained
    from ckptool.remote_urls import locate

    found = explained(OSError(said), locate(f"{scheme}://bucket/net.pth"))
    assert text in found.text
    assert hint in found.hint
    assert (found.slug == "remote-denied") == ("no " in text)
