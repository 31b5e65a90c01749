"""The cheap self-check of a rewrite that changed texts and nothing else, on the bytes alone.

Knows: string literals, memo opcodes. Must not know: how the bytes were emitted, files.
Where each edited literal has become a literal, every fetch of it was edited alike, and no other
byte differs, both streams run the same opcodes: a second walk would show nothing more.
"""

from __future__ import annotations

from ckptool.pickles.nodes import Walked
from ckptool.pickles.splice import Edits, literal_end, literal_like

_GETS = (0x68, 0x6A)  # BINGET LONG_BINGET


def only_texts_differ(old: Walked, data: bytes, edits: Edits) -> bool:
    """Whether `data` is provably the old pickle with its strings edited and no other edit.

    False where the stream is too unusual to tell: `check.check_rewrite` then decides.
    """
    others = (edits.values, edits.spellings, edits.deletions, edits.dropped, edits.inserts)
    unusual = (old.frames, old.stack_globals, old.oddities)
    if any(others) or any(unusual) or edits.shared or edits.respell or edits.decoded:
        return False
    return _fetches_agree(old, edits.strings) and _bytes_agree(old, data, edits.strings)


def _fetches_agree(old: Walked, strings: dict[int, str]) -> bool:
    """An edited text is fetched where that was edited alike, and nowhere else."""
    data = old.data
    now = {slot: strings[start] for slot, start in old.memo_start.items() if start in strings}
    for at in old.gets:
        if data[at] == 0x68:
            slot = data[at + 1]
        elif data[at] == 0x6A:
            slot = int.from_bytes(data[at + 1 : at + 5], "little")
        else:
            return False
        if (slot in now or at in strings) and strings.get(at) != now.get(slot):
            return False
    return True


def _bytes_agree(old: Walked, data: bytes, strings: dict[int, str]) -> bool:
    """Literal by literal, and all that stands between."""
    before, at, pos = old.data, 0, old.start
    for start in sorted(strings):
        if before[start] in _GETS:
            continue  # it changes with what it fetches
        kept, literal = start - pos, literal_like(before[start], strings[start])
        same = kept >= 0 and before[pos:start] == data[at : at + kept]
        if not (same and data.startswith(literal, at + kept)):
            return False
        at += kept + len(literal)
        pos = literal_end(before, start)
    return before[pos : old.end] == data[at:]
