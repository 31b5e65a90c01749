"""inspect of several files, and every way to print."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch
from fixtures.make_fixtures import Net, save
from verbs_support import FIXTURES, TRUTHS, cli, run, save_resume

import ckptool

FORMATS = ("table", "tree", "plain", "json", "jsonl", "csv", "markdown")
DP_CUDA = FIXTURES / "dp_cuda.pth"
OPENS = sorted(name for name, truth in TRUTHS.items() if not truth.get("error"))
BROKEN = {name: truth["error"] for name, truth in TRUTHS.items() if truth.get("error")}


def slugs(found):
    return [note.slug for note in found.notes]


def shown(*args, **options):
    return [row.key for row in ckptool.inspect(*args, **options).rows]


# -- several files -----------------------------------------------------------------------------
def test_one_bad_file_does_not_hide_the_others(capsys):
    files = [FIXTURES / name for name in ("net_plain.pth", "html.pth", "legacy.pth")]
    status, out, err = cli(capsys, "inspect", *files)

    assert status == 2
    assert f"{files[0]}: PyTorch zip" in out
    assert f"{files[2]}: PyTorch" in out
    assert err.startswith(f"ckptool: {files[1]}: not a checkpoint")

    status, out, err = cli(capsys, "inspect", *files, "--json")
    found = json.loads(out)
    assert (status, err) == (2, "")
    assert [row["file"] for row in found] == [str(file) for file in files]
    assert found[1]["error"]["slug"] == "not-a-checkpoint"

    status, out, _ = cli(capsys, "inspect", *files, "--format", "jsonl")
    assert (status, [json.loads(line) for line in out.splitlines()]) == (2, found)


def test_the_worst_status_wins(capsys):
    evil, plain = FIXTURES / "evil.pth", FIXTURES / "net_plain.pth"
    assert cli(capsys, "inspect", evil, plain)[0] == 1
    assert cli(capsys, "inspect", FIXTURES / "empty.pth", evil)[0] == 2


# -- every way to print ------------------------------------------------------------------------
PROMISED = {"schema", "file", "format", "size_bytes", "tensor_count", "parameter_count", "weights",
            "tables", "extras", "globals", "wrappers", "notes"}  # fmt: skip
PROMISED_OF_A_TENSOR = {"key", "shape", "dtype", "device", "stride", "offset", "storage",
                        "size_bytes", "requires_grad", "kind"}  # fmt: skip


@pytest.mark.parametrize("name", OPENS)
def test_json_has_the_promised_keys(name, capsys):
    status, out, err = cli(capsys, "inspect", FIXTURES / name, "--json")
    found = json.loads(out, parse_constant=pytest.fail)

    assert (status, err) == (int(name in ("evil.pth", "acme_enum.pth")), "")
    assert found["schema"] == 1
    assert set(found) >= PROMISED
    for table in found["tables"]:
        assert {"path", "tensors"} <= set(table)
        assert all(set(row) >= PROMISED_OF_A_TENSOR for row in table["tensors"])
    for name, fields in (
        ("extras", {"path", "type", "value"}),
        ("globals", {"name", "verdict"}),
        ("wrappers", {"name", "count"}),
        ("notes", {"slug", "text", "command"}),
    ):
        assert all(set(row) >= fields for row in found[name])
    assert {g["verdict"] for g in found["globals"]} <= {"known", "foreign", "code"}


@pytest.mark.parametrize(("name", "slug"), BROKEN.items())
def test_json_of_an_error(name, slug, capsys):
    status, out, err = cli(capsys, "inspect", FIXTURES / name, "--json")
    found = json.loads(out)

    assert (status, err) == (2, "")
    assert set(found) == {"schema", "file", "error"}
    assert set(found["error"]) == {"slug", "text", "where", "hint"}
    assert (found["file"], found["error"]["slug"]) == (str(FIXTURES / name), slug)


@pytest.mark.parametrize("style", FORMATS)
@pytest.mark.parametrize("name", OPENS)
def test_every_format_prints_every_file(name, style, capsys):
    status, out, err = cli(capsys, "inspect", FIXTURES / name, "--format", style)

    assert status in (0, 1)
    assert out
    noted = bool(ckptool.inspect(FIXTURES / name).notes)
    assert bool(err) == (noted and style in ("plain", "csv", "markdown"))


def test_plain_and_csv_are_data_and_their_notes_go_to_stderr(capsys):
    _, plain, err = cli(capsys, "inspect", DP_CUDA, "--format", "plain")
    assert plain.splitlines()[-1] == "module.fc.bias\t[3]\tfloat32\tcuda:0\t12"
    assert len(plain.splitlines()) == 9
    assert err.count("note: ") == 3
    assert "  ckptool convert" in err

    _, text, err = cli(capsys, "inspect", DP_CUDA, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["key"] for row in rows] == shown(DP_CUDA)
    assert rows[0]["stride"] == "[9, 9, 3, 1]"
    assert err.count("note: ") == 3


def test_keys_alone(capsys):
    assert cli(capsys, "inspect", DP_CUDA, "--keys", "--only", "bn") == (
        0, "".join(f"{key}\n" for key in shown(DP_CUDA, only=["bn"])), "",
    )  # fmt: skip
    status, _, err = cli(capsys, "inspect", DP_CUDA, "--keys", "--format", "csv")
    assert status == 2
    assert "--keys contradicts --format" in err


@pytest.mark.parametrize("style", ["table", "plain"])
def test_quiet_leaves_the_notes_out(style, capsys):
    _, out, err = cli(capsys, "inspect", DP_CUDA, "-q", "--format", style)

    assert "module.fc.bias" in out
    assert "ckptool convert" not in out
    assert err == ""


def test_verbose_names_the_globals(capsys):
    _, out, _ = cli(capsys, "inspect", DP_CUDA, "-v")

    assert "  known    argparse.Namespace" in out
    assert "argparse.Namespace" not in cli(capsys, "inspect", FIXTURES / "net_plain.pth", "-v")[1]


def test_verbose_keeps_data_clean(capsys):
    assert json.loads(cli(capsys, "inspect", DP_CUDA, "-v", "--json")[1])
    plain = cli(capsys, "inspect", DP_CUDA, "--format", "plain")[1]
    assert cli(capsys, "inspect", DP_CUDA, "-v", "--format", "plain")[1] == plain


def test_a_file_without_weights_says_so(tmp_path):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    save(optimizer.state_dict(), tmp_path / "optimizer.pth")
    found = ckptool.inspect(tmp_path / "optimizer.pth")

    assert "no-weights" in slugs(found)
    assert found.to_dict()["weights"] is None


def test_a_resume_file_is_told_by_its_parts(tmp_path):
    found = ckptool.inspect(save_resume(tmp_path / "net.pth")).to_dict()

    assert found["weights"] == ["state_dict"]
    assert [row["path"][0] for row in found["extras"]] == [
        "epoch", "best_key", "device", "args", "history", "optimizer", "rng", "scalar", "curve",
    ]  # fmt: skip


def test_stdout_of_a_real_process_is_the_same(capsys):
    _, out, _ = cli(capsys, "inspect", DP_CUDA)
    done = run("inspect", DP_CUDA, env={"PYTHONIOENCODING": "utf-8"})

    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, out, b"")
