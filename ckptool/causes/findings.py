"""Sentences on what still differs once the names are right: one for each kind of difference.

Knows: what missing and unexpected keys of certain names and places mean. Must not know: rules,
files, torch.
A new kind is a function and a row in `_KINDS`; it takes the keys it speaks of out of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ckptool.causes.modules import (
    Tree,
    counted,
    folded,
    is_inside_a_series,
    listing,
    paths_above,
    roots,
    series_of,
)
from ckptool.causes.surplus import STALE, stale_of
from ckptool.causes.variants import shape_sentences
from ckptool.checkpoint import Match, Wanted
from ckptool.compare import COUNTER

_FEW = 0.1
"""Below this share of the model's keys, what strict=False loads is said loudly."""
_HEAD = 0.25
"""A head that was replaced is a smaller share of the net."""


@dataclass(slots=True)
class Rest:
    """What is left to speak of. `match` is the file as it stands, `after` what the rules make of
    it; `names` are the file's names then, `others` those of no tensors.
    """

    wanted: Sequence[Wanted]
    match: Match
    after: Match
    names: Sequence[str]
    others: Collection[str] = ()
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing = list(self.after.missing_keys)
        self.unexpected = list(self.after.unexpected_keys)

    def take(self, keys: Collection[str]) -> None:
        """These have been spoken of."""
        gone = set(keys)
        self.missing = [key for key in self.missing if key not in gone]
        self.unexpected = [key for key in self.unexpected if key not in gone]


def findings(rest: Rest) -> list[str]:
    """Every sentence there is to say."""
    return [sentence for kind in _KINDS for sentence in kind(rest)]


def loud(match: Match, total: int) -> str:
    """What `strict=False` would load of the file as it stands, where that is next to nothing."""
    if not total or match.fits or len(match.loaded) >= _FEW * total:
        return ""
    if match.loaded:
        return f"as it stands {len(match.loaded):,} of {total:,} keys match: load_state_dict(strict=False) would load no more and say nothing"
    return (
        f"as it stands 0 of {total:,} keys match: load_state_dict(strict=False) would load nothing"
    )


def _loud(rest: Rest) -> list[str]:
    text = loud(rest.match, len(rest.wanted))
    return [text] if text else []


def _shapes(rest: Rest) -> list[str]:
    scalars = {row.key for row in rest.wanted if row.shape == ()}
    named = sum(key not in scalars for key in rest.after.loaded) + len(rest.after.mismatched)
    return shape_sentences(rest.after.mismatched, named)


# -- entries that are no weights ---------------------------------------------------------------
def _not_tensors(rest: Rest) -> list[str]:
    found = [key for key in rest.unexpected if key in rest.others]
    rest.take(found)
    states = [key for key in found if key.rpartition(".")[2] == "_extra_state"]
    plain = [key for key in found if key not in set(states)]
    texts = []
    if plain:
        texts.append(
            f"{listing(plain)} in the state_dict {_is(plain)} no tensor{_s(plain)}: torch calls {_it(plain)} unexpected"
        )
    if states:
        texts.append(f"{listing(states)}: extra state that the model keeps none of, no weights")
    return texts


def _counters(rest: Rest) -> list[str]:
    """Counters of BatchNorm that the file has not, where it has the layer."""
    present = {*rest.after.loaded, *(row.key for row in rest.after.mismatched)}
    missing = set(rest.missing)
    keys = [
        row.key
        for row in rest.wanted
        if row.key.rpartition(".")[2] == COUNTER
        and row.key not in present
        and f"{row.key[: -len(COUNTER)]}running_mean" in present
    ]
    lacking = [key for key in keys if key in missing]
    forgiven = [key for key in keys if key not in missing]
    rest.take(lacking)
    texts = []
    if forgiven:
        texts.append(
            f"no {COUNTER} in the file for {counted(len(forgiven), 'BatchNorm layer')}: torch starts {_it(forgiven)} "
            "at 0, since the file says no layer version or one below 2"
        )
    if lacking:
        texts.append(
            f"no {COUNTER} in the file for {listing(_owners(lacking), 2)} though it says layer version 2: torch calls "
            f"{_it(lacking)} missing; such a counter matters only where momentum is None"
        )
    return texts


