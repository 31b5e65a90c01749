"""The command line of convert: the order of rules, contradictions, what is said and what is not."""

from __future__ import annotations

import inspect as python_inspect
import io
import json
import os
import re
import shlex
import sys
from collections import OrderedDict
from importlib import import_module

import pytest
import torch
from fixtures.make_fixtures import save
from parts_support import convert
from verbs_support import (
    FIXTURES,
    LEGACY,
    assert_same,
    cli,
    keys,
    left_alone,
    load,
    save_resume,
)

import ckptool
from ckptool.cli import convert as command_module
from ckptool.cli import main as entry
from ckptool.cli import options as option_table
from ckptool.errors import UsageError

command = command_module.command


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.pth"
    save({"epoch": 3, "model": OrderedDict((k, torch.ones(2)) for k in NAMES)}, path)
    return path


NAMES = ["model.a.w", "model.b.w", "model.fc.w", "fc.w"]


# -- the order of rules ------------------------------------------------------------------------
ORDERS = [
    (["--rename", r"\.a\.", ".b2.", "--drop", "model.a.**"], None),
    (["--drop", "model.a.**", "--rename", r"\.b\.", ".a."], ["model.a.w", "model.fc.w", "fc.w"]),
    (["--rename", r"\.b\.", ".c.", "--drop", "model.c.**"], ["model.a.w", "model.fc.w", "fc.w"]),
    (["--drop", "fc.w", "--strip-prefix", "model"], ["a.w", "b.w", "fc.w"]),
    (["--strip-prefix", "model", "--drop", "fc.w"], "both become 'fc.w'"),
    (["--drop", "fc.w", "--strip-prefix", "model", "--drop", "fc.w"], ["a.w", "b.w"]),
    (["--only", "model.**", "--strip-prefix", "model"], ["a.w", "b.w", "fc.w"]),
    (["--only", "fc", "--only", "a"], ["model.a.w", "model.fc.w", "fc.w"]),
    (["--only", "fc", "--drop", "fc.w", "--only", "a"], ["model.a.w", "model.fc.w"]),
    (["--only", "fc", "--add-prefix", "x", "--only", "x.fc.w"], ["x.fc.w"]),
    (["--add-prefix", "x.", "--rename", "^x", "y", "--add-prefix", "z"],
     ["z.y.model.a.w", "z.y.model.b.w", "z.y.model.fc.w", "z.y.fc.w"]),
    (["--rename", "a", "b2", "--rename", "b2", "q", "--rename", "q", "a"], NAMES),
    (["--rename", r"^model\.(.)\.w$", r"\1.model", "--rename", "model", "m"],
     ["a.m", "b.m", "m.fc.w", "fc.w"]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "wanted"), ORDERS, ids=lambda row: " ".join(row) if row else "-")
def test_rules_run_in_the_order_of_the_line(flags, wanted, net, capsys, tmp_path):
    out = tmp_path / "out.pth"
    status, _, err = cli(capsys, "convert", net, *flags, "-o", out)

    if isinstance(wanted, list):
        assert status == 0, err
        assert keys(out) == wanted
    else:
        assert status == (1 if wanted is None else 2)
        assert (wanted or "matches no key") in err
        left_alone(tmp_path, net.name)


def words_of(flags):
    """The same rules for `rules=`."""
    rules = []
    for word in flags:
        if word.startswith("--"):
            rules.append([word[2:]])
        else:
            rules[-1].append(word)
    return rules


@pytest.mark.parametrize("row", [row for row in ORDERS if isinstance(row[1], list)], ids=lambda row: " ".join(row[0]))  # fmt: skip
def test_rules_of_the_api_keep_their_order(row, net, tmp_path):
    convert(net, tmp_path / "out.pth", rules=words_of(row[0]))
    assert keys(tmp_path / "out.pth") == row[1]


def test_rules_and_their_options_are_not_mixed(net, tmp_path):
    with pytest.raises(UsageError, match="not both"):
        convert(net, tmp_path / "o.pth", rules=[("drop", "fc.*")], drop="fc.*")
    with pytest.raises(UsageError, match="no key rule is called 'dropp'"):
        convert(net, tmp_path / "o.pth", rules=[("dropp", "fc.*")])
    left_alone(tmp_path, net.name)


