"""convert --in-place: names and devices of a zip changed where it lies.

Knows: what is decided before and said after. Must not know: printing, how bytes are appended.
"""

from __future__ import annotations

import time

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import CkptError, Unsupported, UsageError
from ckptool.formats import read
from ckptool.limits import DEFAULT, Limits
from ckptool.places import open_source
from ckptool.plans import Plan, Written
from ckptool.rules import OF_TENSORS
from ckptool.verbs.conversion import Conversion
from ckptool.verbs.convert import conversion, mentioned
from ckptool.verbs.deciding import decide, refuse_kind
from ckptool.verbs.inplace import (
    append_changes,
    plan_append,
    refuse,
    refuse_place,
    stands_for_folder,
)
from ckptool.verbs.request import Request

_ZIP = "torch-zip"


def convert_in_place(
    path: str, output: str | None, request: Request, limits: Limits = DEFAULT
) -> Conversion:
    """Append a new index to the file. Raises CkptError; then the file is as it was."""
    started = time.monotonic()
    if output is not None:
        raise UsageError("--in-place writes into the file itself: it takes no -o")
    if stands_for_folder(path):
        raise UsageError("one file is edited in place, not a folder", path=path,
                         hint="write another with -o OUT, or name one file in it")  # fmt: skip
    with open_source(path) as source:
        try:
            refuse_place(source)
            checkpoint = read(source, limits)
            refuse_kind(checkpoint, request)
            if any(table.kind == "module" for table in checkpoint.tables):
                raise Unsupported("a whole pickled model cannot be edited in place",
                                  hint="write another file with -o")  # fmt: skip
            refuse(source, checkpoint)
            notes: tuple[Note, ...] = ()
            if request.fit is not None:
                request, notes = _fitted(checkpoint, request)
            decision = decide(checkpoint, request, _ZIP)
            decision = decision._replace(notes=(*notes, *decision.notes))
            findings: tuple[str, ...] = ()
            if request.dry_run:
                data, rewritten = plan_append(source, checkpoint, decision.changes)
                size = source.size + len(data)
            else:
                done = append_changes(source, checkpoint, decision.changes, fsync=request.fsync)
                rewritten, size, findings = done.rewritten, done.size_after, done.findings
        except CkptError as error:
            error.path = error.path or path
            raise
    written = Written(((path, size),), findings=findings)
    return conversion(
        path, path, checkpoint, request, decision, rewritten, _ZIP, Plan((), ()), written, (),
        mentioned(checkpoint, decision.changes), time.monotonic() - started,
    )  # fmt: skip


def _fitted(checkpoint: Checkpoint, request: Request) -> tuple[Request, tuple[Note, ...]]:
    """The rules that --fit found. Raises Unsupported where tensors would have to go."""
    from ckptool.verbs.fitting import fitted

    found, notes = fitted(checkpoint, request)
    if any(rule.name in OF_TENSORS for rule in found.rules):
        text = "the model has not all of its keys, and in place nothing can be left out"
        raise Unsupported(text, hint="write another file with -o")
    return found, notes
