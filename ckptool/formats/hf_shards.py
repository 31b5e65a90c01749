"""A checkpoint in several files, as Hugging Face writes them: an index and its shards (formats 3.8).

Knows: how shards become one checkpoint, one open at a time, and that index and shards must
agree. Must not know: what kind of file a shard is, verbs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint, Extra, Note, Storage, Table, Tensor
from ckptool.errors import CkptError, HeaderInvalid, KeyDuplicate, SpecialFile, Unsupported
from ckptool.formats import read as read_file
from ckptool.formats.collector import paused
from ckptool.formats.folders import look, read_folder
from ckptool.formats.hf_index import Index, read_index
from ckptool.formats.judge import CODE
from ckptool.formats.moved import Moved, Verdicts
from ckptool.formats.rows import ALIAS_PLACES, OWN, odd_keys
from ckptool.formats.salvaged import WHOLE
from ckptool.formats.wording import some
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Folder
from ckptool.spans import Address

NAME = "hf-shards"
TITLE = "Hugging Face shards"
_AGAIN = "download the folder again, or repair the index"
_METADATA = ("__metadata__",)


def read(folder: Folder, limits: Limits = DEFAULT, index_name: str | None = None) -> Checkpoint:
    """Read the checkpoint of a folder: by its index (or the one named), or its only file.

    With an index: one table with the keys in the order of the index; `sources` are the shards
    in order of first mention, the keys of storages begin with the number of theirs ("3/0").
    Raises what `folders.look` and `read_index` raise, SpecialFile for missing shards,
    HeaderInvalid when index and shards disagree, Unsupported for a shard that is no plain
    state_dict.
    """
    notes: tuple[Note, ...] = ()
    if index_name is None:
        held = look(folder)
        notes = held.notes
        if held.layout not in ("", NAME):
            return read_folder(folder, limits, held)
        if not held.is_index:
            inner, name = os.path.split(held.name)
            with (folder.below(inner) if inner else folder).child(name) as source:
                found = read_file(source, limits)
            return found._replace(notes=(*notes, *found.notes))
        index_name = held.name
    index = read_index(folder, index_name, limits)
    notes += index.notes + _check_presence(folder, index, limits)
    with paused() as let_go:
        merger = Merger(index, limits)
        for number, name in enumerate(index.shards):
            with folder.child(name) as source:
                merger.add(number, name, read_file(source, limits), source.size)
            let_go()
        return merger.finish(folder.path, notes)


def _check_presence(folder: Folder, index: Index, limits: Limits) -> tuple[Note, ...]:
    """Raise SpecialFile, naming every shard that is not there; a note on files not named."""
    files = folder.list()
    there = set(files)
    missing = [name for name in index.shards if name not in there and not folder.holds(name)]
    if missing:
        raise _missing(index, missing, limits)
    return unnamed(files, index)


def unnamed(files: Sequence[str], index: Index) -> tuple[Note, ...]:
    """A note on files like the shards that the index does not name."""
    named = set(index.shards)
    suffixes = tuple({os.path.splitext(name)[1] or name for name in index.shards})
    others = [name for name in files if name.endswith(suffixes) and name not in named]
    if not others:
        return ()
    text = f"{len(others)} files beside the shards that the index does not name: {some(others)}"
    return (Note("index-extra-files", text),)


def _missing(index: Index, missing: Sequence[str], limits: Limits) -> SpecialFile:
    counts = dict.fromkeys(missing, 0)
    for name in index.files.values():
        if name in counts:
            counts[name] += 1
    said = [f"'{name}' ({count:,} of {len(index.files):,} keys)" for name, count in counts.items()]
    what = "a shard is" if len(said) == 1 else f"{len(said)} of {len(index.shards)} shards are"
    more = f" and {len(said) - 3} more" if len(said) > 3 else ""
    error = SpecialFile(
        f"{what} missing: {', '.join(said[:3])}{more}",
        path=index.path,
        hint=f"download what is missing into the folder{WHOLE}",
    )
    error.findings = _capped(said, len(said), limits)
    return error


class Merger:
    """Shards added one by one; what does not agree is gathered and refused at the end."""

    def __init__(self, index: Index, limits: Limits) -> None:
        self.index = index
        self.limits = limits
        self.homes: dict[str, str] = {}  # key -> the first shard that holds it
        self.rows: dict[str, Tensor] = {}
        self.others: dict[str, tuple[str, str]] = {}
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.sources: list[Address] = []
        self.size_bytes = index.size_bytes
        self.traits: frozenset[str] = frozenset()
        self.problems: list[str] = []
        self.problem_count = 0
        self.beside = _Beside()
        self.absent: dict[str, str] = {}  # keys that a tolerant reading does without

    def add(self, number: int, name: str, found: Checkpoint, size_bytes: int) -> None:
        """One shard, read. Raises Unsupported, KeyDuplicate."""
        table = _plain_table(found, name)
        moved = Moved(number)
        self.tensors += moved.tensors(found.tensors)
        self.storages += [moved.storage(storage) for storage in found.storages]
        self._tensors(moved.tensors(table.tensors), name)
        for key, kind in table.others:
            if self._is_new(key, name):
                self.others[key] = (key, kind)
        self.sources += found.sources
        self.size_bytes += size_bytes
        self.traits |= found.traits
        self.beside.add(name, found, table.metadata)

    def _tensors(self, tensors: Sequence[Tensor], name: str) -> None:
        """A second name of a listed one need not be in the index itself."""
        files = self.index.files
        known = set()
        if any(tensor.key not in files for tensor in tensors):
            known = {_place(tensor) for tensor in tensors if tensor.key in files}
        for tensor in tensors:
            if tensor.key not in files and _place(tensor) not in known:
                self._problem(f"'{tensor.key}' is in {name}, the index does not know it")
            elif self._is_new(tensor.key, name):
                self.rows[tensor.key] = tensor

    def _is_new(self, key: str, name: str) -> bool:
        """Whether this shard may hold the key; where not, that is a problem."""
        said = self.index.files.get(key, name)
        if key in self.homes:
            self._problem(f"'{key}' is in two shards: {self.homes[key]} and {name}")
            return False
        self.homes[key] = name
        if said != name:
            self._problem(f"'{key}' is in {name}, the index says {said}")
        return said == name

    def _problem(self, text: str) -> None:
        self.problem_count += 1
        if len(self.problems) < self.limits.listed:
            self.problems.append(text)

    def finish(self, path: str, notes: tuple[Note, ...]) -> Checkpoint:
        """The whole. Raises HeaderInvalid when something did not agree."""
        for key, name in self.index.files.items():
            if key not in self.homes and key not in self.absent:
                self._problem(f"'{key}' is not in {name}, where the index has it")
        if self.problem_count:
            raise self._refusal()
        rows = [self.rows.pop(key) for key in self.index.files if key in self.rows]
        rows = self.beside.with_aliases(rows, self.rows)
        table = Table(
            (), tuple(rows), self.beside.layers or None, others=tuple(self.others.values())
        )
        return Checkpoint(
            file=path, format=NAME, size_bytes=self.size_bytes, sources=tuple(self.sources),
            tables=(table,), weights=0, tensors=tuple(self.tensors), storages=tuple(self.storages),
            extras=self.beside.merged_extras(), globals=tuple(self.beside.verdicts.rows),
            notes=(*notes, *_size_notes(self.index, rows), *self.beside.merged_notes()),
            handle=self.index, traits=self.traits,
        )  # fmt: skip

    def _refusal(self) -> CkptError:
        more = f", and {self.problem_count - 1:,} more such" if self.problem_count > 1 else ""
        calls = [row for row in self.beside.verdicts.rows if row.verdict == CODE]
        also = f"; {calls[0].member} could run code: {calls[0].name}" if calls else ""
        error = HeaderInvalid(
            f"the index and its shards disagree: {self.problems[0]}{more}{also}",
            path=self.index.path,
            hint=_AGAIN,
        )
        error.findings = _capped(self.problems, self.problem_count, self.limits)
        return error


def _plain_table(found: Checkpoint, name: str) -> Table:
    """The root state_dict of a shard. Raises Unsupported, KeyDuplicate."""
    if not found.tables and not found.tensors:
        return Table((), ())
    nested = next((table.path for table in found.tables if table.path), None)
    if nested:
        what = f"its state_dict is nested, at '{'.'.join(map(str, nested))}'"
    elif len(found.tables) != 1 or found.tables[0].kind != "state_dict":
        what = "it holds no state_dict"
    elif "inspect-only" in found.traits:
        what = f"a {found.format} file"
    else:
        table = found.tables[0]
        if table.duplicate_keys:
            key = table.duplicate_keys[0]
            raise KeyDuplicate(
                "a key stands twice in one shard", path=found.file, key=key, hint=_AGAIN
            )
        odd = sorted(odd_keys(found, table))
        if not odd:
            return table
        what = f"a key in it is no text: {odd[0][:80]}"
    raise Unsupported(
        f"not a plain shard: {what}",
        path=found.file,
        hint=f"give {name} by itself to see what is in it",
    )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of one tensor have in common."""
    return (id(tensor.storage or tensor), tensor.dtype, tensor.shape, tensor.stride, tensor.offset)


