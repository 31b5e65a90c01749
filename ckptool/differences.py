"""What two checkpoints have in common and apart, by their records: keys, shapes, plain values.

Knows: which records belong together once names and nesting are seen through. Must not know:
files, bytes, how anything is shown. Whether numbers are the same is asked elsewhere.
A place of one file becomes a common one: below a state_dict it is the key's common name, above
and beside it is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckptool.alignment import AS_IT_IS, Naming, meet, moved_keys, pair_tables, renamed, with_others
from ckptool.checkpoint import Extra, Note, Path, Table, Tensor
from ckptool.errors import RuleMatchesNothing, UsageError
from ckptool.globs import match_glob
from ckptool.keynames import Rule
from ckptool.rules import apply
from ckptool.sides import Placed, Side, dotted

_METADATA = "_metadata"


class Wish(NamedTuple):
    """What to compare: `at` names one state_dict, `rules` run over the names of both sides,
    `only` and `drop` are globs over names.
    """

    at: str | None = None
    rules: tuple[Rule, ...] = ()
    only: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class Pair(NamedTuple):
    """A tensor that both have, at a common place; `key` is that place as a name. `table` is the
    number of the pair of state_dicts it is in, None beside them.
    """

    key: str
    path: Path
    a: Tensor
    b: Tensor
    table: int | None = None


class Lone(NamedTuple):
    """A tensor that only one side has; `top` is the largest thing it is a part of that the other
    side has not (itself, where there is none).
    """

    key: str
    path: Path
    tensor: Tensor
    top: Path


class Changed(NamedTuple):
    """A plain value that differs: `a` or `b` is None where that side has none. `top` as in Lone."""

    path: Path
    a: Extra | None
    b: Extra | None
    top: Path


class Aligned(NamedTuple):
    """All records, matched. `words` say how names and nesting were seen through, `renamed`
    whether names were; `moved` are (number of the pair of state_dicts, key) that stand elsewhere in the order of b.
    """

    pairs: tuple[Pair, ...]
    removed: tuple[Lone, ...]
    added: tuple[Lone, ...]
    values: tuple[Changed, ...]
    value_count: int
    words: tuple[str, ...]
    renamed: bool
    moved: frozenset[tuple[int, str]]
    notes: tuple[Note, ...]


def align(a: Side, b: Side, wish: Wish = Wish()) -> Aligned:  # noqa: B008 - a NamedTuple of constants
    """Match the records of two files. Raises UsageError, RuleMatchesNothing, KeyCollision."""
    left, right = Placed(a), Placed(b)
    chosen = _chosen(a, b, wish)
    for number, (i, j) in enumerate(chosen):
        names = _agree(a.tables[i], b.tables[j], wish.rules)
        left.take(number, i, names[0], names[1], b.tables[j])
        right.take(number, j, names[1], names[0], a.tables[i])
    _check_rules(wish.rules, a, b, chosen)
    bare = wish.at is not None or bool(wish.only)
    values = ({}, {}) if bare else _all_values(left, right)
    tops = _tops(*values), _tops(values[1], values[0])
    pairs, removed, added = _matched(left.tensors(bare), right.tensors(bare), tops, wish)
    lone = {row.path[:-1] for row in (*removed, *added)}
    changed, count = _changed(*values, tops, lone, wish)
    return Aligned(
        pairs, removed, added, changed, count, _words(a, b, chosen, left, right),
        any(naming.renames for naming in (*left.namings, *right.namings)),
        _moved(len(chosen), left, right), _notes(left, right, bare),
    )  # fmt: skip


# -- state_dicts and names ---------------------------------------------------------------------
def _chosen(a: Side, b: Side, wish: Wish) -> list[tuple[int, int]]:
    """Indexes of state_dicts that are compared. Raises UsageError for a place in neither file."""
    if wish.at is None:
        return pair_tables(a.tables, a.weights, b.tables, b.weights)
    found = [_at(side, wish.at) for side in (a, b)]
    if found == [None, None]:
        known = [dotted(table.path) or "." for side in (a, b) for table in side.tables]
        listed = ", ".join(repr(name) for name in dict.fromkeys(known[:8]))
        hint = f"there is one at {listed}" if listed else "there is none at all"
        raise UsageError(f"neither file has a state_dict at '{wish.at}'", hint=hint)
    places = [_alone(side, at, wish.at) for side, at in zip((a, b), found, strict=True)]
    return [(places[0], places[1])]


def _at(side: Side, at: str) -> int | None:
    wanted = "" if at == "." else at
    named = [i for i, t in enumerate(side.tables) for place in t.places if dotted(place) == wanted]
    if len(named) > 1:
        text = f"there are {len(named)} state_dicts at '{at}': their places read alike"
        raise UsageError(text, path=side.name)
    return named[0] if named else None


def _alone(side: Side, at: int | None, name: str) -> int:
    """The state_dict at a place, or the only one. Raises UsageError where that is a guess."""
    if at is not None:
        return at
    if len(side.tables) == 1:
        return 0
    known = ", ".join(repr(dotted(table.path) or ".") for table in side.tables[:8])
    raise UsageError(
        f"there is no state_dict at '{name}'", path=side.name,
        hint=f"there is one at {known}" if known else "the file holds none",
    )  # fmt: skip


def _agree(a: Table, b: Table, rules: Sequence[Rule]) -> tuple[Naming, Naming]:
    """How both sides are named so that their keys meet: by `rules` first."""
    one, two = [t.key for t in a.tensors], [t.key for t in b.tensors]
    mine, theirs = renamed(AS_IT_IS, one, rules), renamed(AS_IT_IS, two, rules)
    left = {mine.renames.get(t.key, t.key): t.shape for t in a.tensors}
    right = {theirs.renames.get(t.key, t.key): t.shape for t in b.tensors}
    more, others = meet(left, right)
    found = _after(mine, more, one), _after(theirs, others, two)
    return (
        with_others(found[0], [key for key, _ in a.others]),
        with_others(found[1], [key for key, _ in b.others]),
    )


def _after(first: Naming, then: Naming, keys: Sequence[str]) -> Naming:
    final = {key: first.renames.get(key, key) for key in keys}
    final = {key: then.renames.get(name, name) for key, name in final.items()}
    return Naming(
        {key: name for key, name in final.items() if key != name}, (*first.words, *then.words)
    )


def _check_rules(
    rules: Sequence[Rule], a: Side, b: Side, chosen: Sequence[tuple[int, int]]
) -> None:
    """Raise RuleMatchesNothing for a rule that finds nothing in either file."""
    tables = [a.tables[i] for i, _ in chosen] + [b.tables[j] for _, j in chosen]
    idle = [apply(rules, [t.key for t in table.tensors]).idle for table in tables]
    for rule in rules:
        if tables and all(rule in found for found in idle):
            raise RuleMatchesNothing(f"{rule.flag} matches no key of either file")


def _words(
    a: Side, b: Side, chosen: Sequence[tuple[int, int]], left: Placed, right: Placed
) -> tuple[str, ...]:
    """How names and nesting were seen through."""
    found = []
    for side, placed in ((a, left), (b, right)):
        for naming in placed.namings:
            found += [f"{word} from {side.name}" for word in naming.words]
    for i, j in chosen:
        one, two = a.tables[i].path, b.tables[j].path
        kinds = [a.tables[i].kind, b.tables[j].kind]
        if kinds[0] != kinds[1]:
            said = ["a whole pickled model" if k == "module" else "state_dict" for k in kinds]
            found.append(" -> ".join(said))
        if one != two:
            places = [f"'{dotted(path)}'" if path else "the top" for path in (one, two)]
            found.append(f"state_dict at {places[0]} -> {places[1]}")
    return tuple(dict.fromkeys(found))


def _moved(count: int, left: Placed, right: Placed) -> frozenset[tuple[int, str]]:
    return frozenset(
        (number, key)
        for number in range(count)
        for key in moved_keys(left.order(number), right.order(number))
    )


def _notes(left: Placed, right: Placed, bare: bool) -> tuple[Note, ...]:
    found = []
    if left.skipped and not bare:
        text = "of a whole pickled model the state_dict is compared, not the other attributes"
        found.append(Note("attributes-not-compared", text))
    for placed in (left, right):
        if not placed.side.complete and not bare:
            text = f"{placed.side.name}: values beside its tensors are compared as far as inspect shows them"
            found.append(Note("values-not-compared", text))
    for number in range(0 if bare else len(left.namings)):
        one, two = left.has_metadata(number), right.has_metadata(number)
        if one != two:
            name = (right if one else left).side.name
            text = f"{name} has no versions of layers (`_metadata`); torch reads old BatchNorm and quantized layers by them"
            found.append(Note("no-metadata", text))
    return tuple(found)


# -- tensors -----------------------------------------------------------------------------------
Rows = dict[Path, tuple[Tensor, "int | None"]]
Tops = dict[Path, Path]


def _matched(
    a: Rows, b: Rows, tops: tuple[Tops, Tops], wish: Wish
) -> tuple[tuple[Pair, ...], tuple[Lone, ...], tuple[Lone, ...]]:
    """Both, only a, only b; in the order of a, then of b."""
    wanted = _filter(wish)
    pairs = tuple(
        Pair(dotted(path), path, one, b[path][0], number)
        for path, (one, number) in a.items()
        if path in b and wanted(path, one.key, b[path][0].key)
    )
    removed, added = (
        tuple(
            Lone(dotted(path), path, t, lost.get(path[:-1], path))
            for path, (t, _) in mine.items()
            if path not in theirs and wanted(path, t.key)
        )
        for mine, theirs, lost in ((a, b, tops[0]), (b, a, tops[1]))
    )
    if (wish.only or wish.drop) and not (pairs or removed or added):
        raise RuleMatchesNothing("--only and --drop leave no tensor to compare")
    return pairs, removed, added


def _filter(wish: Wish) -> Callable[..., bool]:
    """Whether the name at a common place, or one of the file's own names, is asked for."""

    def wanted(path: Path, *keys: str) -> bool:
        names = dict.fromkeys((dotted(path), *keys))
        if wish.only and not any(match_glob(glob, name) for glob in wish.only for name in names):
            return False
        return not any(match_glob(glob, name) for glob in wish.drop for name in names)

    return wanted


