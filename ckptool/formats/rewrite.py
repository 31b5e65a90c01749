"""Changes as edits of one pickle, made and checked; the same pickle for another container.

Knows: the order of the edits, when a rewrite is refused. Must not know: how archives and
streams are laid out, command lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint, Global
from ckptool.errors import KeyDuplicate, PickleInvalid, UnsafePickle
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.devices import Retagged, retag, retag_arguments
from ckptool.formats.homes import Housing
from ckptool.formats.judge import CODE, Judge
from ckptool.formats.rehouse import Rehousing, rehouse
from ckptool.formats.renames import rename_and_drop
from ckptool.formats.unicode import add_unicode
from ckptool.pickles.check import check_rewrite
from ckptool.pickles.downgrade import add_spellings
from ckptool.pickles.hoist import Emitter
from ckptool.pickles.nodes import Walked
from ckptool.pickles.splice import Edits, splice
from ckptool.pickles.texts import only_texts_differ
from ckptool.pickles.walk import walk
from ckptool.pickles.write import whole


@dataclass(slots=True)
class Rewritten:
    """The new pickle, and what was changed on the way: counts of tags by (old, new).

    `housing` says where storages are now; None: where they were.
    """

    data: bytes
    retagged: Retagged = field(default_factory=dict)
    kept_protocol: str | None = None
    from_protocol: int | None = None
    housing: Housing | None = None
    expected: Any = None


def rewrite(checkpoint: Checkpoint, changes: Changes, target: str = "") -> Rewritten:
    """Edit the checkpoint's pickle, for the container `target` (its own by default), and prove
    the result.

    Raises UnsafePickle, KeyDuplicate, PickleInvalid or Unsupported; then nothing was made.
    """
    target = target or checkpoint.format
    handle: PickleHandle = checkpoint.handle
    moving = needs_housing(checkpoint, changes, target)
    if not moving:
        refuse_unsafe(checkpoint.globals, changes)
    _refuse_duplicates(checkpoint)
    if moving or changes.devices:
        _refuse_shared_ids(handle.walked)
    edits, result = Edits(), Rewritten(b"")
    work = Rehousing(checkpoint, changes, target, edits, result.retagged)
    rename_and_drop(checkpoint, changes, edits, work.generated)
    if moving:
        result.housing = rehouse(work)
    else:
        retag(handle, changes, edits, result.retagged)
    retag_arguments(handle, changes, edits, result.retagged)
    if work.fresh is not None:
        result.data = whole(work.fresh)
        again: Walked = walk(result.data)
    else:
        _respell(handle.walked, edits, result, checkpoint.format != target)
        result.data = _spliced(handle.walked, edits, result)
        again = _proven(work, result.data, moving)
    if moving:
        result.expected = work.expected()
        refuse_unsafe(tuple(Judge(again).run()), changes)
    return result


def needs_housing(checkpoint: Checkpoint, changes: Changes, target: str) -> bool:
    """Whether storages move: parts go, types change, a module becomes a state_dict, the
    container is another one, or the old one is damaged.
    """
    modules = not changes.keep_object and any(t.kind == "module" for t in checkpoint.tables)
    moved = target != checkpoint.format or "salvaged" in checkpoint.traits
    return changes.restructures or modules or moved


def _respell(walked: Walked, edits: Edits, result: Rewritten, other: bool) -> None:
    """Protocols 3 to 5 come out as 2; what Python 2 wrote, in another container, as unicode."""
    if walked.protocol >= 3:
        result.from_protocol = walked.protocol
        result.kept_protocol = add_spellings(walked, edits)
    elif other:
        add_unicode(walked, edits)


def refuse_unsafe(verdicts: tuple[Global, ...], changes: Changes) -> None:
    """Our output never carries a call that could run code, unless that was asked for."""
    code = [g for g in verdicts if g.verdict == CODE]
    if code and not changes.keep_unknown:
        more = f" and {len(code) - 3} more" if len(code) > 3 else ""
        raise UnsafePickle(
            f"it could run code when loaded: {', '.join(g.name for g in code[:3])}{more}; nothing written",
            member=code[0].member,
            offset=code[0].offset,
            hint="take the tensors alone: -o OUT.safetensors, or --select state_dict where that leaves it"
            " behind; --keep-unknown copies it as it is: the output is no safer than the input",
        )


def _refuse_duplicates(checkpoint: Checkpoint) -> None:
    for table in checkpoint.tables:
        for key in table.duplicate_keys:
            raise _repeated(key)
    for path in checkpoint.handle.found.repeated:
        raise _repeated(".".join(map(str, path)))


def _repeated(key: str) -> KeyDuplicate:
    text = "one dict sets this key more than once, readers disagree on which counts"
    return KeyDuplicate(text, key=key)


def _refuse_shared_ids(walked: Walked) -> None:
    """The id of a storage is edited in place: nothing else may be the same tuple."""
    ids = {id(node.pid) for node in walked.persistent}
    slots = [slot for slot, node in walked.memo.items() if id(node) in ids]
    uses = Emitter(walked).uses_of(slots)
    if uses:
        raise PickleInvalid(
            "the pickle cannot be rewritten: the id of a storage is a value too",
            offset=min(at[0] for at in uses.values()),
        )


def _spliced(walked: Walked, edits: Edits, result: Rewritten) -> bytes:
    """Splice; a protocol-2 spelling that cannot be emitted is given up alone."""
    try:
        return splice(walked, edits)
    except PickleInvalid as error:
        if not edits.spellings:
            raise
        edits.spellings, edits.respell = {}, None
        result.kept_protocol = error.text
        return splice(walked, edits)


def _proven(work: Rehousing, data: bytes, moving: bool) -> Walked:
    """What the new pickle says, shown to be what was meant. Where it is the old one but for
    some texts, and nothing else is asked of it, it is not walked again.
    """
    walked, edits = work.handle.walked, work.edits
    if not edits or (not moving and only_texts_differ(walked, data, edits)):
        return walked
    again = walk(data)
    check_rewrite(walked, again, edits, work.root)
    return again
