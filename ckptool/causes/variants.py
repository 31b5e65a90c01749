"""What shapes that differ say: a new head, another vocabulary, another variant of the net.

Knows: shapes of both sides by key. Must not know: rules, files, torch.
Each sentence speaks of keys it takes out of the list; a new kind is a function and a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod

from ckptool.causes.modules import counted, folded, listing
from ckptool.checkpoint import Mismatched

_LEAST, _SHARE = 3, 0.3
"""Tensors, and the share of all that the two sides name alike, from which differing shapes mean
another variant."""

_POSITION = re.compile(r"(?:^|[._])(?:abs_|rel_)?pos(?:ition|itions|itional)?(?:[._]|$)|pos_?emb")

Rows = list[Mismatched]


def shape_sentences(mismatched: Sequence[Mismatched], named: int) -> list[str]:
    """Sentences on all keys in `mismatched`; `named` counts the keys that both sides have, but
    for scalars.
    """
    rows, sentences = list(mismatched), []
    for kind in _KINDS:
        before = rows
        rows, said = kind(rows, named)
        sentences += said
        if not rows and before:
            break
    if mismatched:
        sentences.append(
            "strict=False does not pass over shapes: torch raises on them all the same"
        )
    return sentences


def _no_tensors(rows: Rows, _: int) -> tuple[Rows, list[str]]:
    found = [row for row in rows if row.file_shape is None]
    if not found:
        return rows, []
    text = f"{listing(_names(found))}: the file has no tensor there, or one without a shape"
    return _rest(rows, found), [text]


def _transposed(rows: Rows, _: int) -> tuple[Rows, list[str]]:
    """Conv1D or Dense of other libraries keep [in, out] where Linear has [out, in]."""
    found = [
        row
        for row in rows
        if row.file_shape and len(row.file_shape) == 2 and row.file_shape == row.model_shape[::-1]
    ]
    flat = [row for row in rows if row.file_shape and len(row.file_shape) == 2]
    if not found or len(found) * 2 < len(flat):
        return rows, []
    text = (
        f"{counted(len(found), 'weight')} transposed, as {_both(found[0])}: "
        "the file comes from layers that keep [in, out]; no renaming mends that"
    )
    return _rest(rows, found), [text]


def _reshaped(rows: Rows, _: int) -> tuple[Rows, list[str]]:
    """As a convolution of one pixel against a Linear."""
    found = [
        row
        for row in rows
        if row.file_shape is not None
        and len(row.file_shape) != len(row.model_shape)
        and prod(row.file_shape) == prod(row.model_shape)
    ]
    if not found:
        return rows, []
    text = (
        f"{counted(len(found), 'tensor')} with as many elements in another shape, as "
        f"{_both(found[0])}: another kind of layer"
    )
    return _rest(rows, found), [text]


def _variant(rows: Rows, named: int) -> tuple[Rows, list[str]]:
    """Nearly everything differs: the net is another one of its family."""
    owners = {row.key.rpartition(".")[0] for row in rows}
    if len(rows) < _LEAST or len(owners) < 2 or len(rows) < _SHARE * named:
        return rows, []
    text = (
        f"another variant of the net, no new head: {len(rows):,} of {named:,} tensors that both "
        f"have differ in shape, as {_both(rows[0])}{_ratio(rows)}"
    )
    return [], [text]


def _ratio(rows: Rows) -> str:
    """How much wider the file's net is, where most dimensions agree on it."""
    found: Counter[Fraction] = Counter()
    for row in rows:
        for ours, theirs in zip(row.file_shape or (), row.model_shape, strict=False):
            if ours and theirs and ours != theirs:
                found[Fraction(ours, theirs)] += 1
    if not found:
        return ""
    ratio, count = found.most_common(1)[0]
    if count * 2 <= found.total() or ratio.numerator > 99 or ratio.denominator > 99:
        return ""
    return f"; the file's is {ratio} times as wide"


