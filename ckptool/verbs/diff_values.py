"""Whether two tensors hold the same numbers: by recorded checksums, by bytes, by distance.

Knows: what each kind of tensor is compared by, and what was compared before. Must not know: names,
what counts as a difference of files.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

from ckptool.checkpoint import FLAGGED, Extra, Path, Tensor
from ckptool.differences import same_value
from ckptool.sides import Inside
from ckptool.values.distance import Distance, Tolerance, measure
from ckptool.values.equal import (
    Sameness,
    Seen,
    can_round,
    has_numbers,
    once,
    rounds_to,
    same,
    spread,
)
from ckptool.verbs.diff_files import SideFiles

CRC, BYTES, VALUES, NOTHING = "crc", "bytes", "values", "nothing"

_DENSE = frozenset(("tensor", "parameter", *FLAGGED, "storage", "ndarray"))
_BY_PARTS = frozenset(("sparse", "nested", "device-argument", "uninitialized"))
"""Kinds that are the same when what they are made of is the same."""
_OTHER_PARTS = "made of other parts"


class Verdict(NamedTuple):
    """Whether the numbers are the same, and how that is known: `crc`, `bytes`, `values`, or
    `nothing` (there are none). `rounding` is the dtype whose rounding explains all; `text` says
    why numbers differ or cannot be compared; `what` differs is `value` or `attributes`.
    """

    equal: bool
    how: str
    sameness: Sameness | None = None
    distance: Distance | None = None
    rounding: str = ""
    text: str = ""
    what: str = "value"


class Question(NamedTuple):
    """How closely to look: `values` measures what differs, `bytes` trusts no checksum;
    `tolerance` decides what differs, None: anything.
    """

    values: bool = False
    bytes: bool = False
    tolerance: Tolerance | None = None


_NONE = Verdict(True, NOTHING)


class Comparer:
    """Compares the tensors of two files; no two views twice."""

    def __init__(self, a: SideFiles, b: SideFiles, question: Question) -> None:
        self.a, self.b, self.question = a, b, question
        self._known: dict[Any, Verdict] = {}

    def compare(
        self, a: Tensor, b: Tensor, mine: Inside | None = None, theirs: Inside | None = None
    ) -> Verdict:
        """Two tensors of one shape and kind; `mine` and `theirs` are what they are made of beside
        their elements. Raises what reading raises.
        """
        parts = self._parts(mine, theirs)
        if a.kind in _BY_PARTS or (
            a.kind == "subclass" and not (has_numbers(a) and has_numbers(b))
        ):
            return parts
        own = self._elements(a, b)
        if not own.equal:
            return own
        if not parts.equal:
            return parts if a.kind == "quantized" else parts._replace(what="attributes")
        ways = (own.how, parts.how)
        return own._replace(
            how=CRC if CRC in ways else parts.how if own.how == NOTHING else own.how
        )

    def _parts(self, mine: Inside | None, theirs: Inside | None) -> Verdict:
        """What compound tensors are made of: plain values, then tensors."""
        if mine is None or theirs is None:
            return _NONE if mine is theirs else Verdict(False, NOTHING, text=_OTHER_PARTS)
        for path in dict.fromkeys((*mine.values, *theirs.values)):
            one, two = mine.values.get(path), theirs.values.get(path)
            if not same_value(one, two):
                return Verdict(False, NOTHING, text=_told(path, one, two))
        if mine.tensors.keys() != theirs.tensors.keys():
            return Verdict(False, NOTHING, text=_OTHER_PARTS)
        found = _NONE
        for path, tensor in mine.tensors.items():
            part = self._part(tensor, theirs.tensors[path])
            if not part.equal:
                return part._replace(
                    text=part.text or f"its part {'.'.join(map(str, path))} differs"
                )
            if part.how != NOTHING and found.how != CRC:
                found = part
        return found

    def _part(self, one: Tensor, two: Tensor) -> Verdict:
        if (one.shape, one.dtype, group(one)) != (two.shape, two.dtype, group(two)):
            return Verdict(False, NOTHING, text="made of parts of another shape or type")
        return self._elements(one, two)

    def _elements(self, a: Tensor, b: Tensor) -> Verdict:
        if not a.count and a.shape is not None:
            return _NONE
        if a.kind == "meta" and b.kind == "meta":
            return _NONE
        one, two = self.a.readable(a), self.b.readable(b)
        lacking = [name for name, t in (("a", one), ("b", two)) if not has_numbers(t)]
        if lacking:
            both = f"the numbers of {' and '.join(lacking)} cannot be read"
            return Verdict(False, NOTHING, text=both)
        key = (_view(one), _view(two))
        if key not in self._known:
            self._known[key] = self._looked_at(one, two)
        return self._known[key]

    def _looked_at(self, one: Tensor, two: Tensor) -> Verdict:
        if not self.question.bytes and same_checksums(one, two):
            return Verdict(True, CRC)
        a, b, times = once(Seen(one, self.a), Seen(two, self.b))
        verdict = self._across(a, b) if a.dtype is not b.dtype else self._within(a, b)
        return (
            verdict
            if times == 1
            else _repeated(verdict, a.tensor.shape or (), one.shape or (), times)
        )

    def _within(self, a: Seen, b: Seen) -> Verdict:
        """Two tensors of one dtype."""
        question = self.question
        found = same(a, b)
        if found.equal or not question.values:
            return Verdict(found.equal, BYTES, found)
        distance = measure(a, b, question.tolerance or Tolerance())
        return Verdict(distance.beyond_count == 0, VALUES, found, distance)

    def _across(self, a: Seen, b: Seen) -> Verdict:
        """Two dtypes: the same up to rounding, the same numbers, or neither."""
        if "quantized" in (a.tensor.kind, b.tensor.kind):
            return Verdict(False, NOTHING, text="quantized on one side")
        rounding = rounding_of(a, b)
        if not self.question.values and (rounding or can_round(a, b)):
            return Verdict(bool(rounding), BYTES, None, None, rounding)
        distance = measure(a, b, self.question.tolerance or Tolerance())
        close = distance.beyond_count == 0 or bool(rounding)
        return Verdict(close, VALUES, None, distance if self.question.values else None, rounding)


def _repeated(
    verdict: Verdict, sizes: tuple[int, ...], shape: tuple[int, ...], times: int
) -> Verdict:
    """What was found of elements that all stand `times` in the tensors."""
    found, distance = verdict.sameness, verdict.distance
    if found is not None and found.at is not None:
        found = found._replace(at=spread(found.at, sizes, shape))
    if distance is not None:
        distance = distance._replace(
            differing_count=distance.differing_count * times,
            beyond_count=distance.beyond_count * times,
            l2=None if distance.l2 is None else distance.l2 * sqrt(times),
            nan_a_count=distance.nan_a_count * times,
            nan_b_count=distance.nan_b_count * times,
            nan_at=tuple(spread(at, sizes, shape) for at in distance.nan_at),
        )
    return verdict._replace(sameness=found, distance=distance)


def group(tensor: Tensor) -> str:
    """Kinds that can be compared with each other have one name."""
    return "dense" if tensor.kind in _DENSE else tensor.kind


def rounding_of(a: Seen, b: Seen) -> str:
    """The dtype that one side has when it is the other, rounded; empty when it is not."""
    if not can_round(a, b):
        return ""
    ways = [(a, b), (b, a)] if a.dtype.bits == b.dtype.bits else []
    if not ways:
        ways = [(a, b)] if a.dtype.bits > b.dtype.bits else [(b, a)]
    return next((narrow.dtype.name for wide, narrow in ways if rounds_to(wide, narrow)), "")


def same_checksums(a: Tensor, b: Tensor) -> bool:
    """Whether recorded checksums say that two tensors are the same: one view of storages of one
    length and checksum.
    """
    one, two = a.storage, b.storage
    if one is None or two is None or not one.crc or one.crc != two.crc:
        return False
    if (a.dtype, a.shape, a.stride, a.offset) != (b.dtype, b.shape, b.stride, b.offset):
        return False
    if _flag(a) != _flag(b):
        return False
    if one.size_bytes != two.size_bytes or _swap(one.pieces) != _swap(two.pieces):
        return False
    return "swapped" not in _swap(one.pieces) or one.dtype is two.dtype


def _swap(pieces: Any) -> str:
    return "swapped" if any("swapped" in piece.encoding for piece in pieces) else ""


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape lie in their storages in one way."""
    if (a.stride, a.offset) != (b.stride, b.offset):
        return a.count == 0
    sizes = [None if t.storage is None else t.storage.size_bytes for t in (a, b)]
    return sizes[0] == sizes[1] or a.dtype is not b.dtype


def _view(t: Tensor) -> tuple[Any, ...]:
    assert t.storage is not None
    return (t.storage.key, t.dtype, t.shape, t.stride, t.offset, _flag(t))


def _flag(t: Tensor) -> str:
    """What the bytes are to be read as, beside the dtype."""
    return t.kind if t.kind in (*FLAGGED, "quantized") else ""


def _told(path: Path, a: Extra | None, b: Extra | None) -> str:
    """`its quantizer.1: 0.5 -> 0.25`."""
    words = ["nothing" if row is None else _word(row) for row in (a, b)]
    return f"its {'.'.join(map(str, path))}: {words[0]} -> {words[1]}"


def _word(row: Extra) -> str:
    return row.type if row.value is None else str(row.value)[:60]