@pytest.mark.parametrize("flags", [["--to-cpu"], ["--to-gpu", "1"]], ids=" ".join)
def test_globs_see_the_names_without_module(flags, capsys, tmp_path):
    out = tmp_path / "out.pth"
    source = FIXTURES / "dp_cuda.pth"
    assert cli(capsys, "convert", source, *flags, "--drop", "conv.*", "-o", out)[0] == 0
    assert keys(out)[0] == "bn.weight"
    assert (
        cli(capsys, "convert", source, *flags, "--drop", "module.conv.*", "-o", out, "-f")[0] == 1
    )
    flags = [*flags, "--keep-module", "--drop", "module.conv.*", "-o", out, "-f"]
    assert cli(capsys, "convert", source, *flags)[0] == 0
    assert keys(out)[0] == "module.bn.weight"
    flags = ["--to-cpu", "--rename", "conv", "c", "-o", out, "-f"]  # an explicit rule: no strip
    assert cli(capsys, "convert", source, *flags)[0] == 0
    assert keys(out)[0] == "module.c.weight"


# -- --rename-file -----------------------------------------------------------------------------
def test_a_file_of_names(net, tmp_path, capsys):
    names, out = tmp_path / "names.json", tmp_path / "out.pth"
    names.write_text(
        json.dumps({"model.a.w": "编码器.w", "fc.w": "model.a.w", "model.fc.w": "fc.w"})
    )
    status, _, err = cli(capsys, "convert", net, "--rename-file", names, "-o", out)

    assert status == 0, err
    assert keys(out) == ["编码器.w", "model.b.w", "fc.w", "model.a.w"]
    pairs = json.loads(names.read_text())
    convert(net, tmp_path / "api.pth", rename_keys=pairs)
    assert (tmp_path / "api.pth").read_bytes() == out.read_bytes()


BAD_NAMES = ["", "[]", "{", '{"model.a.w": 3}', '{"model.a.w": "x", "model.a.w": "y"}', '"text"',
             '{"model.a.w": null}', "\xff", '{"model.a.w": {"x": "y"}}']  # fmt: skip


@pytest.mark.parametrize("text", BAD_NAMES)
def test_a_file_of_names_that_is_none(text, net, tmp_path, capsys):
    names = tmp_path / "names.json"
    names.write_bytes(text.encode("latin-1"))
    status, _, err = cli(capsys, "convert", net, "--rename-file", names, "-o", tmp_path / "o.pth")

    assert status == 2
    assert "names.json" in err
    left_alone(tmp_path, net.name, names.name)


def test_names_that_are_not_in_the_file(net, tmp_path, capsys):
    names = tmp_path / "names.json"
    names.write_text('{"nothing": "x"}')
    assert cli(capsys, "convert", net, "--rename-file", names, "-o", tmp_path / "o.pth")[0] == 1
    names.write_text('{"nothing": "x", "fc.w": "head.w"}')
    status, _, err = cli(capsys, "convert", net, "--rename-file", names, "-o", tmp_path / "o.pth")
    assert status == 0
    assert "nothing" in err
    assert (
        cli(capsys, "convert", net, "--rename-file", tmp_path / "x", "-o", tmp_path / "p.pth")[0]
        == 2
    )


# -- -n and --json -----------------------------------------------------------------------------
CONTAINERS = {
    "zip": ["--to", "zip"], "legacy": ["--to", "legacy"], "safetensors": ["--to", "safetensors"],
    "shards": ["--max-shard-size", "16"], "compact": ["--compact"], "select": ["--select", "model"],
}  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("saved", [{}, LEGACY], ids=["zip", "legacy"])
def test_a_dry_run_says_what_the_real_one_does(container, saved, tmp_path, capsys):
    path, out = tmp_path / "net.pth", tmp_path / "out"
    save({"epoch": 3, "model": OrderedDict((k, torch.ones(2)) for k in NAMES)}, path, **saved)
    flags = [*CONTAINERS[container], "--rename", "^model", "m", "--drop", "fc.w", "--dtype", "bf16"]
    status, text, err = cli(capsys, "convert", path, *flags, "-n", "-o", out)

    assert (status, err) == (0, "")
    assert "    model.a.w -> m.a.w\n" in text
    assert "    fc.w dropped\n" in text
    assert "dry run: nothing written" in text
    assert "3 tensors cast to bfloat16" in text
    left_alone(tmp_path, path.name)
    dry = json.loads(cli(capsys, "convert", path, *flags, "-n", "-o", out, "--json")[1])
    left_alone(tmp_path, path.name)
    real = json.loads(cli(capsys, "convert", path, *flags, "-o", out, "--json")[1])
    assert (dry.pop("dry_run"), real.pop("dry_run")) == (True, False)
    del dry["seconds"], real["seconds"]
    assert dry == real
    assert all(row["size_bytes"] == os.path.getsize(row["file"]) for row in real["outputs"])


