"""Many files in one run: one row or one JSON line each, in their order, and a count at the end.

Knows: flags, screens, exit statuses. Must not know: what is done with a file.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ckptool.cli.main import BUG
from ckptool.cli.output import echo, error_data, summary, trace
from ckptool.errors import CkptError, UsageError
from ckptool.verbs.gathering import gather, names_in, read_list
from ckptool.verbs.matching import is_glob
from ckptool.verbs.ordered import in_order
from ckptool.verbs.walking import Place, Skipped

_TIDY = 256  # files after which what only points to itself is thrown away
_NODES = 100_000  # or so many things that a file may have left of that kind, some 20 MB


class Seen(NamedTuple):
    """What one file came to: its exit status and its report (JSON schema 1)."""

    status: int
    report: dict[str, Any]


Look = Callable[[str], Seen]


def are_many(files: Sequence[str], flags: dict[str, Any]) -> bool:
    """Whether a row a file is wanted: -r, a list of names, or a pattern. Raises UsageError when
    nothing is named at all.
    """
    if not files and not flags["files_from"]:
        raise UsageError("no FILE is named", hint="give files, or --files-from LIST")
    return bool(flags["recursive"] or flags["files_from"]) or any(map(is_glob, files))


def look_at_many(
    files: Sequence[str], flags: dict[str, Any], style: str, look: Look, cores: int = 1
) -> int:
    """Look at each, print, count; the exit status of the worst."""
    if style not in (*_STREAMS, *_tables()):
        raise UsageError(
            f"--format {style} shows one file", hint="table, plain, csv, markdown, json or jsonl"
        )
    skipped = Skipped()
    places = gather([*files, *_listed(flags["files_from"])], flags["recursive"], skipped)
    tally = _Tally(in_order(_guarded(look), places, cores=cores), flags["debug"])
    (_STREAMS.get(style) or _table_in(style))(tally.reports())
    if not flags["quiet"]:
        from ckptool.render.many import counted

        sys.stdout.flush()  # the count comes last, also where both go to one place
        summary(counted(tally.verdicts, skipped.files, skipped.links))
    return tally.status


def _listed(path: str | None) -> list[str]:
    if path is None:
        return []
    return names_in(sys.stdin.buffer.read() if path == "-" else read_list(path))


def _guarded(look: Look) -> Callable[[Place], tuple[Seen, BaseException | None]]:
    """What a file came to, whatever that is: one bad file does not stop the others."""

    def guarded(place: Place) -> tuple[Seen, BaseException | None]:
        try:
            if place.error is not None:
                raise place.error
            return look(place.path), None
        except CkptError as error:
            return Seen(error.exit_status, error_data(error, place.path)), error
        except Exception as error:  # ours: told with its file, and the others go on
            text = f"a bug in ckptool: {type(error).__name__}: {error}"
            bug = CkptError(text, hint="run it again on this file with --debug", slug="bug")
            return Seen(BUG, error_data(bug, place.path)), error

    return guarded


class _Tally:
    """The reports as they pass, their statuses and verdicts counted."""

    def __init__(self, seen: Iterable[tuple[Seen, BaseException | None]], debug: bool) -> None:
        self.status = 0
        self.verdicts: dict[str, int] = {}
        self._seen = seen
        self._debug = debug

    def reports(self) -> Iterator[dict[str, Any]]:
        from ckptool.render.many import verdict_of

        for number, (found, error) in enumerate(self._seen, 1):
            if error is not None and self._debug:
                trace(error)
            self.status = max(self.status, found.status)
            word = verdict_of(found.report)
            self.verdicts[word] = self.verdicts.get(word, 0) + 1
            yield found.report
            tidy(number, in_threads=True)


def tidy(number: int, in_threads: bool = False) -> None:
    """After file `number`: throw away what only points to itself, where much of it may be left. The
    collector sleeps in a run. What is there now stays: next time only what files leave is looked at;
    but threads may be in the middle of files, of which little is to stay.
    """
    due = number == 1 or not number % _TIDY
    if due or gc.get_count()[0] > _NODES:
        gc.collect()
        if due or not in_threads:
            gc.freeze()


# -- the ways to print -------------------------------------------------------------------------
def _json_lines(reports: Iterator[dict[str, Any]]) -> None:
    from ckptool.render.structured import jsonl_text

    for report in reports:
        echo(jsonl_text(report))


def _json_array(reports: Iterator[dict[str, Any]]) -> None:
    from ckptool.render.structured import json_text

    sys.stdout.write("[")
    for number, report in enumerate(reports):
        sys.stdout.write((",\n" if number else "") + json_text(report))
    echo("]")


_STREAMS = {"json": _json_array, "jsonl": _json_lines}


def _tables() -> tuple[str, ...]:
    from ckptool.render.many import STYLES

    return tuple(STYLES)


def _table_in(style: str) -> Callable[[Iterator[dict[str, Any]]], None]:
    from ckptool.render.many import STYLES, row_of

    def show(reports: Iterator[dict[str, Any]]) -> None:
        rows = [row_of(report) for report in reports]
        if rows:
            echo(STYLES[style](rows))

    return show
