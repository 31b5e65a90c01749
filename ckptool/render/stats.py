"""Columns for what --stats and --hash tell of each tensor.

Knows: how numbers are written short. Must not know: files, verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_RANGE = ("min", "max", "mean", "std", "norm")
_COUNTS = {"zeros": "zero_count", "nan": "nan_count", "inf": "inf_count"}
FIELDS = (*_RANGE, *_COUNTS.values())
"""What machines read of the statistics, in this order."""
UNKNOWN = "-"


def is_measured(tensors: Sequence[Row]) -> tuple[bool, bool]:
    """Whether statistics and hashes were asked for."""
    return any("stats" in t for t in tensors), any("sha256" in t for t in tensors)


def columns(tensors: Sequence[Row]) -> list[str]:
    """The columns that these rows need: counts of what there is none of have none."""
    stats, hashes = is_measured(tensors)
    names = list(_RANGE) if stats else []
    for name, field in _COUNTS.items():
        if any((t.get("stats") or {}).get(field) for t in tensors):
            names.append(name)
    return names + (["sha256"] if hashes else [])


def fields(tensor: Row, stats: bool, hashes: bool) -> list[Any]:
    """The values of FIELDS and the hash, as far as they were asked for; None where unknown."""
    found = tensor.get("stats") or {}
    values = [_plain(found.get(name)) for name in FIELDS] if stats else []
    return values + ([tensor.get("sha256")] if hashes else [])


def names_of(stats: bool, hashes: bool) -> tuple[str, ...]:
    """The names of what `fields` gives."""
    return (FIELDS if stats else ()) + (("sha256",) if hashes else ())


def _plain(value: Any) -> Any:
    """A complex number as Python writes it, (1-2j)."""
    return str(complex(*value)) if isinstance(value, list) else value


def short(value: Any) -> str:
    """Four digits of a float, all of a whole number; `-` where there is none."""
    if value is None:
        return UNKNOWN
    if isinstance(value, list):
        real, imaginary = value
        return f"{real:.4g}{imaginary:+.4g}j"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cell(field: str) -> Callable[[Row], str]:
    return lambda tensor: short((tensor.get("stats") or {}).get(field))


CELLS: dict[str, Callable[[Row], str]] = {
    **{name: _cell(name) for name in _RANGE},
    **{name: _cell(field) for name, field in _COUNTS.items()},
    "sha256": lambda tensor: str(tensor.get("sha256") or UNKNOWN),
}
"""Each column by its heading; all but the hash are right-aligned."""
