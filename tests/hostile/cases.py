"""The nouns of the hostile corpus: a case is a file, what it tries, and the right answers.

Knows: exit statuses and slugs. Must not know: how files are made, or how commands are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

DONE, NO, TROUBLE = 0, 1, 2


class Want(NamedTuple):
    """Exit statuses, and the slug of the refusal or of a note that must stand in `--json`.

    `diff` is against the plain control: 0 the same, 1 something differs, 2 refused. The API
    answers as `inspect` and the two conversions do, by exceptions of the same status and slug.
    """

    inspect: int
    verify: int
    pth: int
    safetensors: int
    diff: int
    slug: str = ""


class Special(NamedTuple):
    """A file that is none: `kind` is fifo, folder or link; `target` is where a link leads."""

    kind: str
    target: str = ""


Content = bytes | Special


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `make` gives the bytes of `file`, or several files of a folder by name.

    `seconds` of CPU and `megabytes` over the tool's own are what each single answer may take;
    `long` names operations that only the long run tries. `keys` are all keys of what comes out.
    `unread` says that only copying meets what is wrong: a dry run, and the API's here, plans it.
    Every `w` and `b` that comes out has the numbers of the plain control, but where `weights` is
    false; torch's restricted loader reads what comes out, but where `loads` is false.
    """

    name: str
    tries: str
    want: Want
    make: Callable[[], bytes | dict[str, Content]]
    file: str = "net.pth"
    seconds: float = 1.0
    megabytes: int = 256
    long: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    weights: bool = True
    loads: bool = True
    unread: bool = False

    def wanted(self, operation: str, dry: bool = False) -> int:
        """The exit status of inspect, verify, pth, safetensors or diff."""
        return DONE if dry and self.unread else getattr(self.want, operation)

    def files(self) -> dict[str, Content]:
        made = self.make()
        return made if isinstance(made, dict) else {self.file: made}


SAME = Want(DONE, DONE, DONE, DONE, DONE)
OTHER = SAME._replace(diff=NO)
CODE = Want(NO, NO, TROUBLE, DONE, DONE, "unsafe-pickle")
CODE_OTHER = CODE._replace(diff=NO)


def refused(slug: str) -> Want:
    """What every verb refuses in the same words."""
    return Want(TROUBLE, TROUBLE, TROUBLE, TROUBLE, TROUBLE, slug)


AMBIGUOUS = refused("zip-ambiguous")
INVALID = refused("pickle-invalid")
BOUNDS = refused("tensor-bounds")
SIZES = refused("storage-size")
HEADER = refused("header-invalid")
OTHER_FILE = refused("not-a-checkpoint")
SHORT = refused("truncated")
SPECIAL = refused("special-file")
ESCAPE = refused("path-escape")
