"""The Python API of comparing: what `ckptool diff` does, as a function with a typed result.

Knows: the verb and its look. Must not know: click; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.verbs import diff_report
from ckptool.verbs.diff import Asked, diff_places

Names = str | Sequence[str]
"""One name or glob, or several."""


@dataclass(frozen=True, slots=True)
class Diff(diff_report.Diff):
    """What `diff` found; as text it is what the command prints."""

    def __str__(self) -> str:
        from ckptool.render.diff import diff_text

        return diff_text(self.to_dict())

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def diff(
    a: PlaceLike,
    b: PlaceLike,
    *,
    strict: bool = False,
    values: bool = False,
    bytes: bool = False,  # noqa: A002 - the command line's word
    atol: float | None = None,
    rtol: float | None = None,
    at: str | None = None,
    unwrap: bool = False,
    strip_prefix: Names = (),
    only: Names = (),
    drop: Names = (),
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = DEFAULT,
) -> Diff:
    """Compare two checkpoints in whatever containers: `.same`, `.added`, `.removed`, `.changed`,
    `.extras`, and `.explained_by`, what was seen through.

    `strict` makes names, devices and order count; `values` measures how far numbers are apart,
    `atol` and `rtol` (torch.allclose's rule, NaN equal to NaN) decide what counts; `bytes` trusts
    no recorded checksum. `at` compares one state_dict and nothing beside it; `unwrap` and
    `strip_prefix` run over the names of both; `only` and `drop` are globs over names.
    `progress` is called with (bytes done, bytes in all). Raises CkptError, naming the file.
    """
    asked = Asked(
        strict=strict, values=values, bytes=bytes, atol=atol, rtol=rtol, at=at, unwrap=unwrap,
        strip_prefix=_words(strip_prefix), only=_words(only), drop=_words(drop),
    )  # fmt: skip
    found = diff_places(a, b, asked, limits, progress)
    return Diff(**{row.name: getattr(found, row.name) for row in fields(found)})


def _words(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
