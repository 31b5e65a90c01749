"""diff: what two checkpoints have in common and apart, whatever their containers.

Knows: what counts as a difference, what is seen through and said. Must not know: printing, how
numbers are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from shlex import quote

from ckptool.checkpoint import Note, Path, Tensor
from ckptool.differences import Aligned, Lone, Pair, Wish, align
from ckptool.errors import CkptError, UsageError
from ckptool.formats import TITLES
from ckptool.formats.collector import paused
from ckptool.keynames import Rule
from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.sides import Side, dotted
from ckptool.values.distance import Tolerance
from ckptool.verbs.diff_files import SideFiles, side_of
from ckptool.verbs.diff_report import Compared, Diff
from ckptool.verbs.diff_ties import changed_ties
from ckptool.verbs.diff_values import NOTHING, Comparer, Question, Verdict, group, same_layout
from ckptool.verbs.leaving import JOINED
from ckptool.verbs.opening import doubting
from ckptool.verbs.reading import Opened, let_go, opened

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
_TOLD = frozenset(("pending-journal", "key-duplicate", "shards-differ", "index-extra-files"))
"""Notes on a file that bear on what is compared."""
_BARE = ("safetensors", "hf-shards")
_RENAMED_TRIES = 200  # pairs of a lost and a new tensor that are held against each other


@dataclass(frozen=True, slots=True)
class Asked:
    """What to compare and how closely. `unwrap` and `strip_prefix` run over the names of both
    files; `quick` stops at the first difference.
    """

    strict: bool = False
    values: bool = False
    bytes: bool = False
    atol: float | None = None
    rtol: float | None = None
    at: str | None = None
    unwrap: bool = False
    strip_prefix: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    quick: bool = False

    @property
    def question(self) -> Question:
        """How numbers are compared. Raises UsageError for a tolerance that is none."""
        if self.atol is None and self.rtol is None:
            return Question(self.values, self.bytes)
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if value is not None and not value >= 0:
                raise UsageError(f"--{name} must be 0 or more")
        return Question(True, self.bytes, Tolerance(self.atol or 0.0, self.rtol or 0.0))

    @property
    def wish(self) -> Wish:
        """Which records are compared."""
        rules = [Rule("unwrap")] if self.unwrap else []
        rules += [Rule("strip-prefix", prefix) for prefix in self.strip_prefix]
        return Wish(self.at, tuple(rules), self.only, self.drop)


def diff_places(
    a: PlaceLike, b: PlaceLike, asked: Asked = Asked(), limits: Limits = DEFAULT,
    progress: Progress | None = None,
) -> Diff:  # fmt: skip
    """Compare two files or folders. Raises CkptError, naming the file."""
    return doubting(lambda patient: _compared(a, b, asked, limits, progress, patient))


def _compared(
    a: PlaceLike, b: PlaceLike, asked: Asked, limits: Limits, progress: Progress | None,
    patient: bool,
) -> Diff:  # fmt: skip
    question = asked.question
    reads = question.values or question.bytes
    with paused(), ExitStack() as stack:
        found, sides, files = [], [], []
        for place in (a, b):  # one pickle at a time
            this = stack.enter_context(
                opened(place, limits, strict=reads, patient=patient, numbers=True, keep=False)
            )
            sides.append(side_of(this, limits))
            files.append(stack.enter_context(closing(SideFiles(this))))
            let_go(this.checkpoint)
            found.append(this._replace(checkpoint=this.checkpoint._replace(handle=None)))
            del this
        names = _names(found[0].checkpoint.file, found[1].checkpoint.file)
        sides = [side._replace(name=name) for side, name in zip(sides, names, strict=True)]
        try:
            comparer = Comparer(files[0], files[1], question)
            result = _Comparison(found, sides, asked, comparer).run(progress)
            for one in files:
                one.check_unchanged()
            return result
        except CkptError as error:
            error.path = error.path or " and ".join(names)
            raise


class _Comparison:
    """Two open files on their way to a Diff."""

    def __init__(
        self, found: Sequence[Opened], sides: Sequence[Side], asked: Asked, comparer: Comparer
    ) -> None:
        self.found = found
        self.sides = sides
        self.asked = asked
        self.comparer = comparer
        self.records = align(sides[0], sides[1], asked.wish)
        self.ties = changed_ties(self.records.pairs)

    def run(self, progress: Progress | None) -> Diff:
        """Compare records, then numbers."""
        verdicts = self._verdicts(progress)
        records = self.records
        tensors = tuple(self._compared(pair, verdicts.get(pair.path)) for pair in records.pairs)
        one, two = (side.checkpoint for side in self.found)
        return Diff(
            one.file, two.file, tensors, records.added, records.removed, records.values,
            records.value_count, self._explained(tensors), self.asked.strict, self._strictly(),
            self._notes(tensors), self.comparer.question.values,
        )  # fmt: skip

    # -- numbers -----------------------------------------------------------------------------
    def _verdicts(self, progress: Progress | None) -> dict[Path, Verdict]:
        """The numbers of every pair of one shape, in the order of the first file."""
        todo = [pair for pair in self.records.pairs if pair.a.shape == pair.b.shape]
        todo.sort(key=lambda pair: _place_of(pair.a))
        total, done = sum(pair.a.size_bytes for pair in todo), 0
        found: dict[Path, Verdict] = {}
        if self.asked.quick and self._records_differ():
            return found
        for pair in todo:
            found[pair.path] = self._verdict(pair)
            if self.asked.quick and self._what(pair, found[pair.path]):
                return found
            done += pair.a.size_bytes
            if progress is not None:
                progress(done, total)
        return found

    def _verdict(self, pair: Pair) -> Verdict:
        kinds = {group(pair.a), group(pair.b)}
        if kinds == {"dense", "meta"}:
            lacking = "a" if pair.a.kind == "meta" else "b"
            return Verdict(False, NOTHING, text=f"the numbers are not in {lacking}")
        if len(kinds) > 1:
            return Verdict(False, NOTHING, text=f"{pair.a.kind} -> {pair.b.kind}", what="kind")
        if kinds == {"foreign"}:
            return self._foreign()
        try:
            inside = [
                side.inside.get(t.path) for side, t in zip(self.sides, pair[2:4], strict=True)
            ]
            return self.comparer.compare(pair.a, pair.b, *inside)
        except CkptError as error:
            error.key = error.key or pair.key
            raise

    def _foreign(self) -> Verdict:
        """What a pickled module keeps in a way of its own; its attributes are plain values."""
        if any(note.slug == "attributes-not-compared" for note in self.records.notes):
            return Verdict(False, NOTHING, text="an object that cannot be compared", what="kind")
        return Verdict(True, NOTHING)

    def _records_differ(self) -> bool:
        """Whether something that counts differs without a look at numbers."""
        records = self.records
        if records.added or records.removed or records.values or self._strictly():
            return True
        return any(self._what(pair, None) for pair in records.pairs)

    # -- what counts -------------------------------------------------------------------------
    def _compared(self, pair: Pair, verdict: Verdict | None) -> Compared:
        return Compared(
            pair, self._what(pair, verdict), verdict, self.ties.get(pair.path, ("", ""))
        )

    def _what(self, pair: Pair, verdict: Verdict | None) -> tuple[str, ...]:
        a, b, strict = pair.a, pair.b, self.asked.strict
        rows = (
            ("shape", a.shape != b.shape),
            ("dtype", a.dtype is not b.dtype),
            ("device", strict and a.device != b.device),
            ("tie", pair.path in self.ties),
            ("order", strict and (pair.table, pair.path[-1]) in self.records.moved),
        )
        found = [word for word, differs in rows if differs]
        if verdict is not None and not verdict.equal:
            found.append(verdict.what)
        return tuple(found)

    def _strictly(self) -> tuple[str, ...]:
        """What counts under --strict and is no matter of one tensor."""
        return ("names",) if self.asked.strict and self.records.renamed else ()

    # -- what is said ------------------------------------------------------------------------
    def _explained(self, tensors: Sequence[Compared]) -> tuple[str, ...]:
        """What was seen through, in words."""
        found = [*self.records.words, *_devices(tensors), *self._containers()]
        moved = len(self.records.moved)
        if moved:
            found.append(f"order of keys ({moved:,} moved)")
        layout = sum(
            row.pair.a.shape == row.pair.b.shape and not same_layout(row.pair.a, row.pair.b)
            for row in tensors
        )
        if layout:
            found.append(f"storage layout ({layout:,} tensor{'s' * (layout != 1)})")
        return (*found, *self._tolerated(tensors))

    def _tolerated(self, tensors: Sequence[Compared]) -> Iterator[str]:
        """Numbers that differ and do not count."""
        near = sum(
            row.verdict is not None and row.verdict.equal and row.verdict.distance is not None
            and row.verdict.distance.differing_count > 0
            for row in tensors
        )  # fmt: skip
        rule = self.comparer.question.tolerance
        if near and rule is not None:
            many = f"{near:,} tensor{'s' * (near != 1)}"
            yield f"{many} within atol {rule.atol:g}, rtol {rule.rtol:g}"

    def _containers(self) -> Iterator[str]:
        one, two = (side.checkpoint for side in self.found)
        if one.format != two.format:
            yield f"container {TITLES[one.format]} -> {TITLES[two.format]}"
        if ("big-endian" in one.traits) != ("big-endian" in two.traits):
            yield "byte order"

    def _notes(self, tensors: Sequence[Compared]) -> tuple[Note, ...]:
        found = [
            note._replace(text=f"{side.name}: {note.text}")
            for side, opened_file in zip(self.sides, self.found, strict=True)
            for note in opened_file.checkpoint.notes if note.slug in _TOLD
        ]  # fmt: skip
        found += self.records.notes
        odd = [
            row for row in tensors
            if row.verdict is not None and row.verdict.equal and row.verdict.sameness is not None
            and row.verdict.sameness.odd
        ]  # fmt: skip
        if odd:
            text = f"{len(odd):,} tensors are the same in numbers and not in bytes: signs of zeros, or bits of NaN ({_some(odd)})"
            found.append(Note("same-numbers-other-bytes", text))
        grads = [row for row in tensors if _grad_differs(row.pair)]
        if grads:
            text = f"requires_grad differs on {len(grads):,} tensors ({_some(grads)}); it does not count"
            found.append(Note("requires-grad", text))
        return (*found, *self._joined(), *self._tensors_alone(), *self._renamed_notes())

    def _joined(self) -> Iterator[Note]:
        """A folder of ranks: its weights are compared alone."""
        for side, one in zip(self.sides, self.found, strict=True):
            if one.checkpoint.format in JOINED:
                text = f"{side.name}: its weights are compared, not what lies beside them"
                yield Note("weights-alone", text)

    def _tensors_alone(self) -> Iterator[Note]:
        """A container of tensors beside one that holds values too: how to leave those out."""
        lone = [row for row in self.records.values if row.a is None or row.b is None]
        holders = {int(row.a is None) for row in lone}
        for number, side in enumerate(self.found):
            other = self.found[1 - number].checkpoint
            if side.checkpoint.format in _BARE and holders == {1 - number} and other.tables:
                at = dotted(other.tables[other.weights or 0].path) or "."
                files = " ".join(quote(one.checkpoint.file) for one in self.found)
                text = f"{self.sides[number].name} holds tensors alone: to compare nothing else"
                yield Note("tensors-alone", text, f"ckptool diff {files} --at {quote(at)}")

    def _renamed_notes(self) -> Iterator[Note]:
        """Lost and new tensors that hold the same numbers, where that is no guess."""
        if self.asked.quick:
            return
        found = _renamed(self.records, self.comparer)
        if found:
            told = ", ".join(f"'{old}' -> '{new}'" for old, new in found[:3])
            more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
            yield Note("renamed", f"the same numbers under another name: {told}{more}")


def _place_of(t: Tensor) -> tuple[int, int]:
    """Where the bytes of a tensor begin, to read a file from front to back."""
    pieces = t.storage.pieces if t.storage is not None else ()
    return (pieces[0].source_id, pieces[0].span.offset) if pieces else (0, 0)


def _devices(tensors: Sequence[Compared]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for row in tensors:
        tags = (row.pair.a.device, row.pair.b.device)
        if tags[0] != tags[1]:
            counts[tags] = counts.get(tags, 0) + 1
    if len(counts) == 1:
        return [f"device {old} -> {new}" for old, new in counts]
    return [f"device {old} -> {new} ({n:,} tensors)" for (old, new), n in counts.items()]


def _grad_differs(pair: Pair) -> bool:
    grads = {pair.a.requires_grad, pair.b.requires_grad}
    return grads == {True, False}


def _some(rows: Sequence[Compared]) -> str:
    listed = ", ".join(row.key for row in rows[:3])
    return f"{listed} and {len(rows) - 3:,} more" if len(rows) > 3 else listed


def _renamed(records: Aligned, comparer: Comparer) -> list[tuple[str, str]]:
    """(old key, new key) of tensors that are each other's only equal."""
    news: dict[object, list[Lone]] = {}
    for row in records.added:
        news.setdefault((row.tensor.shape, row.tensor.dtype, row.tensor.kind), []).append(row)
    found: list[tuple[str, str]] = []
    tries = 0
    for old in records.removed:
        rows = news.get((old.tensor.shape, old.tensor.dtype, old.tensor.kind), [])
        tries += len(rows)
        if tries > _RENAMED_TRIES or group(old.tensor) != "dense" or not old.tensor.count:
            continue
        same = [row for row in rows if comparer.compare(old.tensor, row.tensor).equal]
        if len(same) == 1:
            found.append((old.key, same[0].key))
    counts: dict[str, int] = {}
    for _, new in found:
        counts[new] = counts.get(new, 0) + 1
    return [(old, new) for old, new in found if counts[new] == 1]


def _names(a: str, b: str) -> tuple[str, str]:
    """What both files are called: by their names, by their paths where those are one."""
    short = os.path.basename(a.rstrip("/")), os.path.basename(b.rstrip("/"))
    if all(short) and short[0] != short[1]:
        return short
    return (a, b) if a != b else ("a", "b")
