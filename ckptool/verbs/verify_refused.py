"""verify of a file that a strict reading refuses: which tensors are whole in spite of it.

Knows: what can still be told. Must not know: printing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import CkptError, LimitExceeded
from ckptool.formats import TITLES
from ckptool.formats.assemble import BEFORE
from ckptool.formats.audit import (
    UNPROVABLE,
    Member,
    storage_members,
)
from ckptool.formats.audit_users import lost_tensors, named_tensors, users_of
from ckptool.formats.salvage_zip import find_records
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.verbs.salvage import WRONG, after_refusal
from ckptool.verbs.verify_findings import code_findings, mends, odd_numbers
from ckptool.verbs.verify_report import CODE, Coverage, Finding, Verification
from ckptool.verbs.verify_sums import Progress, checksums
from ckptool.verbs.verify_torch import Loading, loading

_COUNT_IN_TEXT = re.compile(r"; [\d,]+ of [\d,]+ tensors are whole(, cut at '.*')?$", re.DOTALL)


def verify_refused(
    source: Source, container: str, error: CkptError, finite: bool, limits: Limits,
    progress: Progress | None,
) -> Verification:  # fmt: skip
    """What is wrong, and which tensors are whole in spite of it."""
    main = Finding(
        error.slug, _COUNT_IN_TEXT.sub("", error.text), 2,
        keys=(error.key,) if error.key else (), member=error.member, offset=error.offset,
    )  # fmt: skip
    title = TITLES[container]
    try:
        found = after_refusal(source, limits, error, progress)
    except CkptError:
        early = _before_the_damage(error)
        asked = container == "torch-zip" and not isinstance(error, LimitExceeded)
        rest = _records(source, limits, progress) if asked else []
        return Verification(
            source.name, container, title, source.size, (main, *early, *rest),
            safe=False if early else None, notes=_hints(error),
        )  # fmt: skip
    checkpoint = found.checkpoint
    numbers, strange = (
        odd_numbers(source, checkpoint, found.lost, progress) if finite else (None, [])
    )
    code = list(code_findings(source, checkpoint, limits))
    names = lost_tensors(checkpoint, found.lost)
    members = storage_members(checkpoint)
    stored = sum(1 for storage in checkpoint.storages if storage.pieces)
    text = UNPROVABLE.get(container, "")
    count = sum(1 for _ in named_tensors(checkpoint))
    return Verification(
        source.name, container, title, source.size,
        findings=(main, *_lost(checkpoint, found.lost), *code, *strange),
        safe=not code, tensor_count=count, lost=names,
        coverage=Coverage(stored, len(members), sum(m.size for m in members), text),
        loading=Loading(None, "", loading(checkpoint).blockers),
        numbers=numbers,
        notes=tuple(mends(checkpoint, True, count - len(names), bool(code))) or _hints(error),
    )  # fmt: skip


def _before_the_damage(error: CkptError) -> tuple[Finding, ...]:
    """Calls that a loader makes before it meets the damage."""
    calls = error.text.partition(f"; {BEFORE} ")[2]
    text = f"could run code: {calls}, before the damage"
    return (Finding("unsafe-pickle", text, 2, CODE, member=error.member),) if calls else ()


_LOST_SLUGS = {WRONG: "crc-mismatch", "cut": "truncated", "cut off": "truncated"}


def _lost(checkpoint: Checkpoint, lost: dict[str, str]) -> Iterator[Finding]:
    """One finding a storage that is not whole, named by its tensors."""
    users = users_of(checkpoint)
    for key, why in lost.items():
        slug = _LOST_SLUGS.get(why, "storage-size")
        yield Finding(slug, why, 2, keys=users.get(key, ()), member=f"data/{key}")


def _records(source: Source, limits: Limits, progress: Progress | None) -> list[Finding]:
    """Where the pickle that names the tensors is damaged: which storages are whole."""
    try:
        records = find_records(source, limits)
    except CkptError:
        return []
    rows = {name: entry for name, entry in records.found.items() if name.startswith("data/")}
    members = [
        Member(name, Span(e.data_offset, e.compressed_size), bool(e.method), e.size, e.crc, name)
        for name, e in rows.items()
        if e.crc
    ]
    sums = checksums(source, members, progress)
    whole = sum(s.problem is None and s.crc == m.crc for m, s in zip(members, sums, strict=True))
    if not members:
        return []
    text = f"{whole:,} of {len(members):,} storages have their recorded checksums, but which tensors they are cannot be told"
    return [Finding("pickle-invalid", text, 2)]


def _hints(error: CkptError) -> tuple[Note, ...]:
    return (Note("hint", error.hint),) if error.hint else ()
