"""Statistics and hashes as results, on screens and as data."""

from __future__ import annotations

import csv
import io
import json
import math
import sys

import pytest
import torch
from fixtures.make_fixtures import Net, save
from stats_support import digest
from verbs_support import FIXTURES, cli

import ckptool
from ckptool.errors import UsageError


def saved(path, sd):
    torch.save(sd, path)
    return path


@pytest.fixture
def path(tmp_path):
    sd = {
        "w": torch.tensor([[1.0, -2.0], [0.5, 0.00012345]]),
        "n": torch.tensor(1234567),
        "z": torch.tensor([1 - 2j, 3 - 4j]),
        "s": torch.eye(2).to_sparse(),
    }
    return saved(tmp_path / "a.pth", sd)


def lines(out):
    """The cells of a table, by the key in the first column."""
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")]
    return {row[0]: row for row in rows if row}


# -- the result --------------------------------------------------------------------------------
def test_the_result_is_a_mapping_of_typed_rows(tmp_path):
    sd = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.zeros(2), "z": torch.ones(1)}
    path = saved(tmp_path / "a.pth", sd)
    found = ckptool.stats(path, drop="z")
    assert isinstance(found, ckptool.Stats)
    assert all(isinstance(row, ckptool.TensorStats) for row in found.rows)
    assert list(found) == ["fc.weight", "fc.bias"]
    assert "fc.bias" in found
    assert "z" not in found
    row = found["fc.weight"]
    assert (row.key, row.shape, row.dtype) == ("fc.weight", (2, 3), "float32")
    assert (row.min, row.max, row.mean, row.zero_count) == (0, 5, 2.5, 1)
    assert found.file == str(path)
    with pytest.raises(UsageError):
        ckptool.stats(path, at="nowhere")


def test_only_what_is_shown_is_read(tmp_path):
    sd = {f"w{i}": torch.full((4,), float(i)) for i in range(9)}
    path = saved(tmp_path / "a.pth", {"ema": sd, "state_dict": {"w": torch.ones(2)}})
    seen = []
    found = ckptool.stats(
        path, at="ema", sort="name", limit=2, progress=lambda done, total: seen.append(total)
    )
    assert [(row.key, row.mean) for row in found.rows] == [("w0", 0), ("w1", 1)]
    assert seen == [32]


def test_inspect_takes_the_same_words(tmp_path):
    sd = {"w": torch.tensor([1.0, 2.0]), "z": torch.tensor([1 + 1j])}
    path = saved(tmp_path / "a.pth", {"state_dict": sd, "other": {"w": torch.ones(3)}})
    rows = ckptool.inspect(path, stats=True, hash=True).to_dict()["tables"][0]["tensors"]
    w, z = rows
    assert w["stats"] == {
        "element_count": 2, "zero_count": 0, "nan_count": 0, "inf_count": 0, "min": 1.0,
        "max": 2.0, "mean": 1.5, "std": pytest.approx(0.5**0.5), "norm": pytest.approx(5**0.5),
    }  # fmt: skip
    assert w["sha256"] == digest(sd["w"])
    assert (z["stats"]["mean"], z["stats"]["std"]) == ([1.0, 1.0], None)
    with ckptool.open(path) as f:
        (row, _) = f.inspect(hash=True).to_dict()["tables"][0]["tensors"]
        assert (row["sha256"], "stats" in row) == (w["sha256"], False)
    bare = ckptool.inspect(path).to_dict()["tables"]
    assert not any({"stats", "sha256"} & row.keys() for table in bare for row in table["tensors"])


# -- screens -----------------------------------------------------------------------------------
def test_the_table_has_figures_in_place_of_sizes(path, capsys):
    status, out, err = cli(capsys, "inspect", path, "--stats")
    assert (status, err) == (0, "")
    found = lines(out)
    assert " ".join(found["key"]) == "key shape dtype kind min max mean std norm"
    assert " ".join(found["w"]) == "w [2, 2] float32 tensor -2 1 -0.125 1.315 2.291"
    assert " ".join(found["n"]) == "n [] int64 tensor 1,234,567 1,234,567 1.235e+06 - 1.235e+06"
    assert found["z"][4:] == ["-", "-", "2-3j", "2", "5.477"]
    assert found["s"][5:] == ["-"] * 5
    assert "  1 tensor not measured: 's' (a sparse tensor, which is made of several)" in out


