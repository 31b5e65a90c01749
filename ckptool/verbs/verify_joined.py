"""verify of a folder that is read as one checkpoint: its index, every recorded checksum, code.

Knows: that a format's `Shelf` or `Records` gives the records of each file with their checksums.
Must not know: printing, where those records come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptError
from ckptool.formats import TITLES
from ckptool.formats.audit import Member
from ckptool.formats.audit_users import lost_tensors, named_tensors, users_of
from ckptool.formats.folders import Held, read_folder
from ckptool.formats.salvage import SALVAGED_FOLDERS
from ckptool.limits import Limits
from ckptool.places import Folder, reopen
from ckptool.verbs.report import title_of
from ckptool.verbs.salvage import folder_after_refusal
from ckptool.verbs.verify_findings import code_findings, mends, odd_numbers, wrong_bytes
from ckptool.verbs.verify_report import Coverage, Finding, Verification
from ckptool.verbs.verify_sums import Progress, Sum, checksums

_OF_INSPECT = ("dcp-folder", "unpacked", "zero-folder")  # what to do with it


def verify_joined(
    folder: Folder, held: Held, finite: bool, limits: Limits, progress: Progress | None
) -> Verification:
    """Check all of it. A folder that cannot be read is a finding, not an error."""
    try:
        checkpoint = read_folder(folder, limits, held)
    except CkptError as error:
        return _refused(folder, held, error, limits)
    records = _Records(checkpoint, progress)
    records.check()
    lost = records.lost
    numbers, strange = odd_numbers(None, checkpoint, lost, progress) if finite else (None, [])
    code = list(code_findings(None, checkpoint, limits))
    count = sum(1 for _ in named_tensors(checkpoint))
    damaged = bool(records.wrong) and held.layout in SALVAGED_FOLDERS
    return Verification(
        folder.path, held.layout, title_of(checkpoint), checkpoint.size_bytes,
        (*records.wrong, *code, *strange),
        safe=not code, tensor_count=count, lost=lost_tensors(checkpoint, lost),
        coverage=records.coverage,
        numbers=numbers,
        notes=(*(n for n in checkpoint.notes if n.slug not in _OF_INSPECT), *mends(checkpoint, damaged, count - len(lost), bool(code))),
    )  # fmt: skip


def _refused(folder: Folder, held: Held, error: CkptError, limits: Limits) -> Verification:
    """What is wrong, and which tensors are whole in spite of it, where that can be told."""
    main = _of_error(error, folder)
    title, code = TITLES[held.layout], error.slug == "unsafe-pickle"
    try:
        found = folder_after_refusal(folder, held, limits, error)
    except CkptError:
        return Verification(folder.path, held.layout, title, 0, (main,),
                            safe=False if code else None, notes=held.notes)  # fmt: skip
    checkpoint = found.checkpoint
    lost = lost_tensors(checkpoint, found.lost)
    known = list(code_findings(None, checkpoint, limits))
    count = sum(1 for _ in named_tensors(checkpoint))
    return Verification(
        folder.path, held.layout, title_of(checkpoint), checkpoint.size_bytes,
        (*_causes(main, lost), *known), safe=not known, tensor_count=count, lost=lost,
        notes=(*held.notes, *mends(checkpoint, True, count - len(lost), bool(known))),
    )  # fmt: skip


def _causes(main: Finding, lost: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """One finding a cause, named by its tensors; the error itself where it is none of them."""
    causes: dict[str, list[str]] = {}
    for name, why in lost:
        causes.setdefault(why, []).append(name)
    if main.text not in causes:
        yield main._replace(keys=() if causes else main.keys)
    for why, names in causes.items():
        same = why == main.text
        yield Finding(main.slug, why, 2, keys=tuple(names), member=main.member if same else None)


def _of_error(error: CkptError, folder: Folder) -> Finding:
    keys = (error.key,) if error.key else tuple(error.findings)
    path = None if error.path == folder.path else error.path
    return Finding(error.slug, error.text, 2, keys=keys, member=error.member or path,
                   offset=error.offset)  # fmt: skip


class _Records:
    """The records of all files, summed file by file."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self.coverage = Coverage(text=getattr(checkpoint.handle.container, "text", ""))
        self.wrong: list[Finding] = []
        self.lost: dict[str, str] = {}

    def check(self) -> None:
        """Compare every checksum. Raises InputChanged, SpecialFile."""
        shelf: Any = self._checkpoint.handle.container
        done, total = 0, sum(address.size_bytes for address in self._checkpoint.sources)
        for number, address in enumerate(self._checkpoint.sources):
            with reopen(address) as source:
                members = shelf.records(source, number)
                proven = [member for member in members if member.crc is not None]
                sums = checksums(source, proven, _told(self._progress, done, total))
            done += address.size_bytes
            self._take(number, members, proven, sums)
        if self._progress is not None:
            self._progress(total, total)

    def _take(
        self, number: int, members: Sequence[Member], proven: Sequence[Member], sums: Sequence[Sum]
    ) -> None:
        rows, lost = wrong_bytes(self._checkpoint, proven, sums)
        for wrong in rows:
            inside = {} if wrong.keys else _over(self._checkpoint, number, proven, wrong)
            self.wrong.append(wrong._replace(keys=tuple(inside.values())) if inside else wrong)
            self.lost.update(dict.fromkeys(inside, wrong.text))
        self.lost |= lost
        have = self.coverage
        sizes = sum(member.size for member in proven)
        self.coverage = Coverage(
            have.record_count + len(members), have.checked_count + len(proven),
            have.checked_bytes + sizes, have.text,
        )  # fmt: skip


def _over(
    checkpoint: Checkpoint, number: int, members: Sequence[Member], wrong: Finding
) -> dict[str, str]:
    """{storage: tensor} of all that lie, at least in part, in a record of file `number` that is
    wrong: the flat tensor of a rank holds many.
    """
    spans = [m.span for m in members if m.name == wrong.member and m.span.offset == wrong.offset]
    names = users_of(checkpoint)
    found: dict[str, str] = {}
    for storage in checkpoint.storages:
        for piece in storage.pieces:
            low, high = piece.span.offset, piece.span.offset + piece.span.size
            if piece.source_id == number and any(
                span.offset < high and low < span.offset + span.size for span in spans
            ):
                found[storage.key] = names.get(storage.key, (storage.key,))[0]
    return found


def _told(progress: Progress | None, before: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, _: progress(min(before + done, total), total)