def test_a_dry_run_needs_no_output_and_refuses_as_the_real_one(net, tmp_path, capsys):
    status, text, _ = cli(capsys, "convert", net, "--rename", "fc", "head", "-n")
    assert status == 0
    assert "model.fc.w -> model.head.w" in text
    assert cli(capsys, "convert", net, "--rename", "nothing", "x", "-n")[0] == 1
    assert cli(capsys, "convert", net, "--strip-prefix", "model", "-n")[0] == 2
    assert cli(capsys, "convert", net, "--drop-entry", "nothing", "-n")[0] == 1
    assert cli(capsys, "convert", FIXTURES / "evil.pth", "--to", "legacy", "-n")[0] == 2
    left_alone(tmp_path, net.name)


def test_a_dry_run_of_an_edit_in_place(net, tmp_path, capsys):
    before = net.read_bytes()
    status, text, err = cli(capsys, "convert", net, "--rename", "fc", "head", "--in-place", "-n")

    assert (status, err) == (0, "")
    assert "model.fc.w -> model.head.w" in text
    assert "nothing written" in text
    assert net.read_bytes() == before
    left_alone(tmp_path, net.name)


def test_the_promised_keys_of_json(tmp_path, capsys):
    path, out = save_resume(tmp_path / "net.pth"), tmp_path / "out.safetensors"
    flags = [
        "--strip-module",
        "--drop",
        "scale",
        "--extras",
        tmp_path / "x.json",
        "-o",
        out,
        "--json",
    ]
    status, text, err = cli(capsys, "convert", path, *flags)
    found = json.loads(text)

    assert (status, err) == (0, "")
    assert found["schema"] == 1
    assert found["input"] == str(path)
    assert [row["file"] for row in found["outputs"]] == [str(out), str(tmp_path / "x.json")]
    assert found["renames"]["module.fc.weight"] == "fc.weight"
    assert found["dropped"] == ["module.scale"]
    assert found["devices"] == {}
    left = {row["path"][0].partition(".")[0] for row in found["left_behind"]}
    assert {"epoch", "args", "optimizer", "rng"} <= left
    assert {row["slug"] for row in found["notes"]} >= {"tied"}
    assert all(set(row) == {"slug", "text", "command"} for row in found["notes"])


def test_quiet_says_nothing(net, tmp_path, capsys):
    out = tmp_path / "out.pth"
    assert cli(capsys, "convert", net, "--drop", "fc", "-o", out, "-q") == (0, "", "")
    assert cli(capsys, "convert", net, "--add-prefix", "x", "--in-place", "-q") == (0, "", "")
    assert cli(capsys, "convert", net, "--undo", "-q") == (0, "", "")
    status, text, _ = cli(capsys, "convert", net, "--drop", "fc", "-o", out, "-q", "-n")
    assert (status, bool(text)) == (0, True)  # a dry run is asked to say


def test_the_summary(net, tmp_path, capsys):
    status, text, err = cli(capsys, "convert", net, "--drop", "fc", "--dtype", "half", "-o", tmp_path / "o.pth")  # fmt: skip

    assert (status, text) == (0, "")
    assert "  keys      unchanged (epoch kept)" in err
    assert "  dropped   2: model.fc.w, fc.w" in err
    assert "  types     2 tensors cast to float16" in err
    status, _, err = cli(capsys, "convert", net, "-o", tmp_path / "o.safetensors")
    assert "  left behind: epoch" in err