def test_zeros_and_nan_have_columns_where_there_are_any(tmp_path, capsys):
    path = saved(tmp_path / "b.pth", {"a": torch.tensor([0.0, math.inf, 1, 0]), "b": torch.ones(2)})
    _, out, _ = cli(capsys, "inspect", path, "--stats")
    assert lines(out)["key"][-3:] == ["norm", "zeros", "inf"]
    assert lines(out)["a"][-3:] == ["1", "2", "1"]
    assert lines(out)["b"][-2:] == ["0", "0"]
    _, out, _ = cli(capsys, "inspect", path, "--stats", "--only", "b", "-q")
    assert lines(out)["key"][-1] == "norm"
    assert "Notes" not in out


def test_a_hash_alone_leaves_the_table_as_it_is(path, capsys):
    _, out, _ = cli(capsys, "inspect", path, "--hash", "--only", "w")
    assert lines(out)["key"] == ["key", "shape", "dtype", "size", "device", "sha256"]
    assert lines(out)["w"][-1] == digest(torch.load(path)["w"])
    _, out, _ = cli(capsys, "inspect", path, "--hash", "--stats", "--only", "w")
    assert lines(out)["key"][-2:] == ["norm", "sha256"]


def test_json(path, capsys):
    status, out, _ = cli(capsys, "inspect", path, "--stats", "--hash", "--json")
    rows = {row["key"]: row for row in json.loads(out)["tables"][0]["tensors"]}
    sd = torch.load(path)
    assert status == 0
    assert rows["w"]["stats"]["min"] == -2
    assert rows["n"]["stats"]["max"] == 1234567
    assert rows["n"]["stats"]["std"] is None
    assert rows["z"]["stats"]["mean"] == [2.0, -3.0]
    assert {key: rows[key]["sha256"] for key in "wnz"} == {key: digest(sd[key]) for key in "wnz"}
    assert (rows["s"]["stats"], rows["s"]["sha256"]) == (None, None)
    assert "sparse" in rows["s"]["not_measured"]
    _, out, _ = cli(capsys, "inspect", path, path, "--hash", "--format", "jsonl")
    assert [json.loads(line)["tables"][0]["tensors"] for line in out.splitlines()] == [
        [{k: v for k, v in row.items() if k != "stats"} for row in rows.values()]
    ] * 2


def test_csv_and_plain(path, capsys):
    _, out, err = cli(capsys, "inspect", path, "--stats", "--hash", "--format", "csv")
    rows = {row["key"]: row for row in csv.DictReader(io.StringIO(out))}
    assert list(rows["w"])[10:] == [
        "min", "max", "mean", "std", "norm", "zero_count", "nan_count", "inf_count", "sha256",
    ]  # fmt: skip
    assert float(rows["w"]["mean"]) == pytest.approx(-0.12496913)
    assert complex(rows["z"]["mean"]) == 2 - 3j
    assert (rows["n"]["min"], rows["n"]["std"], rows["s"]["sha256"]) == ("1234567", "", "")
    assert "not measured" in err
    _, out, _ = cli(
        capsys, "inspect", path, "--stats", "--format", "plain", "--only", "n", "--only", "s"
    )
    n, s = (line.split("\t") for line in out.splitlines())
    assert n == [
        "n",
        "[]",
        "int64",
        "cpu",
        "8",
        "1234567",
        "1234567",
        "1234567.0",
        "?",
        "1234567.0",
        "0",
        "0",
        "0",
    ]
    assert s[5:] == ["?"] * 8
    _, out, _ = cli(capsys, "inspect", path, "--hash", "--format", "plain", "--only", "w")
    assert out.split("\t")[5].strip() == digest(torch.load(path)["w"])