class _Beside:
    """What shards hold beside their tensors, each thing once."""

    def __init__(self) -> None:
        self.layers: dict[str, Any] = {}  # the _metadata of state_dicts
        self.verdicts = Verdicts()
        self._texts: dict[str, Any] = {}  # the __metadata__ of safetensors
        self._extras: dict[Any, Extra] = {}
        self._notes: dict[tuple[str, str], list[str]] = {}
        self._conflicts: list[Note] = []

    def add(self, name: str, found: Checkpoint, layers: Mapping[str, Any] | None) -> None:
        """One shard's; where two disagree, the first counts and a note says so."""
        self.verdicts.add(found.globals, name)
        self._merge(self.layers, layers or {}, name)
        for extra in found.extras:
            if extra.path == _METADATA and isinstance(extra.value, dict):
                self._merge(self._texts, extra.value, name)
            else:
                self._merge(self._extras, {extra.path: extra}, name)
        for note in found.notes:
            self._notes.setdefault((note.slug, note.text), []).append(name)

    def _merge(self, into: dict[Any, Any], rows: Mapping[Any, Any], name: str) -> None:
        for key, value in rows.items():
            if into.setdefault(key, value) != value:
                what = key if isinstance(key, str) else ".".join(map(str, key))
                text = f"{name} has another '{what}' than the shards before it; the first is kept"
                self._conflicts.append(Note("shards-differ", text))

    def with_aliases(self, rows: list[Tensor], aliases: Mapping[str, Tensor]) -> list[Tensor]:
        """The rows, and second names that the index leaves out: where our writer notes that
        they stood, else at the end.
        """
        left = dict(aliases)
        for key, at in sorted(self._alias_places(), key=lambda row: row[1]):
            if key in left and 0 <= at <= len(rows):
                rows.insert(at, left.pop(key))
        return [*rows, *left.values()]

    def _alias_places(self) -> list[tuple[str, int]]:
        import json

        try:
            found = json.loads(self._texts.get(ALIAS_PLACES, "{}"))
        except (ValueError, RecursionError):  # anybody's text: then it says nothing
            return []
        places = found.items() if isinstance(found, dict) else ()
        return [(key, at) for key, at in places if type(at) is int]

    def merged_extras(self) -> tuple[Extra, ...]:
        """All extras; the texts of all safetensors headers as one."""
        extras = tuple(self._extras.values())
        if not self._texts:
            return extras
        shown = [f"{key}={value}" for key, value in self._texts.items() if not key.startswith(OWN)]
        text = ", ".join(shown[:8])
        return (Extra(_METADATA, "dict", dict(self._texts), text), *extras)

    def merged_notes(self) -> tuple[Note, ...]:
        """A note of one shard names it; one of several says how many."""
        rows = [
            Note(
                slug, f"{names[0]}: {text}" if len(names) == 1 else f"{text} ({len(names)} shards)"
            )
            for (slug, text), names in self._notes.items()
        ]
        return (*rows, *self._conflicts)


def _size_notes(index: Index, rows: Sequence[Tensor]) -> tuple[Note, ...]:
    """Writers count tied tensors once or each time; a sum that is neither is mentioned."""
    every = sum(tensor.size_bytes for tensor in rows)
    if index.total_size in (None, every):
        return ()
    first = {id(tensor.storage or tensor): tensor for tensor in reversed(rows)}
    once = sum(tensor.size_bytes for tensor in first.values())
    stored = sum(t.storage.size_bytes if t.storage else t.size_bytes for t in first.values())
    if index.total_size in (once, stored):
        return ()
    text = f"the index says {index.total_size:,} bytes in all, its tensors have {every:,}"
    return (Note("index-total-size", text),)


def _capped(rows: Sequence[str], count: int, limits: Limits) -> tuple[str, ...]:
    shown = tuple(rows[: limits.listed])
    return (*shown, f"and {count - len(shown):,} more") if count > len(shown) else shown
