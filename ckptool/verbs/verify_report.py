"""What verify found, as plain data: JSON schema 1, and what the screen needs beside it.

Knows: the schema, exit statuses. Must not know: how it is shown, how it was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptool.checkpoint import Note
from ckptool.verbs.verify_torch import Loading

DAMAGE, CODE, NUMBERS = "damage", "code", "numbers"


class Finding(NamedTuple):
    """One thing that is wrong. `kind` is damage, code (something that could run) or numbers (NaN,
    infinities); `status` the exit status it stands for. `keys` are the tensors it is about,
    `member` the record, `offset` a byte of the file, or of `member` where that is a pickle.
    """

    slug: str
    text: str
    status: int = 1
    kind: str = DAMAGE
    keys: tuple[str, ...] = ()
    member: str | None = None
    offset: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `key` is the first of `keys`."""
        return {
            "slug": self.slug,
            "key": self.keys[0] if self.keys else None,
            "member": self.member,
            "offset": self.offset,
            "text": self.text,
            "keys": list(self.keys),
            "kind": self.kind,
        }


class Coverage(NamedTuple):
    """How much of the bytes a recorded checksum vouched for: records (storages and others) in
    all, how many of them have one, the bytes of those; `text` says why where none has.
    """

    record_count: int = 0
    checked_count: int = 0
    checked_bytes: int = 0
    text: str = ""


NO_COVERAGE = Coverage()


class Numbers(NamedTuple):
    """What --finite counted: floating tensors looked at, and those with numbers that are none."""

    tensor_count: int
    found: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found in one file or folder. `whole` says that no damage was found, `safe`
    that nothing in it could run code (None: unknown, its pickle cannot be read); `lost` are
    (tensor, what became of it), out of `tensor_count` tensors (None: which there are is unknown).
    """

    file: str
    format: str | None
    title: str
    size_bytes: int
    findings: tuple[Finding, ...] = ()
    safe: bool | None = True
    tensor_count: int | None = None
    lost: tuple[tuple[str, str], ...] = ()
    coverage: Coverage = NO_COVERAGE
    loading: Loading | None = None
    numbers: Numbers | None = None
    notes: tuple[Note, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether no damage was found."""
        return not any(finding.kind == DAMAGE for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """0: whole, and nothing in it could run code; 1: no; 2: it cannot be read as a whole."""
        return max((finding.status for finding in self.findings), default=0)

    @property
    def whole_count(self) -> int | None:
        """How many tensors are whole as far as the file can tell; None: unknown."""
        return None if self.tensor_count is None else self.tensor_count - len(self.lost)

    def to_dict(self) -> dict[str, Any]:
        """JSON schema 1 of the command line, with what the screen needs beside it."""
        return {
            "schema": 1,
            "file": self.file,
            "whole": self.whole,
            "safe": self.safe,
            "findings": [finding.to_dict() for finding in self.findings],
            "format": self.format,
            "title": self.title,
            "size_bytes": self.size_bytes,
            "tensor_count": self.tensor_count,
            "whole_count": self.whole_count,
            "lost": [{"key": key, "text": text} for key, text in self.lost],
            "checksums": self.coverage._asdict(),
            "torch_load": _loading(self.loading),
            "numbers": _numbers(self.numbers),
            "exit_status": self.exit_status,
            "notes": [{"slug": n.slug, "text": n.text, "command": n.command} for n in self.notes],
        }


def _loading(found: Loading | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = [blocker.to_dict() for blocker in found.blockers[:_MOST]]
    return {
        "weights_only": found.weights_only,
        "text": found.text,
        "blockers": rows,
        "blocker_count": len(found.blockers),
    }


_MOST = 1_000


def _numbers(found: Numbers | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"tensor_count": found.tensor_count, "not_finite": list(found.found)}