def test_markdown_and_html(path, capsys):
    _, out, _ = cli(capsys, "inspect", path, "--stats", "--only", "w", "--format", "markdown")
    assert "| key | shape | dtype | min | max | mean | std | norm |" in out
    assert "| --- | --- | --- | --: | --: | --: | --: | --: |" in out
    assert "| w | \\[2, 2] | float32 | -2 | 1 | -0.125 | 1.315 | 2.291 |" in out
    html = ckptool.stats(path, only="w")._repr_html_()
    assert "<th>norm</th>" in html
    assert "<td>2.291</td>" in html


def test_text_of_a_result_is_what_the_command_prints(path, capsys):
    _, out, _ = cli(capsys, "inspect", path, "--stats", "--hash")
    assert str(ckptool.stats(path, hash=True)) == out.rstrip("\n")
    assert str(ckptool.inspect(path, stats=True, hash=True)) == out.rstrip("\n")


def test_a_model_and_figures_together(tmp_path, capsys):
    net = tmp_path / "net.py"
    net.write_text("import torch\ndef Small(): return torch.nn.Linear(2, 2)\n")
    path = saved(tmp_path / "a.pth", {"weight": torch.eye(2), "bias": torch.ones(3)})
    status, out, _ = cli(capsys, "inspect", path, "--stats", "--model", f"{net}:Small")
    assert status == 1
    assert lines(out)["weight"][-6:] == ["0", "1", "0.5", "0.5774", "1.414", "2"]
    assert "mismatched" in out
    assert out.count("Notes") <= 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--stats", "--keys"), "--keys does not show what --stats reads"),
        (("--hash", "--format", "tree"), "--format tree does not show what --hash reads"),
    ],
)
def test_what_would_be_read_in_vain_is_refused(args, said, path, capsys):
    status, out, err = cli(capsys, "inspect", path, *args)
    assert (status, out) == (2, "")
    assert said in err


def test_a_terminal_cuts_the_rows_and_reads_no_others(tmp_path, capsys, monkeypatch):
    sd = {f"w{i}": torch.full((1,), float(i)) for i in range(201)}
    path = saved(tmp_path / "a.pth", sd)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    read = []
    measure = ckptool.verbs.stats.measure
    monkeypatch.setattr(
        "ckptool.verbs.stats.measure",
        lambda found, tensors, *rest: read.append(len(tensors)) or measure(found, tensors, *rest),
    )
    _, out, _ = cli(capsys, "inspect", path, "--stats", "--color", "never")
    assert read == [100]
    assert "w99 " in out
    assert "101 more of 201 tensors" in out


def test_progress_is_drawn_where_somebody_waits(path, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("ckptool.cli.progress.Bar.show", lambda bar, *row: shown.append(row))
    cli(capsys, "inspect", path, "--hash", "--only", "w")
    assert shown == [(16, 16)]
    cli(capsys, "inspect", path, "--hash", "--only", "w", "-q")
    assert shown == [(16, 16)]


def test_names_from_a_file_are_shown_safely(tmp_path, capsys):
    path = saved(tmp_path / "a.pth", {"a\x1b[2Jb": torch.tensor([math.nan])})
    for style in ("table", "csv", "markdown", "plain", "json"):
        _, out, err = cli(capsys, "inspect", path, "--stats", "--hash", "--format", style)
        assert "\x1b" not in out + err
        assert "2Jb" in out
        assert "1 NaN" in (out if style in ("table", "markdown", "json") else out + err)


def test_one_file_of_several_is_broken(capsys, tmp_path):
    net = Net()
    save(net.state_dict(), tmp_path / "a.pth", "cuda:0")
    status, out, err = cli(
        capsys, "inspect", tmp_path / "a.pth", FIXTURES / "truncated.pth", "--stats"
    )
    assert status == 2
    assert "truncated.pth" in err
    assert lines(out)["fc.bias"][0] == "fc.bias"
