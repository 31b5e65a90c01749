"""Screens from hand-made reports, and hostile strings through every renderer."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import subprocess
import sys
import unicodedata

import pytest

from ckptool.errors import UsageError
from ckptool.render import RENDERERS, render
from ckptool.render.convert import convert_text
from ckptool.render.errors import error_lines
from ckptool.render.table import TABULATED
from ckptool.render.text import count, escape, human_bytes, lay_out, listing, shape_text, show


def tensor(key, shape, size, device="cuda:0", **more):
    rest = {"stride": [1], "offset": 0, "storage": "0", "requires_grad": False, "kind": "tensor"}
    fields = {"key": key, "shape": shape, "dtype": "float32", "device": device, "size_bytes": size}
    return {**fields, **rest, **more}


REPORT = {
    "schema": 1,
    "file": "net.pth",
    "format": "torch-zip",
    "title": "PyTorch zip",
    "size_bytes": 46_800_000,
    "tensor_count": 3,
    "parameter_count": 11_689_512,
    "weights": ["state_dict"],
    "dtypes": {"float32": 3},
    "devices": {"cuda:0": 3},
    "tables": [
        {
            "path": ["state_dict"], "kind": "state_dict", "class_name": None, "size_bytes": 41_856,
            "selected": True,
            "tensors": [
                tensor("module.conv1.weight", [64, 3, 7, 7], 37_632),
                tensor("module.bn1.weight", [64], 256),
                tensor("module.fc.bias", [1000], 4_000),
            ],
        }
    ],
    "extras": [
        {"path": ["epoch"], "type": "int", "value": 90, "text": "90"},
        {"path": ["best_acc1"], "type": "float", "value": 71.3, "text": "71.3"},
    ],
    "globals": [{"name": "argparse.Namespace", "verdict": "known"}],
    "wrappers": [{"name": "module.", "count": 3, "of": 3}],
    "notes": [
        {"slug": "wrapped", "text": "every key starts with 'module.'", "command": None},
        {"slug": "gpu", "text": "saved on cuda:0", "command": "ckptool convert net.pth --to-cpu"},
    ],
}  # fmt: skip


def report(**changes):
    return {**copy.deepcopy(REPORT), **changes}


def two_tables():
    made = report(extras=[], wrappers=[], notes=[])
    ema = {**copy.deepcopy(made["tables"][0]), "path": ["state_dict_ema"], "selected": False}
    made["tables"].append(ema)
    return made


SCREEN = """\
net.pth: PyTorch zip, 46.8 MB, 3 tensors, 11,689,512 parameters, float32, saved on cuda:0
  wrappers: 'module.' on 3 of 3 keys

  epoch        90
  best_acc1    71.3
  state_dict   3 tensors, 41.9 kB  <- weights

  key                  shape          dtype       size  device
  module.conv1.weight  [64, 3, 7, 7]  float32  37.6 kB  cuda:0
  module.bn1.weight    [64]           float32    256 B  cuda:0
  module.fc.bias       [1000]         float32   4.0 kB  cuda:0