# -- contradictions ----------------------------------------------------------------------------
CONTRADICTIONS = {
    "--to-cpu --to-gpu 1": "only one of",
    "--to-cpu --map-location cuda:0 cpu": "only one of",
    "--to-gpu 0 --map-location cuda:0 cpu": "only one of",
    "--map-location cuda:0 meta": "nothing can move to meta",
    "--to-cpu --keep-module --strip-module": "keep-module contradicts",
    "--to-cpu --keep-module --add-module": "keep-module contradicts",
    "--strip-module --add-module": "strip-module contradicts",
    "--keep-object --rename a b": "no key rule",
    "--keep-object --drop fc": "no key rule",
    "--keep-object --dtype half": "keep-object contradicts",
    "--keep-object --select model": "keep-object contradicts",
    "--keep-dtype fc": "keep-dtype needs a dtype",
    "--max-shard-size 1GB --to zip": "max-shard-size",
    "--max-shard-size 1GB --to safetensors": "max-shard-size",
    "--in-place --dtype half": "in place only names and devices",
    "--in-place --compact": "in place only names and devices",
    "--in-place --select model": "in place only names and devices",
    "--in-place --drop-entry epoch": "in place only names and devices",
    "--in-place --to-cpu --to zip": "in place only names and devices",
    "--in-place --to-cpu --max-shard-size 1GB": "in place only names and devices",
    "--in-place --drop fc": "in place nothing can be dropped",
    "--in-place --only fc": "in place nothing can be dropped",
    "--in-place --to-cpu --extras x.json": "in place nothing is left behind",
    "--in-place --to-cpu --keep-object": "in place nothing is left behind",
    "--in-place": "nothing to do in place",
    "--select model --at fc": "no state_dict at 'fc'",
    "--dtype half --select ''": "select needs the path",
    "--select model --extras ''": "extras needs",
}


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_contradictions(line, net, tmp_path, capsys):
    output = [] if "--in-place" in line else ["-o", tmp_path / "out"]
    before = net.read_bytes()
    status, out, err = cli(capsys, "convert", net, *shlex.split(line), *output)

    assert (status, out) == (2, "")
    assert CONTRADICTIONS[line] in err
    assert "bug" not in err
    assert net.read_bytes() == before
    left_alone(tmp_path, net.name)
    status, out, err = cli(capsys, "convert", net, *shlex.split(line), *output, "--json")
    assert (status, err, json.loads(out)["error"]["slug"]) == (2, "", "usage")


def test_in_place_takes_no_output(net, tmp_path, capsys):
    before = net.read_bytes()
    status, _, err = cli(capsys, "convert", net, "--to-cpu", "--in-place", "-o", tmp_path / "o.pth")

    assert status == 2
    assert "takes no -o" in err
    assert net.read_bytes() == before
    left_alone(tmp_path, net.name)


@pytest.mark.parametrize("target", ["out.safetensors", "out/"])
def test_an_object_is_no_safetensors(target, copy, tmp_path):
    path = copy("whole_model.pth")
    with pytest.raises(UsageError, match="keep-object"):
        convert(path, f"{tmp_path}/{target}", keep_object=True, to_cpu=True)
    left_alone(tmp_path, path.name)


NOTHING = [
    [],
    ["-n"],
    ["-f"],
    ["--no-check"],
    ["--keep-module"],
    ["--at", "model"],
    ["--tied", "error"],
]


@pytest.mark.parametrize("flags", NOTHING, ids=" ".join)
def test_nothing_to_do(flags, net, tmp_path, capsys):
    status, _, err = cli(capsys, "convert", net, *flags)
    assert status == 2
    assert "nothing to do" in err
    left_alone(tmp_path, net.name)


@pytest.mark.parametrize(
    "flags", [["--drop", "fc"], ["--dtype", "half"], ["--to", "zip"], ["--compact"], ["--select", "model"]], ids=" ".join
)  # fmt: skip
def test_an_output_must_be_named(flags, net, tmp_path, capsys):
    status, _, err = cli(capsys, "convert", net, *flags)
    assert status == 2
    assert "no output is named" in err
    assert "-o OUT" in err
    left_alone(tmp_path, net.name)


