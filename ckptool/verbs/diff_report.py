"""What a comparison found, as plain data: JSON schema 1, and what the screen needs beside it.

Knows: the schema. Must not know: how it is shown, how anything was compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Extra, Note, Tensor
from ckptool.differences import Changed, Lone, Pair
from ckptool.verbs.diff_values import CRC, VALUES, Verdict

_NUMBERS = ("max_abs", "max_rel", "differing_count", "cosine", "l2", "nan_a_count", "nan_b_count")


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor that both files have. `what` counts as a difference: shape, dtype, kind, value,
    attributes, device, tie, order; empty: the same. `ties` are the keys whose elements it shares
    in a and in b.
    """

    pair: Pair
    what: tuple[str, ...]
    verdict: Verdict | None
    ties: tuple[str, str] = ("", "")

    @property
    def key(self) -> str:
        """Its name once wrappers and prefixes are seen through."""
        return self.pair.key


@dataclass(frozen=True, slots=True)
class Diff:
    """The difference of two checkpoints. `explained_by` says what was seen through; `strict`
    whether names, devices and order count.
    """

    a: str
    b: str
    tensors: tuple[Compared, ...]
    added: tuple[Lone, ...]
    removed: tuple[Lone, ...]
    extras: tuple[Changed, ...]
    extra_count: int
    explained_by: tuple[str, ...]
    strict: bool
    strict_differences: tuple[str, ...]
    notes: tuple[Note, ...]
    asked_values: bool = False

    @property
    def same(self) -> bool:
        """Whether nothing that counts differs."""
        return self.same_tensors and not self.extras and not self.strict_differences

    @property
    def same_tensors(self) -> bool:
        """Whether both files have the same tensors."""
        return not (self.added or self.removed or any(row.what for row in self.tensors))

    @property
    def changed(self) -> tuple[Compared, ...]:
        """The tensors that both have and that differ."""
        return tuple(row for row in self.tensors if row.what)

    @property
    def evidence(self) -> str:
        """The weakest that equality rests on: `crc` (recorded, not read) or `bytes`; `values`
        where distances were asked for and all was read.
        """
        if any(row.verdict is not None and row.verdict.how == CRC for row in self.tensors):
            return CRC
        return VALUES if self.asked_values else "bytes"

    @property
    def rounding(self) -> str:
        """The dtype whose rounding explains every number that differs; empty where none does."""
        found = {r.verdict.rounding for r in self.tensors if r.verdict and "dtype" in r.what}
        others = {word for row in self.tensors for word in row.what} - {"dtype"}
        gone = self.added or self.removed or others
        return found.pop() if len(found) == 1 and not gone else ""

    def to_dict(self) -> dict[str, Any]:
        """JSON schema 1 of the command line, with what the screen needs beside it."""
        return {
            "schema": 1,
            "a": self.a,
            "b": self.b,
            "same": self.same,
            "same_tensors": self.same_tensors,
            "strict": self.strict,
            "strict_differences": list(self.strict_differences),
            "evidence": self.evidence,
            "explained_by": list(self.explained_by),
            "rounding": self.rounding or None,
            "equal_count": sum(not row.what for row in self.tensors),
            "by_checksum_count": sum(
                row.verdict is not None and row.verdict.how == CRC for row in self.tensors
            ),
            "extra_count": self.extra_count,
            "added": [row.key for row in self.added],
            "removed": [row.key for row in self.removed],
            "changed": [_changed(row) for row in self.changed],
            "extras": [_extra(row) for row in self.extras],
            "notes": [{"slug": n.slug, "text": n.text, "command": n.command} for n in self.notes],
            "keys": [row.key for row in self.tensors],
            "added_tensors": [_lone(row) for row in self.added],
            "removed_tensors": [_lone(row) for row in self.removed],
        }


def _changed(row: Compared) -> dict[str, Any]:
    found: dict[str, Any] = {"key": row.key, "what": list(row.what)}
    found.update(dict.fromkeys(_NUMBERS))
    verdict = row.verdict
    if verdict is not None and verdict.distance is not None:
        found.update({name: getattr(verdict.distance, name) for name in _NUMBERS})
        found["differing_count"] = verdict.distance.beyond_count
    shape = row.pair.a.shape
    found["first_at"] = _first(verdict, shape)
    found["nan_at"] = _nan_places(verdict, shape)
    found["rounding"] = (verdict.rounding or None) if verdict else None
    found["text"] = (verdict.text or None) if verdict else None
    found["ties"] = list(row.ties) if "tie" in row.what else None
    found["path"] = list(row.pair.path)
    return {**found, "a": _facts(row.pair.a), "b": _facts(row.pair.b)}


def _first(verdict: Verdict | None, shape: tuple[int, ...] | None) -> list[int] | None:
    """The index of the first element that differs."""
    if verdict is None or verdict.sameness is None or verdict.sameness.at is None:
        return None
    return index_of(verdict.sameness.at, shape or ())


def _nan_places(verdict: Verdict | None, shape: tuple[int, ...] | None) -> list[list[int]]:
    """The first indexes of NaN on one side only."""
    if verdict is not None and verdict.distance is not None:
        return [index_of(at, shape or ()) for at in verdict.distance.nan_at]
    found = _first(verdict, shape)
    nan = verdict is not None and verdict.sameness is not None and verdict.sameness.nan
    return [found] if found is not None and nan else []


def index_of(at: int, shape: tuple[int, ...]) -> list[int]:
    """Where element `at` of a row-major tensor is."""
    found = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        found.append(place)
    return found[::-1]


def _facts(t: Tensor) -> dict[str, Any]:
    return {
        "key": t.key,
        "shape": None if t.shape is None else list(t.shape),
        "dtype": t.dtype.name if t.dtype else None,
        "device": t.device,
        "kind": t.kind,
    }


def _lone(row: Lone) -> dict[str, Any]:
    facts = {**_facts(row.tensor), "key": row.key, "file_key": row.tensor.key}
    size = row.tensor.size_bytes
    return {**facts, "path": list(row.path), "top": list(row.top), "size_bytes": size}


def _extra(row: Changed) -> dict[str, Any]:
    change = "added" if row.a is None else "removed" if row.b is None else "changed"
    return {
        "path": list(row.path), "top": list(row.top), "change": change, "a": plain(row.a), "b": plain(row.b),
        "a_type": row.a.type if row.a else None, "b_type": row.b.type if row.b else None,
    }  # fmt: skip


def plain(extra: Extra | None) -> Any:
    """A value as JSON has it; None for a container, which its type names."""
    value = None if extra is None else extra.value
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return f"<{value.bit_length()}-bit int>"
    return value