# -- plain values ------------------------------------------------------------------------------
Values = dict[Path, Extra]


def _all_values(left: Placed, right: Placed) -> tuple[Values, Values]:
    one, two = left.values(), right.values()
    for number in range(len(left.namings)):
        _add_versions(one, two, left.metadata(number), right.metadata(number), number)
    return one, two


def _tops(mine: Values, theirs: Values) -> Tops:
    """{place: the largest thing around it that the other side has not}, for what it has not.
    Containers come before what is in them.
    """
    found: Tops = {}
    for path, extra in mine.items():
        above, other = path[:-1], theirs.get(path)
        if above in found:
            found[path] = found[above]
        elif other is None or (_holds(extra) and not _holds(other)):
            found[path] = path
    return found


def _changed(
    one: Values, two: Values, tops: tuple[Tops, Tops], told: set[Path], wish: Wish
) -> tuple[tuple[Changed, ...], int]:
    """What differs, and how many values both have. A container that only one side has is left
    out where something in it is told (`told`: where a tensor of it is).
    """
    wanted = _filter(wish._replace(only=()))
    paths = [path for path in dict.fromkeys((*one, *two)) if not wish.drop or wanted(path)]
    filled = told | {path[:-1] for path in paths}
    found, count = [], 0
    for path in paths:
        mine, theirs = one.get(path), two.get(path)
        count += mine is not None and theirs is not None and not _holds(mine)
        lone = mine or theirs if mine is None or theirs is None else None
        if same_value(mine, theirs) or (lone is not None and _holds(lone) and path in filled):
            continue
        found.append(Changed(path, mine, theirs, tops[mine is None].get(path, path)))
    return tuple(found), count


def _holds(extra: Extra) -> bool:
    """Whether it stands for a container."""
    return extra.value is None and extra.type != "NoneType"


def _add_versions(
    one: dict[Path, Extra], two: dict[Path, Extra], a: Any, b: Any, number: int
) -> None:
    """Versions of layers that both note; a layer that only one side has shows by its tensors."""
    for layer in a or {}:
        if layer not in (b or {}):
            continue
        rows = [row if isinstance(row, dict) else {"": row} for row in (a[layer], b[layer])]
        for name in {**rows[0], **rows[1]}:
            path: Path = (_METADATA, layer, name)
            if number:
                path = (_METADATA, number, layer, name)
            for side, row in zip((one, two), rows, strict=True):
                if name in row:
                    side[path] = Extra(path, type(row[name]).__name__, row[name], "")


def same_value(a: Extra | None, b: Extra | None) -> bool:
    """Whether two values are one: of one type and equal; NaN is NaN."""
    if a is None or b is None or a.type != b.type:
        return False
    return bool(a.value == b.value or (a.value != a.value and b.value != b.value))