def _owners(keys: Sequence[str]) -> list[str]:
    return [key.rpartition(".")[0] for key in keys]


def _extra_state(rest: Rest) -> list[str]:
    kinds = {row.key for row in rest.wanted if row.kind == "extra"}
    found = [key for key in rest.missing if key in kinds]
    rest.take(found)
    return [f"{listing(found)} missing: extra state of a layer, no weights"] if found else []


def _tied(rest: Rest) -> list[str]:
    """A missing name of a tensor that has come under its other name."""
    loaded = set(rest.after.loaded)
    ties = {row.key: row.tie for row in rest.wanted if row.tie is not None}
    partners: dict[str, list[str]] = {}
    for row in rest.wanted:
        partners.setdefault(row.tie or row.key, []).append(row.key)
    found = {}
    for key in rest.missing:
        group = partners.get(ties.get(key) or key, [])
        other = next((name for name in group if name in loaded), None)
        if other is not None and other != key:
            found[key] = other
    rest.take(found)
    return [
        f"'{key}' is missing and is the same tensor as '{other}', which loads: nothing is lost, strict=True refuses all the same"
        for key, other in found.items()
    ]


def _stale(rest: Rest) -> list[str]:
    """Entries of no weight, unexpected ones that no rule could leave out and missing ones."""
    shapes = {row.key: row.shape for row in rest.wanted}
    kinds = {row.key: row.kind for row in rest.wanted}
    model, file = Tree(shapes), Tree(rest.names)
    left = [key for key in rest.unexpected if stale_of(key, None, model) is not None]
    lacking = [
        key
        for key in rest.missing
        if stale_of(key, shapes[key], file) is not None and kinds[key] != "parameter"
    ]
    rest.take([*left, *lacking])
    texts = []
    if left:
        texts.append(f"{listing(left)} unexpected: {_why(left)}, no weights")
    if lacking:
        texts.append(
            f"{listing(lacking)} missing: {_it(lacking, 'a buffer', 'buffers')} and no weights; "
            f"{_it(lacking, 'it keeps its', 'they keep their')} initial value{_s(lacking)}"
        )
    return texts


def _why(keys: Sequence[str]) -> str:
    leaves = {key.rpartition(".")[2] for key in keys}
    return ", ".join(f"{row.noun}s {row.why}" for row in STALE if row.leaves & leaves)


def _pruned(rest: Rest) -> list[str]:
    """torch.nn.utils.prune: `weight` is computed from weight_orig and weight_mask."""
    missing, found = set(rest.missing), []
    for key in rest.unexpected:
        name = key.removesuffix("_mask")
        if name != key and name in missing and f"{name}_orig" in set(rest.unexpected):
            found.append(name)
    rest.take([key for name in found for key in (name, f"{name}_orig", f"{name}_mask")])
    text = f"{listing(found)} pruned: torch.nn.utils.prune keeps _orig and _mask, whose product is the weight; prune.remove makes it"
    return [text] if found else []


def _below(rest: Rest) -> list[str]:
    """Keys under the name of a tensor, as an adapter may leave them."""
    keys = {row.key for row in rest.wanted}
    found = [key for key in rest.unexpected if any(path in keys for path in paths_above(key))]
    rest.take(found)
    return (
        [f"{listing(found)} below the name of a tensor: no layer reads {_it(found)}"]
        if found
        else []
    )


