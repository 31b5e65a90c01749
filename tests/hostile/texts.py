"""Names that act on a terminal, forge a report, or look like others."""

from __future__ import annotations

import json

from hostile.blocks import (
    COMMAND,
    PLAIN,
    ROWS,
    SIX,
    B,
    W,
    before,
    call,
    dictionary,
    net,
    one,
    op,
    ordered,
    safe,
    stored,
    stream,
    tensor,
)  # fmt: skip
from hostile.cases import CODE, OTHER, SAME, Case, refused
from hostile.zipbytes import Entry

CLEAR = "\x1b[2J\x1b[H"
CLIP = "\x1b]8;;http://evil.invalid\x07w\x1b]8;;\x07\x1b]52;c;ZXZpbA==\x07"
MARKUP = '[bold red]w[/] | `x` | =HYPERLINK("http://evil.invalid") | <img src=x onerror=alert(1)>'
KEYS = (
    ("escape", "a key that clears the screen and forges a report", f"{CLEAR}all clean\x1b[8m"),
    ("newline", "a key with a second row of the table in it", "w | (4,) | float32\nforged.weight"),
    ("return", "a key that overwrites its line", "evil\rgood.weight"),
    ("bidi", "a key that reads backwards", "layer\u202etxet\u2066.weight"),
    ("c1", "control sequences of one byte instead of ESC", "\u009b2J\u009d52;c;ZWNobyBoaQ==\u009c"),
    ("osc", "a hidden link, and a write to the clipboard", CLIP),
    ("zero-width", "characters without width, and tags", "w\u200b\u2060\U000e0041"),
    ("mark", "the Arabic letter mark, and a byte order mark", "w\u061c\ufeff"),
    ("markup", "markup of rich, Markdown, CSV, HTML", MARKUP),
    ("backspace", "a key that rubs itself out", "evil\x08\x08\x08\x08good"),
)
ROW = json.dumps(ROWS["w"])
ROW_B = json.dumps(ROWS["b"])
SAFE_KEY = f'{{"w\\u001b[2J\\u001b[H":{ROW},"b":{ROW_B.replace("24, 32", "24, 36")}}}'
SAFE_NOTE = (
    f'{{"__metadata__":{{"format":"pt\\u001b[2J","note\\n":"x\\u202ey"}},"w":{ROW},"b":{ROW_B}}}'
)
NAMED = "a\x1b[2J\nok.pth"

CASES = (
    *(Case(name, tries, OTHER, lambda key=key: net(stream(ordered((key, W), ("b", B)))))
      for name, tries, key in KEYS),
    Case("location", "a device with escape codes", OTHER,
         lambda: net(one(tensor(stored(location="cuda:0\x1b[2J\n"))), {"0": SIX})),
    Case("global", "a function whose module is escape codes", CODE,
         lambda: net(before(call(b"cos" + CLEAR.encode() + b"\nsys\x1b]0;owned\x07tem\n",
                                 COMMAND)))),
    Case("entry", "a zip entry with escapes and a newline", SAME,
         lambda: net(last=(Entry(f"archive/{CLEAR}\nOK all clean", b"x"),))),
    Case("root", "a zip whose folder is escape codes", SAME, lambda: net(root="\x1b[31marchive")),
    Case("values", "plain values with escapes", OTHER,
         lambda: net(stream(dictionary(
             ("arch", f"resnet{CLEAR}\x1b]0;x\x07"), ("classes", ["cat\n\x1b[8m"]),
             (f"{CLEAR}k", op(1)), ("state_dict", PLAIN))))),
    Case("file", "a file name with escapes and a newline", refused("not-a-checkpoint"),
         lambda: b"not a checkpoint", file=NAMED),
    Case("file-good", "the same, of an honest checkpoint", SAME, net, file=NAMED),
    Case("file-bytes", "a file name that is no UTF-8", SAME, net, file="net\udcff.pth"),
    Case("safe-key", "a key with escapes in an error of .safetensors", refused("header-invalid"),
         lambda: safe(SAFE_KEY.encode()), file="net.safetensors"),
    Case("safe-note", "metadata of .safetensors with escapes", OTHER,
         lambda: safe(SAFE_NOTE.encode()), file="net.safetensors"),
)  # fmt: skip
