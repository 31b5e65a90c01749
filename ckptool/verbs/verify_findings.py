"""The kinds of findings that every checked file may have: wrong bytes, code, numbers; and mends.

Knows: which exit status each stands for. Must not know: printing, what order files are read in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

from ckptool.checkpoint import Checkpoint, Note
from ckptool.commands import convert_command
from ckptool.errors import CkptError
from ckptool.formats import read
from ckptool.formats.audit import Member, archive_of, members_of
from ckptool.formats.audit_users import users_of
from ckptool.formats.audit_zip import odd_layout
from ckptool.formats.judge import CODE as COULD_RUN
from ckptool.formats.salvage import SALVAGED_FOLDERS
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.verbs.naming import clean_name, part_name
from ckptool.verbs.salvage import WRONG
from ckptool.verbs.verify_finite import count_nonfinite
from ckptool.verbs.verify_report import CODE, DAMAGE, NUMBERS, Finding, Numbers
from ckptool.verbs.verify_sums import Progress, Sum

_NOT_INFLATED = frozenset(("crc-mismatch", "storage-size", "truncated"))
"""What the inflater says of wrong bytes."""


def wrong_bytes(
    checkpoint: Checkpoint, members: Sequence[Member], sums: Sequence[Sum]
) -> tuple[list[Finding], dict[str, str]]:
    """Records whose bytes are not what was recorded, and the storages among them. One that the
    disk does not give makes the file one that cannot be read as a whole.
    """
    found: list[Finding] = []
    lost: dict[str, str] = {}
    bad = [
        (member, total) for member, total in zip(members, sums, strict=True)
        if total.problem is not None or total.crc != member.crc
    ]  # fmt: skip
    users = users_of(checkpoint) if bad else {}
    for member, total in bad:
        problem = total.problem
        text = WRONG if problem is None else problem.text
        damaged = problem is None or (member.deflated and problem.slug in _NOT_INFLATED)
        slug = "crc-mismatch" if damaged or problem is None else problem.slug
        keys = users.get(member.storage or "", ())
        place = member.span.offset
        found.append(Finding(slug, text, 1 if damaged else 2, DAMAGE, keys, member.name, place))
        if member.storage is not None:
            lost[member.storage] = text
    return found, lost


def odd_bytes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Bytes that no checksum covers and torch has not written."""
    archive = archive_of(checkpoint)
    for odd in odd_layout(archive) if archive is not None else ():
        yield Finding("zip-layout", odd.text, member=odd.member, offset=odd.offset)


# -- what could run ----------------------------------------------------------------------------
_SCRIPTS = {
    "torchscript": "TorchScript: torch.jit.load runs the code inside (code/)",
    "torch-package": "torch.package: PackageImporter runs the code inside",
}


def code_findings(
    source: Source | None, checkpoint: Checkpoint, limits: Limits
) -> Iterator[Finding]:
    """Everything that loading the file could run."""
    if checkpoint.format in _SCRIPTS:
        yield Finding(checkpoint.format, _SCRIPTS[checkpoint.format], kind=CODE)
    for row in checkpoint.globals:
        if row.verdict == COULD_RUN:
            detail = f", {row.detail}" if row.detail else ""
            text = f"could run code: {row.name}{detail}"
            yield Finding("unsafe-pickle", text, kind=CODE, member=row.member, offset=row.offset)
    if checkpoint.format == "torch-export" and source is not None:
        yield from _inner_pickles(source, checkpoint, limits)


def _inner_pickles(source: Source, checkpoint: Checkpoint, limits: Limits) -> Iterator[Finding]:
    """torch.export.load unpickles the sample inputs, and weights that say so."""
    for member in members_of(checkpoint):
        inside = member.name.startswith("data/") and member.name.endswith(".pt")
        if not inside or member.deflated:
            continue
        try:
            found = read(source.window(Span(member.span.offset, member.span.size)), limits)
        except CkptError as error:
            text = f"a pickle inside that cannot be read: {error.text}"
            yield Finding(error.slug, text, 1, CODE, member=member.name, offset=member.span.offset)
            continue
        for row in found.globals:
            if row.verdict == COULD_RUN:
                text = f"could run code: {row.name}, in the file inside, {row.member}"
                yield Finding("unsafe-pickle", text, 1, CODE, (), member.name, row.offset)


# -- numbers -----------------------------------------------------------------------------------
def odd_numbers(
    source: Source | None, checkpoint: Checkpoint, lost: Mapping[str, str], progress: Progress | None
) -> tuple[Numbers, list[Finding]]:  # fmt: skip
    """NaN and infinities in what is whole."""
    rows, findings, count = [], [], 0
    for row in count_nonfinite(checkpoint, source, lost, progress):
        count += 1
        nan, inf, size = row.counts
        if row.problem is not None:
            text = f"its numbers cannot be read: {row.problem.text}"
            findings.append(Finding(row.problem.slug, text, 2, keys=(row.name,)))
        if nan or inf:
            where = "in its whole storage" if row.storage_wide else "of"
            text = (
                f"{_counted(nan, 'NaN')}{' and ' if nan and inf else ''}{_counted(inf, 'infinite')}"
            )
            findings.append(
                Finding("not-finite", f"{text}, {where} {size:,} numbers", 1, NUMBERS, (row.name,))
            )
            rows.append(
                {"key": row.name, "nan_count": nan, "inf_count": inf, "element_count": size}
            )
    return Numbers(count, tuple(rows)), findings


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}" if number else ""


# -- what to do --------------------------------------------------------------------------------
def salvage_note(file: str, output: str) -> Note:
    """The command that takes what is whole."""
    text = "take another copy of it, or what is whole of this one"
    return Note("salvage", text, convert_command(file, f"--salvage -o {quote(output)}"))


def mends(checkpoint: Checkpoint, damaged: bool, whole_count: int, code: bool) -> Iterator[Note]:
    """The commands that take what is whole, or what cannot run."""
    if "inspect-only" in checkpoint.traits or not whole_count:
        return
    file = checkpoint.file
    if damaged:
        yield salvage_note(file, part_name(file, checkpoint.format in SALVAGED_FOLDERS))
    elif code and checkpoint.weights is not None:
        options = f"-o {quote(clean_name(file))}"
        yield Note(
            "tensors-alone", "the tensors alone, nothing is run", convert_command(file, options)
        )
