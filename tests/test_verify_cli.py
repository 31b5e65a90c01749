"""The verify command: verdicts, exit status, several files, quiet, JSON, colour, notebooks."""

from __future__ import annotations

import json

import pytest
import torch
from formats_support import archive, call, dictionary, pickled, saved, tensor
from verbs_support import FIXTURES, cli, run
from verify_support import FILES, ZIP, entries, flipped

import ckptool
from ckptool.render.text import human_bytes
from ckptool.render.verify import verify_html, verify_text

PLAIN = FIXTURES / "net_plain.pth"
EVIL = FIXTURES / "evil.pth"


@pytest.fixture
def made(tmp_path):
    """Files by kind of trouble."""
    at = entries(ZIP)["data/0"].data_offset
    rows = {
        "whole": ZIP,
        "flip": flipped(ZIP, at),
        "cut": ZIP[: entries(ZIP)["data/1"].data_offset + 8],
        "nan": saved({"w": torch.tensor([float("nan"), float("inf"), 1.0])}),
        "code": archive(pickled(dictionary(("w", tensor()), ("x", call("os.system", "true"))))),
        "page": b"<html>no</html>",
    }
    paths = {}
    for name, data in rows.items():
        paths[name] = tmp_path / f"{name}.pth"
        paths[name].write_bytes(data)
    return paths


STATUS = {"whole": 0, "flip": 1, "cut": 2, "nan": 0, "code": 1, "page": 2}


@pytest.mark.parametrize("kind", STATUS)
def test_the_exit_status_of_each_kind(made, capsys, kind):
    status, out, err = cli(capsys, "verify", made[kind])
    assert status == STATUS[kind]
    assert (out == "") == (kind == "page")
    assert (err == "") == (kind != "page")
    assert cli(capsys, "verify", "--finite", made[kind])[0] == (1 if kind == "nan" else status)


def test_the_screens(made, capsys):
    screens = {kind: cli(capsys, "verify", "--finite", made[kind])[1] for kind in STATUS}
    assert "whole.pth: whole   PyTorch zip, 6.0 kB, 15 tensors\n" in screens["whole"]
    size = human_bytes(sum(entry.size for entry in entries(ZIP).values()))
    assert f"all of 21 records ({size}) have theirs" in screens["whole"]
    assert "torch.load(weights_only=True) accepts it" in screens["whole"]
    assert "finite in 14 floating tensors" in screens["whole"]
    assert "flip.pth: damaged" in screens["flip"]
    assert "  0.weight: its bytes do not have their recorded checksum (data/0)\n" in screens["flip"]
    assert "  14 of 15 tensors are whole\n" in screens["flip"]
    assert "20 of 21 records" in screens["flip"]
    assert f"ckptool convert {made['flip']} --salvage -o " in screens["flip"]
    assert "no zip directory" in screens["cut"]
    assert "cut (data/1)" in screens["cut"]
    assert "  1 of 15 tensors are whole\n" in screens["cut"]
    assert "nan.pth: whole, but not all of its numbers are finite" in screens["nan"]
    assert "  w  1 NaN and 1 infinite of 3\n" in screens["nan"]
    assert "whole, but torch.load(weights_only=False) would run code" in screens["code"]
    assert "os.system  called with 'true', byte " in screens["code"]
    assert "while building 'x'  could run code" in screens["code"]
    assert "-o " in screens["code"]
    assert ".safetensors" in screens["code"]


def test_the_command_that_mends_works(made, capsys, monkeypatch):
    for kind in ("flip", "cut", "code"):
        out = cli(capsys, "verify", made[kind])[1]
        command = next(line for line in out.splitlines() if line.strip().startswith("ckptool "))
        status, _, _ = cli(capsys, *command.split()[1:])
        assert status == {"flip": 1, "cut": 1, "code": 0}[kind]
        target = command.split()[-1]
        assert cli(capsys, "verify", target)[0] == 0


def test_several_files(made, capsys):
    status, out, err = cli(capsys, "verify", made["whole"], made["flip"], made["page"])
    assert status == 2
    assert out.index("whole.pth: whole") < out.index("flip.pth: damaged")
    assert "page.pth: not a checkpoint: an HTML page" in err
    assert "1 of 3 files are whole" in err


def test_quiet_says_only_what_is_wrong(made, capsys):
    assert cli(capsys, "verify", "-q", made["whole"], PLAIN) == (0, "", "")
    status, out, err = cli(capsys, "verify", "-q", made["whole"], made["flip"])
    assert (status, err) == (1, "")
    assert [line.partition(" ")[0] for line in out.splitlines()][:1] == [f"{made['flip']}:"]
    assert "mend" not in out
    assert len(out.splitlines()) == 3


