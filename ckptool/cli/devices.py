"""`ckptool devices`.

Knows: flags and screens. Must not know: formats, how devices are found.
"""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.options import Command, options
from ckptool.cli.output import echo
from ckptool.verbs.devices import devices_here


@click.command(
    "devices",
    cls=Command,
    examples=(
        "ckptool devices",
        "ckptool devices net.pth",
        "CUDA_VISIBLE_DEVICES=2,0 ckptool devices --json",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("file", required=False, metavar="[FILE]", type=click.Path())
@options()
@click.pass_context
def command(ctx: click.Context, /, file: str | None, **flags: Any) -> None:
    """Show what CUDA makes visible here, and whether FILE fits on it.

    Asks nvidia-smi, and torch only where there is none. Exits 1 when FILE fits on no device.
    """
    found = devices_here(file)
    report = found.to_dict()
    if flags["as_json"]:
        from ckptool.render.structured import json_text

        echo(json_text(report))
    else:
        from ckptool.render.devices import devices_text

        if flags["quiet"]:
            report["notes"] = []
        echo(devices_text(report))
    ctx.exit(int(found.fits is False))