WRONG = [["--to", "onnx"], ["--tied", "maybe"], ["--to-gpu", "-1"], ["--to-gpu", "x"], ["--rename", "a"],
         ["--only", ""], ["--drop", ""], ["--strip-prefix", "."], ["--rename", "(", "x"], ["--frobnicate"],
         ["--rename", "", "x"], ["--rename", "fc", r"\9"], ["--add-prefix", ""]]  # fmt: skip


@pytest.mark.parametrize("flags", WRONG, ids=" ".join)
def test_wrong_words(flags, net, tmp_path, capsys):
    status, out, err = cli(capsys, "convert", net, *flags, "-o", tmp_path / "o.pth")
    assert (status, out) == (2, "")
    assert "bug" not in err
    left_alone(tmp_path, net.name)


# -- --in-place, --undo, --recover -------------------------------------------------------------
def test_in_place_and_undo(net, tmp_path, capsys):
    before = net.read_bytes()
    status, out, err = cli(capsys, "convert", net, "--rename", "fc", "head", "--in-place")

    assert (status, out) == (0, "")
    assert "edited in place" in err.splitlines()[0]
    assert keys(net) == ["model.a.w", "model.b.w", "model.head.w", "head.w"]
    assert net.read_bytes().startswith(before)
    assert list(load(net)["model"]) == keys(net)
    status, out, err = cli(capsys, "convert", net, "--undo")
    assert (status, out) == (0, "")
    assert "cut off" in err
    assert net.read_bytes() == before
    left_alone(tmp_path, net.name)
    assert cli(capsys, "convert", net, "--undo")[0] == 1
    assert cli(capsys, "convert", net, "--recover")[0] == 1
    assert net.read_bytes() == before


def test_undo_as_json(net, capsys):
    size = net.stat().st_size
    cli(capsys, "convert", net, "--add-prefix", "x", "--in-place")
    edited = net.stat().st_size
    status, out, err = cli(capsys, "convert", net, "--undo", "--json")
    found = json.loads(out)

    assert (status, err) == (0, "")
    assert found["outputs"] == [{"file": str(net), "size_bytes": size}]
    assert found["size_before_bytes"] == edited
    status, out, err = cli(capsys, "convert", net, "--undo", "--json")
    assert (status, err, json.loads(out)["error"]["slug"]) == (1, "", "nothing-to-do")


