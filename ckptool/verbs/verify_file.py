"""verify of one open file: whether it is whole, and what loading it would run.

Knows: the order in which a file is checked. Must not know: printing.
"""

from __future__ import annotations

from dataclasses import replace

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import CkptError
from ckptool.formats import read
from ckptool.formats.audit import UNPROVABLE, members_of, odd_head
from ckptool.formats.audit_users import lost_tensors, named_tensors
from ckptool.formats.collector import paused
from ckptool.formats.salvage import container_of
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.verbs.opening import settle_after
from ckptool.verbs.report import title_of
from ckptool.verbs.verify_findings import code_findings, mends, odd_bytes, odd_numbers, wrong_bytes
from ckptool.verbs.verify_refused import verify_refused
from ckptool.verbs.verify_report import Coverage, Finding, Verification
from ckptool.verbs.verify_sums import Progress, checksums
from ckptool.verbs.verify_torch import loading

_SAID = frozenset(("torchscript", "torch-package", "no-checksums"))  # said as findings


@paused()
def verify_source(
    source: Source, finite: bool, limits: Limits, progress: Progress | None,
    said: tuple[Note, ...] = (),
) -> Verification:  # fmt: skip
    """Check one open file. Raises CkptError for what is no checkpoint at all, Doubted for one that
    is `patient` and lies.
    """
    try:
        checkpoint = read(source, limits, keep=False)
    except CkptError as error:
        settle_after(source, error)
        if error.slug == "input-changed" or error.slug.startswith("remote-"):
            raise  # that says nothing of the file
        container = container_of(source)
        if container is None:
            raise
        found = verify_refused(source, container, error, finite, limits, progress)
        return _with_notes(found, said)
    return _with_notes(_read(source, checkpoint, finite, limits, progress), said)


def _with_notes(found: Verification, said: tuple[Note, ...]) -> Verification:
    return replace(found, notes=(*said, *found.notes)) if said else found


def _read(
    source: Source, checkpoint: Checkpoint, finite: bool, limits: Limits,
    progress: Progress | None,
) -> Verification:  # fmt: skip
    wrong, lost, coverage = _summed(source, checkpoint, progress)
    source.settle()
    numbers, strange = odd_numbers(source, checkpoint, lost, progress) if finite else (None, [])
    code = list(code_findings(source, checkpoint, limits))
    names = lost_tensors(checkpoint, lost)
    notes = [note for note in checkpoint.notes if note.slug not in _SAID]
    odd = odd_head(checkpoint)
    notes += [Note("system-info", odd)] if odd else []
    damage = (*wrong, *odd_bytes(checkpoint))
    count = sum(1 for _ in named_tensors(checkpoint))
    return Verification(
        checkpoint.file, checkpoint.format, title_of(checkpoint), checkpoint.size_bytes,
        findings=(*damage, *code, *strange), safe=not code, tensor_count=count, lost=names,
        coverage=coverage,
        loading=loading(checkpoint),
        numbers=numbers,
        notes=(*notes, *mends(checkpoint, bool(damage), count - len(names), bool(code))),
    )  # fmt: skip


def _summed(
    source: Source, checkpoint: Checkpoint, progress: Progress | None
) -> tuple[list[Finding], dict[str, str], Coverage]:
    """What is wrong with its records, the storages lost by that, how many were proven."""
    members = members_of(checkpoint)
    proven = [member for member in members if member.crc is not None]
    wrong, lost = wrong_bytes(checkpoint, proven, checksums(source, proven, progress))
    total = sum(member.size for member in proven)
    text = UNPROVABLE.get(checkpoint.format, "")
    return wrong, lost, Coverage(len(members), len(proven), total, text)