def test_json(made, capsys):
    status, out, _ = cli(capsys, "verify", made["flip"], "--json")
    report = json.loads(out)
    assert status == report["exit_status"] == 1
    wanted = {"schema": 1, "file": str(made["flip"]), "whole": False, "safe": True, "format": "torch-zip",
              "tensor_count": 15, "whole_count": 14}  # fmt: skip
    assert {key: report[key] for key in wanted} == wanted
    (finding,) = report["findings"]
    assert finding["slug"] == "crc-mismatch"
    assert (finding["key"], finding["member"]) == ("0.weight", "data/0")
    assert finding["offset"] == entries(ZIP)["data/0"].data_offset
    assert report["lost"] == [{"key": "0.weight", "text": finding["text"]}]
    assert report["torch_load"]["weights_only"] is True
    several = json.loads(cli(capsys, "verify", made["whole"], made["page"], "--json")[1])
    assert [row.get("whole") for row in several] == [True, None]
    assert several[1]["error"]["slug"] == "not-a-checkpoint"


@pytest.mark.parametrize("kind", FILES)
def test_what_is_known_of_a_damaged_file_is_the_object_not_an_error(tmp_path, capsys, kind):
    path = tmp_path / "net.pth"
    for size in (len(FILES[kind]) - 3, len(FILES[kind]) // 2, 60):
        path.write_bytes(FILES[kind][:size])
        status, out, err = cli(capsys, "verify", path, "--json")
        report = json.loads(out)
        assert (status, err) == (2, "")
        assert (report["whole"], report["exit_status"]) == (False, 2)
        assert report["findings"]


def test_hostile_names_reach_no_terminal(tmp_path):
    key = "a\x1b[31m\u202eb\nc"
    path = tmp_path / "net.pth"
    data = saved({key: torch.ones(4), "n": torch.tensor([float("nan")])})
    path.write_bytes(flipped(data, entries(data)["data/0"].data_offset))
    done = run("verify", "--finite", path)
    assert done.returncode == 1
    assert b"\x1b" not in done.stdout
    assert "\u202e".encode() not in done.stdout
    assert rb"a\x1b[31m\u202eb\x0ac" in done.stdout
    found = ckptool.verify(path)
    assert "\x1b" not in str(found) + found._repr_html_()
    code = archive(pickled(dictionary(("w", tensor()), ("<b>", call("a\x1b.b", "<i>")))))
    path.write_bytes(code)
    found = ckptool.verify(path)
    assert "<i>" not in found._repr_html_()
    assert "\x1b" not in str(found)


def test_colour_is_the_verdict_alone(made, capsys):
    out = cli(capsys, "verify", made["flip"], "--color", "always")[1]
    assert "flip.pth: \x1b[31mdamaged\x1b[0m" in out
    assert out.count("\x1b[31m") == 1
    out = cli(capsys, "verify", made["whole"], "--color", "always")[1]
    assert "whole.pth: \x1b[32mwhole\x1b[0m" in out
    assert "\x1b" not in cli(capsys, "verify", made["flip"], "--color", "never")[1]


def test_from_python(made):
    found = ckptool.verify(made["flip"])
    assert isinstance(found, ckptool.Verification)
    assert not found
    assert ckptool.verify(made["whole"])
    assert str(found) == verify_text(found.to_dict())
    assert found._repr_html_() == verify_html(found.to_dict())
    assert "<td>0.weight</td>" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    with pytest.raises(AttributeError):
        found.safe = False


def test_long_lists_are_cut_and_counted(tmp_path):
    state = {f"k{i:03}": torch.full((2,), float("nan")) for i in range(90)}
    data = saved(state)
    found = ckptool.verify(_written(tmp_path, data), finite=True)
    text = str(found)
    assert text.count(" NaN of 2") == 20
    assert "and 70 more tensors" in text
    rows = [(f"x{i}", call(f"mod{i}.sub", 1)) for i in range(60)]
    found = ckptool.verify(_written(tmp_path, archive(pickled(dictionary(("w", tensor()), *rows)))))
    assert str(found).count("could run code") == 20
    assert "and 40 more" in str(found)
    assert len(found.findings) == 60


def _written(folder, data):
    path = folder / "net.pth"
    path.write_bytes(data)
    return path


def test_misuse(capsys):
    assert cli(capsys, "verify")[0] == 2
    assert cli(capsys, "verify", "--what", PLAIN)[0] == 2
    assert cli(capsys, "verify", "no-such-file.pth")[0] == 2
    assert cli(capsys, "verify", EVIL, PLAIN)[0] == 1
    status, out, _ = cli(capsys, "verify", "--help")
    assert status == 0
    assert "--finite" in out