@pytest.mark.parametrize("verb", ["--undo", "--recover"])
@pytest.mark.parametrize(
    "more", [["--to-cpu"], ["-o", "x.pth"], ["-f"], ["-n"], ["--in-place"], ["--drop", "fc"], ["--no-check"]], ids=" ".join
)  # fmt: skip
def test_undo_and_recover_stand_alone(verb, more, net, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    convert(net, rename=[("fc", "head")], in_place=True)
    before = net.read_bytes()
    status, _, err = cli(capsys, "convert", net, verb, *more)

    assert status == 2
    assert "stands alone" in err
    assert net.read_bytes() == before
    assert cli(capsys, "convert", net, "--undo", "--recover")[0] == 2
    assert cli(capsys, "convert", net, "--undo", "--no-fsync", "-q")[0] == 0


@pytest.mark.parametrize(
    "name", ["legacy.pth", "model.safetensors", "tar_01x.pth", "whole_model.pth"]
)
def test_in_place_is_for_zips_of_state_dicts(name, copy, capsys, tmp_path):
    path = copy(name)
    before = path.read_bytes()
    status, _, err = cli(capsys, "convert", path, "--add-prefix", "x", "--in-place")

    assert status == 2, err
    assert path.read_bytes() == before
    left_alone(tmp_path, name)


def test_a_later_convert_reclaims_the_space(net, tmp_path):
    convert(net, rename=[("fc", "head")], in_place=True)
    convert(net, tmp_path / "out.pth", rename=[("head", "fc")])

    assert_same(load(tmp_path / "out.pth")["model"], OrderedDict((k, torch.ones(2)) for k in NAMES))
    assert (tmp_path / "out.pth").stat().st_size < net.stat().st_size - 100


# -- -f ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("container", CONTAINERS)
def test_an_output_that_exists_is_refused_without_force(container, net, tmp_path, capsys):
    out = tmp_path / "out"
    flags = [*CONTAINERS[container], "-o", out]
    assert cli(capsys, "convert", net, *flags)[0] == 0
    files = [out] if out.is_file() else sorted(out.iterdir())
    before = [file.read_bytes() for file in files]
    more = ["--dtype", "half"] if out.is_file() else ["--rename", "a", "z"]  # as many shards
    status, _, err = cli(capsys, "convert", net, *flags, *more)
    assert status == 2
    assert "it exists already" in err
    assert "hint: replace it with -f" in err
    assert [file.read_bytes() for file in files] == before
    assert cli(capsys, "convert", net, *flags, *more, "-f")[0] == 0
    assert [file.read_bytes() for file in files] != before


# -- the progress bar --------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self):
        return True


def bar(monkeypatch, seconds, terminal, steps=4):
    """What is drawn of a write in which so many seconds pass between two reports."""
    now = iter(float(i) * seconds for i in range(1000))
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(command_module, "monotonic", lambda: next(now))
    monkeypatch.setattr(sys, "stderr", stream)
    with command_module._Bar() as shown:
        for i in range(steps + 1):
            shown.show(i * 25, 25 * steps)
    return stream.getvalue()


def test_the_bar_is_drawn_after_a_second_on_a_terminal_alone(monkeypatch):
    assert bar(monkeypatch, 0.1, True) == ""
    assert bar(monkeypatch, 5, False) == ""
    drawn = bar(monkeypatch, 0.4, True)
    assert "writing" in drawn
    assert "100%" in drawn
    assert drawn.endswith("\n")
    assert re.findall(r"(\d+)%", drawn)[0] != "0"  # a second had passed before


def test_the_bar_of_a_real_write_comes_to_its_end(tmp_path, monkeypatch, capsys):
    save({"w": torch.zeros(12_000_000)}, tmp_path / "net.pth")
    now = iter(float(i) for i in range(1000))
    monkeypatch.setattr(command_module, "monotonic", lambda: next(now))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name in ("a.pth", "a.safetensors"):
        flags = ["--dtype", "half", "-o", str(tmp_path / name), "--no-fsync", "-q"]
        assert entry.main(["convert", str(tmp_path / "net.pth"), *flags]) == 0
        err = capsys.readouterr().err
        assert "100%" in err
        assert max(int(n) for n in re.findall(r"(\d+)%", err)) == 100
    flags = ["--dtype", "half", "-o", str(tmp_path / "s"), "--max-shard-size", "1GB", "-q"]
    assert entry.main(["convert", str(tmp_path / "net.pth"), *flags]) == 0
    assert "100%" in capsys.readouterr().err


# -- help --------------------------------------------------------------------------------------
# cli.md; the flags of later issues are left out
HELP = {
    "Device": ["--to-cpu", "--to-gpu", "--map-location"],
    "Names": ["--strip-module", "--add-module", "--keep-module", "--add-module-at", "--unwrap",
              "--unwrap-at", "--strip-prefix", "--add-prefix", "--rename", "--rename-file", "--at"],
    "Fit": ["--fit", "--model-arg", "--partial"],
    "Parts": ["--select", "--only", "--drop", "--drop-entry", "--compact"],
    "Types": ["--dtype", "--keep-dtype"],
    "Output": ["-o", "--to", "--max-shard-size", "--extras", "--tied", "--keep-object", "--in-place",
               "--undo", "-f", "-n"],
    "Safety": ["--recover", "--salvage", "--keep-unknown", "--no-check", "--no-fsync"],
    "Workers": ["--jobs", "--engine", "--resume"],
    "Format": ["--json"],
    "Other": ["-q", "-v", "--color", "--debug", "-h"],
}  # fmt: skip


def test_the_help_lists_every_flag_under_its_heading(capsys):
    status, out, _ = cli(capsys, "convert", "-h")
    found, heading = {}, ""
    for line in out.splitlines():
        if re.match(r"^[A-Z]\w+:$", line):
            heading = line[:-1]
        elif line.startswith("  -"):
            found.setdefault(heading, []).append(line.split()[0].rstrip(","))

    assert status == 0
    assert {name: sorted(flags) for name, flags in found.items()} == {
        name: sorted(flags) for name, flags in HELP.items()
    }
    assert list(found) == list(HELP)


def test_the_help_fits_a_terminal_and_says_what_is_repeatable(capsys):
    out = cli(capsys, "convert", "-h")[1]
    assert max(map(len, out.splitlines())) <= 80
    for param in command.params:
        if getattr(param, "multiple", False):
            assert "repeatable" in param.help, param.opts
        if param.param_type_name == "option":
            assert param.help, param.opts


# -- the API has the same words ----------------------------------------------------------------
RENAMED = {
    "no_check": "check",
    "no_fsync": "fsync",
    "rename_file": "rename_keys",
    "model_arg": "model_args",
}
CALLS = {"undo": "undo", "recover": "recover"}  # functions of their own
SCREEN = {"as_json", "quiet", "verbose", "color", "debug", "file", "help"}
API_ONLY = {"rules", "progress", "limits", "path"}


def test_every_flag_is_a_keyword():
    flags = {param.name for param in command.params} - SCREEN
    words = set(python_inspect.signature(ckptool.convert).parameters)
    for name in CALLS:
        assert hasattr(ckptool, CALLS[name])

    assert {RENAMED.get(name, name) for name in flags - CALLS.keys()} == words - API_ONLY
    parameters = python_inspect.signature(ckptool.convert).parameters
    for name, parameter in parameters.items():
        positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert positional == (name in ("path", "output"))


def test_defaults_are_the_same():
    parameters = python_inspect.signature(ckptool.convert).parameters
    for param in command.params:
        if param.name in SCREEN | CALLS.keys() or param.name == "output":
            continue
        word = parameters[RENAMED.get(param.name, param.name)]
        if getattr(param, "is_flag", False):
            assert word.default is param.name.startswith("no_"), param.name
        elif param.name in ("tied", "jobs"):
            assert word.default == param.default
        else:
            assert not word.default, param.name
    assert tuple(command.params[[p.name for p in command.params].index("to")].type.choices) == (
        "zip", "legacy", "safetensors", "shards", "dcp",
    )  # fmt: skip


def test_every_row_of_the_option_table_is_used():
    commands = [import_module(home).command for home, *_ in entry.COMMANDS.values()]
    given = {tuple(p.opts) for made in commands for p in made.params}
    for declarations, _, text, _ in option_table._TABLE.values():
        assert tuple(word for word in declarations if word.startswith("-")) in given
        assert text


SAME = [
    (["--strip-prefix", "model", "--drop", "fc"], {"rules": [("drop", "fc"), ("strip-prefix", "model")]}),
    (["--drop", "fc.w", "--dtype", "bf16", "--keep-dtype", "a"],
     {"drop": "fc.w", "dtype": torch.bfloat16, "keep_dtype": ["a"]}),
    (["--rename", "fc", "head", "--rename", "a", "x"], {"rename": {"fc": "head", "a": "x"}}),
    (["--rename", "fc", "head", "--to-gpu", "3"], {"rename": [("fc", "head")], "to_gpu": 3}),
    (["--map-location", "cpu", "mps"], {"map_location": {"cpu": "mps"}}),
    (["--select", "model", "--compact", "--no-check"], {"select": "model", "compact": True, "check": False}),
    (["--to", "safetensors", "--tied", "duplicate"], {"to": "safetensors", "tied": "duplicate"}),
    (["--drop-entry", "epoch", "--to", "legacy"], {"drop_entry": ["epoch"], "to": "legacy"}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "options"), SAME, ids=str)
def test_the_command_and_the_function_write_the_same_file(flags, options, net, tmp_path, capsys):
    one, two = tmp_path / "one.pth", tmp_path / "two.pth"
    if "--strip-prefix" in flags:
        flags = ["--drop", "fc", "--strip-prefix", "model"]
    assert cli(capsys, "convert", net, *flags, "-o", one)[0] == 0
    done = convert(net, two, **options)

    assert one.read_bytes() == two.read_bytes()
    assert done.size_bytes == two.stat().st_size
    assert done.to_dict()["outputs"] == [{"file": str(two), "size_bytes": done.size_bytes}]


def test_progress_is_called_to_the_end(net, tmp_path):
    calls = []
    done = convert(net, tmp_path / "o.pth", dtype="half", progress=lambda *row: calls.append(row))
    assert calls[-1] == (done.size_bytes, done.size_bytes)
    assert [row[0] for row in calls] == sorted(row[0] for row in calls)
