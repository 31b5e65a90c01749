"""Reports as text, from bare data: one file a kind of report, one row in `RENDERERS`.

Knows: which renderer is called what. Must not know: files, verbs. A renderer is imported when
it is used: tabulate alone costs more than a whole inspection.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ckptool.errors import UsageError

RENDERERS: dict[str, str] = {
    "table": "ckptool.render.table:table",
    "tree": "ckptool.render.tree:tree",
    "plain": "ckptool.render.plain:plain",
    "json": "ckptool.render.structured:json_text",
    "jsonl": "ckptool.render.structured:jsonl_text",
    "csv": "ckptool.render.structured:csv_text",
    "markdown": "ckptool.render.structured:markdown_text",
    "html": "ckptool.render.html:html",
}
"""Name of a format to `module:function`; the function takes an inspection as bare data."""


def render(name: str, report: Mapping[str, Any], **options: Any) -> str:
    """The inspection `report` (JSON schema 1) as text, without a newline at its end.

    Raises UsageError on an unknown `name`.
    """
    if name not in RENDERERS:
        raise UsageError(f"no format is called '{name}'", hint=f"one of {', '.join(RENDERERS)}")
    module, _, function = RENDERERS[name].partition(":")
    text: str = getattr(import_module(module), function)(report, **options)
    return text
