"""verify of a folder that is read as one checkpoint: its index, every recorded checksum, code.

Knows: that a format's `Shelf` or `Records` lists the records with a checksum and their files.
Must not know: printing, where those records come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptError
from ckptool.formats import TITLES
from ckptool.formats.audit_users import lost_tensors, named_tensors, users_of
from ckptool.formats.folders import Held, read_folder
from ckptool.limits import Limits
from ckptool.places import Folder, reopen
from ckptool.verbs.report import title_of
from ckptool.verbs.verify_findings import code_findings, mends, odd_numbers, wrong_bytes
from ckptool.verbs.verify_report import Coverage, Finding, Verification
from ckptool.verbs.verify_sums import Progress, checksums

_OF_INSPECT = ("dcp-folder", "unpacked")  # what to do with it


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
    shelf: Any = checkpoint.handle.container
    wrong, lost = _wrong(checkpoint, shelf.vouched, progress)
    numbers, strange = odd_numbers(None, checkpoint, lost, progress) if finite else (None, [])
    code = list(code_findings(None, checkpoint, limits))
    count = sum(1 for _ in named_tensors(checkpoint))
    sizes = sum(row.member.size for row in shelf.vouched)
    return Verification(
        folder.path, held.layout, title_of(checkpoint), checkpoint.size_bytes, (*wrong, *code, *strange),
        safe=not code, tensor_count=count, lost=lost_tensors(checkpoint, lost),
        coverage=Coverage(shelf.record_count, len(shelf.vouched), sizes, getattr(shelf, "text", "")),
        numbers=numbers,
        notes=(*(n for n in checkpoint.notes if n.slug not in _OF_INSPECT), *mends(checkpoint, False, count, bool(code))),
    )  # fmt: skip


def _refused(error: CkptError) -> Finding:
    keys = (error.key,) if error.key else tuple(error.findings)
    return Finding(error.slug, error.text, 2, keys=keys, member=error.member or error.path,
                   offset=error.offset)  # fmt: skip


def _wrong(
    checkpoint: Checkpoint, vouched: Sequence[Any], progress: Progress | None
) -> tuple[list[Finding], dict[str, str]]:
    """Records whose bytes are not what was recorded, file by file."""
    found: list[Finding] = []
    lost: dict[str, str] = {}
    total = sum(row.member.span.size for row in vouched)
    done = 0
    by_file: dict[int, list[Any]] = {}
    for row in vouched:
        by_file.setdefault(row.source_id, []).append(row.member)
    for number, address in enumerate(checkpoint.sources):
        members = by_file.get(number, [])
        with reopen(address) as source:
            sums = checksums(source, members, _told(progress, done, total))
        done += sum(member.span.size for member in members)
        rows, storages = wrong_bytes(checkpoint, members, sums)
        for wrong in rows:
            inside = {} if wrong.keys else _over(checkpoint, number, members, wrong)
            found.append(wrong._replace(keys=tuple(inside.values())) if inside else wrong)
            lost.update(dict.fromkeys(inside, wrong.text))
        lost |= storages
    return found, lost


def _over(
    checkpoint: Checkpoint, number: int, members: Sequence[Any], wrong: Finding
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
