"""verify of a folder that is read as one checkpoint: its index, every recorded checksum, code.

Knows: that a format's `Shelf` lists the records of each file with their checksums.
Must not know: printing, where those records come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptError
from ckptool.formats import TITLES
from ckptool.formats.audit import Member
from ckptool.formats.audit_users import lost_tensors, named_tensors
from ckptool.formats.folders import Held, read_folder
from ckptool.limits import Limits
from ckptool.places import Folder, reopen
from ckptool.verbs.verify_findings import code_findings, mends, odd_numbers, wrong_bytes
from ckptool.verbs.verify_report import Coverage, Finding, Verification
from ckptool.verbs.verify_sums import Progress, Sum, checksums


def verify_joined(
    folder: Folder, held: Held, finite: bool, limits: Limits, progress: Progress | None
) -> Verification:
    """Check all of it. A folder that cannot be read is a finding, not an error."""
    title = TITLES[held.layout]
    try:
        checkpoint = read_folder(folder, limits, held)
    except CkptError as error:
        return Verification(
            folder.path, held.layout, title, 0, (_refused(error),),
            safe=False if error.slug == "unsafe-pickle" else None, notes=held.notes,
        )  # fmt: skip
    records = _Records(checkpoint, progress)
    records.check()
    lost = records.lost
    numbers, strange = odd_numbers(None, checkpoint, lost, progress) if finite else (None, [])
    code = list(code_findings(None, checkpoint, limits))
    count = sum(1 for _ in named_tensors(checkpoint))
    return Verification(
        folder.path, held.layout, title, checkpoint.size_bytes, (*records.wrong, *code, *strange),
        safe=not code, tensor_count=count, lost=lost_tensors(checkpoint, lost),
        coverage=records.coverage,
        numbers=numbers,
        notes=(*(n for n in checkpoint.notes if n.slug != "dcp-folder"), *mends(checkpoint, False, count, bool(code))),
    )  # fmt: skip


def _refused(error: CkptError) -> Finding:
    keys = (error.key,) if error.key else tuple(error.findings)
    return Finding(error.slug, error.text, 2, keys=keys, member=error.member or error.path,
                   offset=error.offset)  # fmt: skip


class _Records:
    """The records of all files, summed file by file."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self.coverage = Coverage()
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
            self._take(members, proven, sums)
        if self._progress is not None:
            self._progress(total, total)

    def _take(
        self, members: Sequence[Member], proven: Sequence[Member], sums: Sequence[Sum]
    ) -> None:
        wrong, lost = wrong_bytes(self._checkpoint, proven, sums)
        self.wrong += wrong
        self.lost |= lost
        have = self.coverage
        sizes = sum(member.size for member in proven)
        self.coverage = Coverage(
            have.record_count + len(members), have.checked_count + len(proven),
            have.checked_bytes + sizes, have.text,
        )  # fmt: skip


def _told(progress: Progress | None, before: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, _: progress(min(before + done, total), total)