# -- layers ------------------------------------------------------------------------------------
def _deeper(rest: Rest) -> list[str]:
    """Series of different length: another variant of the net."""
    model, file = Tree(row.key for row in rest.wanted), Tree(rest.names)
    found: dict[str, None] = {}
    for tree, keys in ((model, rest.unexpected), (file, rest.missing)):
        lacking = roots(tree, keys)
        for root, below in lacking.items():
            series = series_of(root)
            if model.members(series) and file.members(series) and _goes_on(series, model, file):
                block = any(key.count(".") > root.count(".") + 1 for key in below)
                if block or (len(lacking) > 1 and not is_inside_a_series(root)):
                    found[series] = None
    gone = {member for series in found for tree in (model, file) for member in tree.members(series)}
    rest.take([key for key in (*rest.missing, *rest.unexpected) if _is_under(key, gone)])
    if not found:
        return []
    said = [
        f"{len(file.members(series)):,} of '{series}' in the file and {len(model.members(series)):,} in the model"
        for series in found
    ]
    more = f" and {len(said) - 4:,} series more" if len(said) > 4 else ""
    return [f"another variant of the net: {', '.join(said[:4])}{more}"]


def _goes_on(series: str, model: Tree, file: Tree) -> bool:
    """Whether one side has all of the other's and goes on; a hole is no variant."""
    short, long = sorted((model.members(series), file.members(series)), key=len)
    if not short < long:
        return False
    number = {path: _numbers(path) for path in long}
    return max(number[path] for path in short) < min(number[path] for path in long - short)


def _numbers(path: str) -> tuple[int, ...]:
    digits = "".join(char if char.isdecimal() else " " for char in path.rpartition(".")[2])
    return tuple(int(text[:18]) for text in digits.split())


def _is_under(key: str, paths: Collection[str]) -> bool:
    return any(path in paths for path in paths_above(key))


def _other_head(rest: Rest) -> list[str]:
    """One part of the file and one of the model, both small: a head under another name."""
    few = max(8, _HEAD * len(rest.wanted))
    if not (rest.missing and rest.unexpected) or len(rest.missing) + len(rest.unexpected) > few:
        return []
    ours = _folded(roots(Tree(row.key for row in rest.wanted), rest.unexpected))
    theirs = _folded(roots(Tree(rest.names), rest.missing))
    if len(rest.after.loaded) * 2 < len(rest.wanted) or len(ours) > 2 or len(theirs) > 2:
        return []
    text = (
        f"another head: the file has {listing(ours)} ({counted(len(rest.unexpected), 'key')}), "
        f"the model {listing(theirs)} ({counted(len(rest.missing), 'key')})"
    )
    rest.take([*rest.missing, *rest.unexpected])
    return [text]


def _absent(rest: Rest) -> list[str]:
    found = roots(Tree(rest.names), rest.missing)
    if not found:
        return []
    count = counted(len(rest.missing), "key")
    if not rest.after.loaded:
        return [f"the model's {count} are not in the file: it may be another net's"]
    text = f"not in the file: {listing(_folded(found))} ({count}); {_it(rest.missing, 'it keeps its', 'they keep their')} initial value{_s(rest.missing)}"
    return [text]


def _more(rest: Rest) -> list[str]:
    found = roots(Tree(row.key for row in rest.wanted), rest.unexpected)
    if not found or not rest.after.loaded:
        return []
    return [
        f"the file has more: {listing(_folded(found))} ({counted(len(rest.unexpected), 'key')})"
    ]


def _folded(found: dict[str, list[str]]) -> list[str]:
    """Whole modules by their path, the keys of one module that is there in part together."""
    words = [root for root, keys in found.items() if [root] != keys]
    words += folded([root for root, keys in found.items() if [root] == keys])
    return words


def _is(keys: Sequence[str]) -> str:
    return "is" if len(keys) == 1 else "are"


def _s(keys: Sequence[str]) -> str:
    return "" if len(keys) == 1 else "s"


def _it(keys: Sequence[str], one: str = "it", many: str = "them") -> str:
    return one if len(keys) == 1 else many


_KINDS: tuple[Callable[[Rest], list[str]], ...] = (
    _loud, _not_tensors, _shapes, _counters, _extra_state, _tied, _stale, _pruned, _below,
    _deeper, _other_head, _absent, _more,
)  # fmt: skip