def _positions(rows: Rows, _: int) -> tuple[Rows, list[str]]:
    found = [row for row in rows if _POSITION.search(row.key) and len(_differing(row)) == 1]
    texts = [
        f"{_both(row)}: made for inputs of another size or length; the positions would have to be interpolated"
        for row in found
    ]
    return _rest(rows, found), texts


def _inputs(rows: Rows, _: int) -> tuple[Rows, list[str]]:
    """A convolution that takes other channels, as gray images."""
    found, texts = [], []
    for row in rows:
        ((at, (ours, theirs)), *more) = _differing(row) or [(0, (0, 0))]
        if len(row.model_shape) >= 3 and at == 1 and not more:
            owner = row.key.rpartition(".")[0]
            texts.append(
                f"'{owner}' was trained for {counted(ours, 'input channel')}, the model has {theirs:,}"
            )
            found.append(row)
    return _rest(rows, found), texts


def _heads(rows: Rows, _: int) -> tuple[Rows, list[str]]:
    """Modules of which only the number of outputs differs, and nothing takes these outputs."""
    owned: dict[str, Rows] = {}
    for row in rows:
        owned.setdefault(row.key.rpartition(".")[0], []).append(row)
    taken = {size for row in rows for at, size in _differing(row) if at > 0}
    sizes: dict[tuple[tuple[int, int], bool], list[str]] = {}
    found: Rows = []
    for owner, mine in owned.items():
        counts = {size for row in mine for _, size in _differing(row)}
        if len(counts) == 1 and all(_is_rows(row) for row in mine) and not counts & taken:
            sizes.setdefault((next(iter(counts)), _is_table(mine)), []).append(owner)
            found += mine
    return _rest(rows, found), [_head_text(names, *size) for size, names in sizes.items()]


def _head_text(owners: Sequence[str], size: tuple[int, int], is_table: bool) -> str:
    ours, theirs = size
    if is_table:
        return f"{listing(owners)}: {ours:,} rows in the file, {theirs:,} in the model: another vocabulary"
    said = "the head {} was" if len(owners) == 1 else "the heads {} were"
    return f"{said.format(listing(owners))} trained for {ours:,} outputs, the model has {theirs:,}"


def _is_rows(row: Mismatched) -> bool:
    return [at for at, _ in _differing(row)] == [0]


def _is_table(rows: Rows) -> bool:
    """Whether it is an embedding: one matrix, and a name that says so."""
    name = rows[0].key.lower()
    words = ("emb", "wte", "vocab", "token")
    return len(rows) == 1 and len(rows[0].model_shape) == 2 and any(word in name for word in words)


def _others(rows: Rows, _: int) -> tuple[Rows, list[str]]:
    if not rows:
        return rows, []
    if len(rows) == 1:
        return [], [f"{_both(rows[0])}"]
    keys = folded([row.key for row in rows])
    return [], [
        f"{counted(len(rows), 'key')} of other shapes ({listing(keys)}), as {_both(rows[0])}"
    ]


def _differing(row: Mismatched) -> list[tuple[int, tuple[int, int]]]:
    """The dimensions that differ, with both sizes; empty where their number does."""
    ours, theirs = row.file_shape, row.model_shape
    if ours is None or len(ours) != len(theirs):
        return []
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [(at, (one, two)) for at, (one, two) in pairs if one != two]


def _both(row: Mismatched) -> str:
    ours = "?" if row.file_shape is None else str(list(row.file_shape))
    return f"'{row.key}' is {ours} in the file and {list(row.model_shape)} in the model"


def _names(rows: Rows) -> list[str]:
    return [row.key for row in rows]


def _rest(rows: Rows, found: Rows) -> Rows:
    gone = set(_names(found))
    return [row for row in rows if row.key not in gone]


_KINDS: tuple[Callable[[Rows, int], tuple[Rows, list[str]]], ...] = (
    _no_tensors, _transposed, _reshaped, _variant, _positions, _inputs, _heads, _others,
)  # fmt: skip
