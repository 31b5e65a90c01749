"""The Python API of statistics: what `ckptool inspect --stats` tells, as a function with typed rows.

Knows: verbs, the look. Must not know: click; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.render import render
from ckptool.verbs.inspect import Selection, inspect_place
from ckptool.verbs.report import Inspection
from ckptool.verbs.stats_plan import Wish


class TensorStats(NamedTuple):
    """One tensor: `element_count` numbers, of which so many are zero, NaN and infinite; `min`,
    `max`, `mean`, `std` (unbiased) and `norm` (L2) are of the finite ones, in double precision; of
    quantized tensors all are of raw codes. None is what there is not: `min` and `max` of complex
    numbers, `std` of a single one, and everything where `reason` says why. `sha256` is of
    `tensor.contiguous()`'s bytes, little-endian, where it was asked for.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None
    element_count: int | None
    zero_count: int | None
    nan_count: int | None
    inf_count: int | None
    min: float | int | None
    max: float | int | None
    mean: float | complex | None
    std: float | None
    norm: float | None
    sha256: str | None
    reason: str


_FIGURES = TensorStats._fields[3:12]


@dataclass(frozen=True, slots=True, eq=False)
class Stats(Mapping[str, TensorStats]):
    """The tensors of a state_dict by key, in order: `stats["fc.weight"].mean`. As text it is what
    `ckptool inspect --stats` prints, as a dict what that prints with `--json`.
    """

    rows: tuple[TensorStats, ...]
    inspection: Inspection
    _by_key: dict[str, TensorStats] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {row.key: row for row in self.rows})

    @property
    def file(self) -> str:
        """The file's name."""
        return self.inspection.checkpoint.file

    def to_dict(self) -> dict[str, Any]:
        """JSON schema 1 of inspect: `stats` and `sha256` stand beside each tensor's shape."""
        return self.inspection.to_dict()

    def __getitem__(self, key: str) -> TensorStats:
        return self._by_key[key]

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __repr__(self) -> str:
        return f"<statistics of {len(self.rows)} tensors of {self.file!r}>"

    def __str__(self) -> str:
        return render("table", self.to_dict())

    def _repr_html_(self) -> str:
        return render("html", self.to_dict())


def stats(
    place: PlaceLike,
    *,
    hash: bool = False,  # noqa: A002 - the command line's word
    at: str | None = None,
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    sort: str = "order",
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = DEFAULT,
) -> Stats:
    """Read the tensors of a state_dict once, in constant memory and without torch, and say what
    their numbers are like; `hash` adds the SHA-256 of each one's bytes.

    `at` chooses the state_dict, `only` and `drop` are globs over keys, `progress` is called with
    (bytes done, bytes in all). Raises CkptError, naming the file.
    """
    selection = Selection(at, _words(only), _words(drop), sort, limit)
    found = inspect_place(place, selection, limits, wish=Wish(True, hash, progress))
    return Stats(tuple(_rows(found)), found)


def _words(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def _rows(found: Inspection) -> Iterator[TensorStats]:
    measured = found.measured.rows if found.measured is not None else ()
    for tensor, row in zip(found.rows, measured, strict=True):
        figures = [getattr(row.stats, name, None) for name in _FIGURES]
        dtype = tensor.dtype.name if tensor.dtype else None
        head = (tensor.key, tensor.shape, dtype)
        yield TensorStats._make((*head, *figures, row.sha256, row.reason))
