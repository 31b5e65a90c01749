"""`ckptool diff`.

Knows: flags and screens. Must not know: formats.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from ckptool.cli.options import Command, options
from ckptool.cli.output import echo
from ckptool.cli.progress import Bar
from ckptool.verbs.diff import Asked, diff_places

_SCREEN = 100  # rows of a terminal; piped, all are printed


@click.command(
    "diff",
    cls=Command,
    examples=(
        "ckptool diff net.pth net.cpu.pth                 # what explains the difference",
        "ckptool diff base.pth tuned.safetensors --values  # how far the numbers are apart",
        "ckptool diff a.pth b.pth --at state_dict --atol 1e-6",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@options(
    "strict", "values", "bytes", "atol", "rtol", "unwrap", "strip_prefix", "at", "only", "drop",
    "limit",
)  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, a: str, b: str, **flags: Any) -> None:
    """Compare two checkpoints: files or folders, in any two containers.

    Names that differ by a wrapper or prefix on all keys, devices, containers, order and storage
    layout are seen through, and said. Exit status 0: the same; 1: something else differs; 2:
    trouble.
    """
    asked = Asked(
        strict=flags["strict"], values=flags["values"], bytes=flags["bytes"], atol=flags["atol"],
        rtol=flags["rtol"], at=flags["at"], unwrap=flags["unwrap"],
        strip_prefix=flags["strip_prefix"], only=flags["only"], drop=flags["drop"],
        quick=flags["quiet"] and not flags["as_json"],
    )  # fmt: skip
    with Bar("comparing") as bar:
        found = diff_places(a, b, asked, progress=bar.show)
    same = found.same
    report = {} if flags["quiet"] and not flags["as_json"] else found.to_dict()
    del found  # all records of both files, which the screen needs no more
    if flags["as_json"]:
        from ckptool.render.structured import json_text

        echo(json_text(report))
    elif not flags["quiet"]:
        from ckptool.render.diff import diff_text

        limit = flags["limit"]
        if limit is None and sys.stdout.isatty():
            limit = _SCREEN
        echo(diff_text(report, limit=limit, verbose=flags["verbose"]))
    ctx.exit(0 if same else 1)