Notes
  every key starts with 'module.'
  saved on cuda:0
    ckptool convert net.pth --to-cpu"""

TREE = """\
  module      3 tensors               41.9 kB
    conv1     1 tensor                37.6 kB
      weight  [64, 3, 7, 7]  float32  37.6 kB  cuda:0
    bn1       1 tensor                  256 B
      weight  [64]           float32    256 B  cuda:0
    fc        1 tensor                 4.0 kB
      bias    [1000]         float32   4.0 kB  cuda:0"""


def test_the_inspect_screen():
    assert render("table", REPORT) == SCREEN


def test_the_tree():
    assert render("tree", REPORT).split("\n\n")[2] == TREE


def test_plain_is_five_fields_a_line():
    assert render("plain", REPORT).splitlines()[0] == (
        "module.conv1.weight\t[64, 3, 7, 7]\tfloat32\tcuda:0\t37632"
    )
    assert len(render("plain", REPORT).splitlines()) == 3


def test_a_bare_state_dict_has_no_contents_block():
    bare = report(weights=[], extras=[], wrappers=[], notes=[])
    bare["tables"][0]["path"] = []

    assert render("table", bare).split("\n\n")[1].startswith("  key ")


def test_several_tables_are_listed_and_one_shown():
    screen = render("table", two_tables())

    assert "  state_dict       3 tensors, 41.9 kB  <- weights\n" in screen
    assert "  state_dict_ema   3 tensors, 41.9 kB  --at state_dict_ema\n" in screen
    assert screen.count("module.fc.bias") == 1


def test_another_table_can_be_the_one_shown():
    made = two_tables()
    made["tables"][0]["selected"], made["tables"][1]["selected"] = False, True
    made["tables"][1]["tensors"] = made["tables"][1]["tensors"][:1]
    screen = render("table", made)

    assert "state_dict_ema   1 tensor, 41.9 kB  <- shown\n" in screen
    assert "module.fc.bias" not in screen


def test_a_place_to_type_is_quoted():
    made = two_tables()
    made["tables"][1]["path"] = ["$(rm -rf .)"]

    assert "--at '$(rm -rf .)'" in render("table", made)


def test_a_limited_table_says_how_many_more_and_the_summary_last():
    made = report(shown={"total": 500, "shown": 2})
    middle = render("table", made).split("\n\n")

    assert "module.fc.bias" not in middle[2]
    assert middle[2].endswith("\n  … 498 more of 500 tensors")
    assert middle[3] == SCREEN.splitlines()[0]
    assert "state_dict   500 tensors, 41.9 kB  <- weights" in middle[1]


def test_columns_appear_where_they_are_needed():
    made = report()
    made["tables"][0]["tensors"][0].update(kind="quantized", index="12?")
    lines = render("table", made).splitlines()

    assert lines[7].split() == ["#", "key", "shape", "dtype", "size", "device", "kind"]
    assert lines[8].startswith("  12?  module.conv1.weight")
    assert lines[8].endswith("quantized")


def test_unknown_values():
    made = report(weights=None, parameter_count=None, dtypes={}, devices={})
    made["tables"][0]["tensors"] = [tensor("a", None, None, device=None)]
    made["tables"][0]["selected"] = True
    lines = render("table", made).splitlines()

    assert lines[0] == "net.pth: PyTorch zip, 46.8 MB, 3 tensors"
    assert lines[8].split() == ["a", "?", "float32", "?", "?"]


def test_no_tables():
    empty = report(tables=[], weights=None, tensor_count=0)
    for name in RENDERERS:
        assert isinstance(render(name, empty), str)
    assert "\n  no tensors\n" in render("table", empty)


def test_several_dtypes_and_devices():
    made = report(dtypes={"float32": 3, "int64": 1}, devices={"cuda:0": 3, "cpu": 1})

    assert "float32 (3), int64 (1), saved on cuda:0 (3), cpu (1)" in render("table", made)


def many(rows):
    made = report()
    made["tables"][0]["tensors"] = [
        tensor(f"module.layer{i}.weight", [i, 2], 8 * i) for i in range(rows)
    ]
    return made


def test_both_layouts_of_the_table_are_the_same(monkeypatch):
    made = many(50)
    tabulated = render("table", made)
    monkeypatch.setattr("ckptool.render.table.TABULATED", 10)

    assert render("table", made) == tabulated


def test_ten_thousand_rows():
    assert TABULATED < 10_000
    assert len(render("table", many(10_000)).splitlines()) > 10_000
    assert len(render("html", many(10_000)).splitlines()) < 150


def test_markdown():
    made = report()
    made["tables"][0]["tensors"][0]["key"] = "a|b<i>*"
    text = render("markdown", made)

    assert r"| a\|b\<i\>\* | \[64, 3, 7, 7] |" in text
    assert "| key | shape | dtype | size | device |\n| --- | --- | --- | --: | --- |\n" in text
    assert "- epoch: 90" in text
    assert "      ckptool convert net.pth --to-cpu" in text


def test_html_is_escaped():
    made = report()
    made["tables"][0]["tensors"][0]["key"] = "<script>alert('x')</script>&"
    made["notes"][0]["text"] = "<b>"
    text = render("html", made)

    assert "<script" not in text
    assert "<b>" not in text
    assert "&lt;script&gt;" in text


def test_json_parses_back():
    assert json.loads(render("json", REPORT)) == REPORT
    assert json.loads(render("jsonl", REPORT)) == REPORT
    assert "\n" not in render("jsonl", REPORT)


def test_json_has_no_nan():
    made = report()
    made["extras"][0]["value"] = [float("inf"), -1.5]
    parsed = json.loads(render("json", made), parse_constant=pytest.fail)

    assert parsed["extras"][0]["value"] == ["Infinity", -1.5]


def test_csv_cells_do_not_compute():
    made = report()
    for row, start in zip(made["tables"][0]["tensors"], "=+@", strict=True):
        row["key"] = f"{start}cmd|' /C calc'!A0,\"x\""
    made["tables"][0]["tensors"][0]["device"] = "-2+3"
    rows = list(csv.DictReader(io.StringIO(render("csv", made))))

    assert [row["key"][:2] for row in rows] == ["'=", "'+", "'@"]
    assert rows[0]["device"] == "'-2+3"
    assert rows[0]["size_bytes"] == "37632"


def test_an_unknown_renderer_is_a_usage_error():
    with pytest.raises(UsageError, match="xml"):
        render("xml", REPORT)


# Hostile strings

EVIL = (
    "\x1b[2J\x00\n\r\t\x7f\x85\x9b"
    "\u061c\u200b\u200f\u2028\u2029\u202e\u2066\u2069\ufeff\U000e0041\ud800"
)
BAD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)  # newline and tab are the renderers' own: counted apart


def poison(value, spell):
    """Every string, keys of the two count tables too, with `spell` around it."""
    if isinstance(value, str):
        return spell + value + spell
    if isinstance(value, list):
        return [poison(item, spell) for item in value]
    if isinstance(value, dict):
        return {
            (poison(key, spell) if key in ("float32", "cuda:0") else key): poison(item, spell)
            for key, item in value.items()
        }
    return value


@pytest.mark.parametrize("name", RENDERERS)
def test_no_renderer_lets_a_control_through(name):
    made = poison(copy.deepcopy(REPORT), EVIL)
    made["tables"][0]["tensors"][0].update(kind="x", index=EVIL)
    made["tables"] += [{**made["tables"][0], "path": [EVIL], "class_name": EVIL, "selected": False}]
    text = render(name, made)

    assert BAD.search(text) is None
    assert text.count("\t") == (12 if name == "plain" else 0)
    assert text.encode("utf-8")


@pytest.mark.parametrize("name", [name for name in RENDERERS if not name.startswith("json")])
def test_a_hostile_string_adds_no_line(name):
    calm = render(name, poison(copy.deepcopy(REPORT), "x"))

    assert len(render(name, poison(copy.deepcopy(REPORT), EVIL)).splitlines()) == len(
        calm.splitlines()
    )


@pytest.mark.parametrize("name", ["json", "jsonl"])
def test_hostile_strings_parse_back(name):
    made = poison(copy.deepcopy(REPORT), EVIL)

    assert json.loads(render(name, made)) == made


@pytest.mark.parametrize("name", RENDERERS)
def test_cjk_and_accents_stay(name):
    made = report()
    made["tables"][0]["tensors"][0]["key"] = "模块.权重.é"
    text = render(name, made)

    assert "权重" in text
    assert "é" in text


def test_a_deep_name_makes_a_short_tree():
    made = report()
    made["tables"][0]["tensors"] = [tensor("a." * 100_000 + "w", [1], 4)]

    assert len(render("tree", made)) < 20_000


# Strings


def test_show():
    assert show("layer1.0.conv") == "layer1.0.conv"
    assert show("a\x1b\u202e\U000e0041") == r"a\x1b\u202e\U000e0041"
    assert show("权重é") == "权重é"
    assert show("x" * 200) == "x" * 200
    assert show("x" * 201) == "x" * 199 + "…"
    assert show("\n" * 200) == r"\x0a" * 49 + r"\x0" + "…"
    assert show("x" * 10, 5) == "xxxx…"


IGNORABLE = (0xAD, 0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180F, 0x2065, 0x2800, 0x3164, 0xFE0F, 0xFFA0,
             0xFFF0, 0x16FE4, 0x1D159, 0xE0000, 0xE01EF, 0xE0FFF)  # fmt: skip
"""Some that Unicode calls ignorable by default or draws empty, whose category does not say so."""


def test_escape_shows_whatever_cannot_be_seen():
    """Every control, format, separator, surrogate, and every space but the common one."""
    seen = [chr(code) for code in range(sys.maxunicode + 1)]
    hidden = [
        char for char in seen if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs")
    ]
    for char in {*hidden, *map(chr, IGNORABLE)} - {" "}:
        assert escape(f"a{char}b").isascii(), hex(ord(char))
    shown = render("json", {"keys": hidden})
    assert json.loads(shown)["keys"] == hidden
    assert not {*hidden, *map(chr, IGNORABLE)} & set(shown) - set(" \n")
    letters = "".join(
        char for char in seen if unicodedata.category(char) in ("Ll", "Lu", "Lt", "Nd")
    )
    assert escape(letters) == letters
    assert (
        escape("编码器.权重 한국어 e\u0301 नमस्ते \U0001f44d\U0001f3fd")
        == "编码器.权重 한국어 e\u0301 नमस्ते \U0001f44d\U0001f3fd"
    )


def test_escape_is_not_cut():
    assert escape("x" * 1000 + "\n") == "x" * 1000 + r"\x0a"


SIZES = [
    (0, "0 B"),
    (256, "256 B"),
    (999, "999 B"),
    (1000, "1.0 kB"),
    (37_632, "37.6 kB"),
    (999_949, "999.9 kB"),
    (999_950, "1.0 MB"),
    (46_800_000, "46.8 MB"),
    (10**12, "1.0 TB"),
    (10**21 - 1, "1.0 ZB"),
    (10**400, "over 1,000 EB"),
    (None, "?"),
]


@pytest.mark.parametrize(("size", "text"), SIZES)
def test_human_bytes(size, text):
    assert human_bytes(size) == text


def test_small_words():
    assert (count(11_689_512), count(1, "tensor"), count(2, "tensor")) == (
        "11,689,512",
        "1 tensor",
        "2 tensors",
    )
    assert (shape_text([64, 3]), shape_text([]), shape_text(None)) == ("[64, 3]", "[]", "?")
    assert listing(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert lay_out([]) == []
    assert lay_out([["a", "1"], ["bb", "22"]], {1}) == ["a    1", "bb  22"]


# The other screens

CONVERTED = {
    "input": "net.pth",
    "outputs": [{"file": "net.cpu.pth", "size_bytes": 46_800_000}],
    "seconds": 0.05,
    "devices": {"cuda:0": "cpu"},
    "device_counts": {"cuda:0 -> cpu": 186},
    "renames": {"module.a": "a", "module.b": "b"},
    "rename_summary": "'module.' removed",
    "left_behind": [{"path": ["args", "device"], "text": "cuda:0"}],
    "kept": ["epoch", "optimizer", "args"],
    "notes": [],
    "dry_run": False,
}


def test_the_convert_screen():
    assert convert_text(CONVERTED) == (
        "net.pth -> net.cpu.pth   46.8 MB in 0.05 s\n"
        "  devices   186 storages cuda:0 -> cpu\n"
        "  keys      2 renamed, 'module.' removed"
        " (epoch, optimizer, args kept; args.device still says 'cuda:0')"
    )


def test_a_dry_run_lists_every_key():
    lines = convert_text({**CONVERTED, "dry_run": True, "seconds": None}).splitlines()

    assert lines[0] == "net.pth -> net.cpu.pth   46.8 MB, dry run: nothing written"
    assert lines[-2:] == ["    module.a -> a", "    module.b -> b"]


def test_a_conversion_that_changed_nothing():
    result = {**CONVERTED, "device_counts": {}, "renames": {}, "kept": [], "left_behind": []}
    result["notes"] = [{"slug": "partial-prefix", "text": "2 of 4", "command": "--strip-module"}]

    assert convert_text(result).splitlines()[1:] == [
        "  devices   unchanged",
        "  keys      unchanged",
        "",
        "Notes",
        "  2 of 4",
        "    --strip-module",
    ]


def test_several_devices_stand_below_each_other():
    result = {**CONVERTED, "device_counts": {"cuda:0 -> cpu": 186, "cuda:4 -> cpu": 1}}

    assert convert_text(result).splitlines()[1:3] == [
        "  devices   186 storages cuda:0 -> cpu",
        "            1 storage cuda:4 -> cpu",
    ]


@pytest.mark.parametrize("dry_run", [True, False])
def test_hostile_conversion(dry_run):
    result = {**poison(CONVERTED, EVIL), "dry_run": dry_run, "renames": {EVIL: EVIL}}
    result["notes"] = [{"slug": "x", "text": EVIL, "command": EVIL}]

    assert BAD.search(convert_text(result)) is None


def test_error_lines():
    err = {
        "file": "net.pth",
        "slug": "crc-mismatch",
        "text": "wrong bytes",
        "where": {"key": "fc.w", "offset": 1204, "member": "data.pkl"},
        "hint": "download it again",
    }

    assert error_lines(err) == (
        "ckptool: net.pth: wrong bytes (byte 1,204 of data.pkl, key 'fc.w')\n"
        "  hint: download it again"
    )
    bare = {"file": None, "slug": "usage", "text": "no", "where": {}, "hint": None}
    assert error_lines(bare) == "ckptool: no"


def test_hostile_error_is_two_lines():
    err = {
        "file": EVIL,
        "slug": "x",
        "text": EVIL,
        "where": {"key": EVIL, "member": EVIL},
        "hint": EVIL,
    }

    assert BAD.search(error_lines(err)) is None
    assert len(error_lines(err).splitlines()) == 2


def test_tabulate_is_imported_by_the_table_alone():
    code = (
        "import sys, json; from ckptool.render import render; r = json.load(sys.stdin);"
        "[render(n, r) for n in ('tree', 'plain', 'json', 'jsonl', 'csv', 'markdown', 'html')];"
        "print(sorted({'tabulate', 'torch', 'numpy', 'pickle', 'zipfile'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], input=json.dumps(REPORT).encode(),
                         capture_output=True, check=True)  # fmt: skip

    assert run.stdout.decode().strip() == "[]"
