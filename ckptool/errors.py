"""Every exception ckptool raises: what is wrong, where, and what to do.

Knows: slugs, exit statuses (the table of the command line). Must not know: anything but `escapes`.
A new error is one class of three lines.
"""

from __future__ import annotations

from typing import Any


class CkptError(Exception):
    """Base of all planned errors.

    `text` says what is wrong in one line; `path` is the file, `key` the tensor or
    object, `offset` the byte (in `member` where that is set); `hint` says what to do.
    """

    slug = "error"
    exit_status = 2

    def __init__(
        self,
        text: str,
        *,
        path: str | None = None,
        key: str | None = None,
        member: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
        slug: str | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.path = path
        self.key = key
        self.member = member
        self.offset = offset
        self.hint = hint
        self.findings: tuple[str, ...] = ()
        if slug is not None:
            self.slug = slug

    def __reduce__(self) -> tuple[Any, ...]:
        """It crosses from one process to another whole, whatever its constructor takes."""
        return _rebuilt, (type(self), self.args, self.__dict__)

    def where(self) -> dict[str, Any]:
        """The known parts of the place, for JSON."""
        parts = {"key": self.key, "member": self.member, "offset": self.offset}
        return {name: value for name, value in parts.items() if value is not None}

    def place(self) -> str:
        """The place in words: `byte 1,204 of data.pkl, key 'fc.weight'`; empty when unknown."""
        words = []
        if self.offset is not None:
            words.append(f"byte {self.offset:,}" + (f" of {self.member}" if self.member else ""))
        elif self.member:
            words.append(f"in {self.member}")
        if self.key is not None:
            words.append(f"key '{self.key}'")
        return ", ".join(words)

    def __str__(self) -> str:
        """One line for people, safe for a terminal; the parts themselves are as they are."""
        from ckptool.escapes import escape  # seldom needed: an expression to compile

        place = self.place()
        line = f"{self.text} ({place})" if place else self.text
        return escape(f"{self.path}: {line}" if self.path else line)


def _rebuilt(kind: type[CkptError], args: tuple[Any, ...], state: dict[str, Any]) -> CkptError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class NotACheckpoint(CkptError):
    """The content is something else: a web page, a pointer file, another program's format."""

    slug = "not-a-checkpoint"


class Truncated(CkptError):
    """The file ends before what it announces."""

    slug = "truncated"


class ZipAmbiguous(CkptError):
    """The zip directory does not describe the file exactly: two readers could disagree."""

    slug = "zip-ambiguous"


class ZipEncrypted(CkptError):
    """An entry carries an encryption or patch flag."""

    slug = "zip-encrypted"


class PickleInvalid(CkptError):
    """A pickle stream that no reader should accept."""

    slug = "pickle-invalid"


class UnsafePickle(CkptError):
    """A pickle that could run code, where that is refused."""

    slug = "unsafe-pickle"


class TensorBounds(CkptError):
    """A tensor reaches outside its storage, or its shape is impossible."""

    slug = "tensor-bounds"


class StorageSize(CkptError):
    """The bytes of a storage are not count x item size, or are not there."""

    slug = "storage-size"


class CrcMismatch(CkptError):
    """Bytes do not have the checksum that was recorded for them."""

    slug = "crc-mismatch"


class LimitExceeded(CkptError):
    """A bound of `limits.Limits` was reached; the slug says which."""

    slug = "limit"

    def __init__(self, name: str, text: str, **where: Any) -> None:
        super().__init__(text, slug=f"limit-{name}", **where)


class PathEscape(CkptError):
    """A name in the file points outside of it."""

    slug = "path-escape"


class SpecialFile(CkptError):
    """A folder, FIFO, device or socket where a regular file is needed, or no file at all."""

    slug = "special-file"


class HeaderInvalid(CkptError):
    """A safetensors header, a tar or legacy section that breaks its format's rules."""

    slug = "header-invalid"


class KeyCollision(CkptError):
    """Two keys would become one."""

    slug = "key-collision"


class KeyDuplicate(CkptError):
    """One key stands twice in a dict."""

    slug = "key-duplicate"


class RuleMatchesNothing(CkptError):
    """An explicit rule changed nothing: the answer is no."""

    slug = "key-no-match"
    exit_status = 1


class NothingToDo(CkptError):
    """No edit to undo, no interrupted one to recover from: the answer is no."""

    slug = "nothing-to-do"
    exit_status = 1


class DoesNotFit(CkptError):
    """Keys do not match the model: the answer is no."""

    slug = "key-mismatch"
    exit_status = 1


class ModelError(CkptError):
    """The user's model definition cannot be imported or built, or misbehaves."""

    slug = "model"


class Unsupported(CkptError):
    """Something we know and do not do (yet)."""

    slug = "unsupported"


class InputChanged(CkptError):
    """The input file changed while it was read."""

    slug = "input-changed"


class OutputError(CkptError):
    """The output was not written; what stood there before is untouched."""

    slug = "output-error"


class EngineError(CkptError):
    """What runs the parts of a conversion elsewhere cannot be reached, or gave up."""

    slug = "engine"


class UsageError(CkptError):
    """Options that contradict each other or a path that is not in the file."""

    slug = "usage"
