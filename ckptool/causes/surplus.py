"""What a file has and a model has no place for: what may go, and the rules that leave it out.

Knows: entries that tools leave in a state_dict, parts of a net that stand for themselves.
Must not know: renaming, sentences about shapes, files, torch.

Nothing is left out that may be a sign of another net: no block of a series, no part of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ckptool.causes.modules import Tree, counted, is_inside_a_series, listing, roots, series_of
from ckptool.causes.trials import Step, Trial, Trials
from ckptool.compare import Shape
from ckptool.keynames import Rule

_EACH = 8
"""Keys that are named one by one where no shorter glob means exactly them."""


class Stale(NamedTuple):
    """Entries that nothing is lost without: `leaves` their last components, `holds` what more has
    to be true of a key's name and shape. Those `of_a_layer` are so only in one that both have.
    """

    leaves: frozenset[str]
    noun: str
    why: str
    of_a_layer: bool = True
    holds: Callable[[str, Shape], bool] = lambda name, shape: True


def _is_causal_mask(name: str, shape: Shape) -> bool:
    """GPT-2's `attn.bias` of shape (1, 1, n, n): a triangle of ones, no parameter."""
    above = name.rpartition(".")[0].rpartition(".")[2]
    square = shape is not None and len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return above.startswith("attn") and square


# thop and fvcore (counters), torch.optim.swa_utils (n_averaged), transformers (buffers that became
# non-persistent), timm and torchvision (Swin), TransformerEngine (_extra_state)
STALE: tuple[Stale, ...] = (
    Stale(frozenset({"total_ops", "total_params"}), "counter", "left by a FLOP profiler", False),
    Stale(frozenset({"n_averaged"}), "counter", "of an averaged model", False),
    Stale(
        frozenset({"num_batches_tracked"}), "counter", "of BatchNorm layers that do not count here"
    ),
    Stale(
        frozenset({"position_ids", "inv_freq", "masked_bias", "relative_position_index",
                   "relative_coords_table", "attn_mask", "token_type_ids"}),
        "buffer", "that newer versions of the library make themselves",
    ),
    Stale(frozenset({"bias"}), "mask", "that newer versions make themselves", True, _is_causal_mask),
    Stale(frozenset({"_extra_state"}), "extra state", "of layers that keep none here", False),
)  # fmt: skip


_LEFT_BEHIND = frozenset(
    leaf for row in STALE for leaf in row.leaves if leaf not in ("bias", "num_batches_tracked")
)


def is_left_behind(name: str, leaves: Collection[str]) -> bool:
    """Whether a tensor of any layer is a stale entry by its name alone, where the model's missing
    keys, which end in `leaves`, have none like it.
    """
    leaf = name.rpartition(".")[2]
    return leaf in _LEFT_BEHIND and leaf not in leaves


def stale_of(name: str, shape: Shape, other: Tree) -> Stale | None:
    """The kind of stale entry that `name` is, which the `other` side lacks; None for anything
    else.
    """
    owner, _, leaf = name.rpartition(".")
    known = not owner or owner in other.nodes
    for row in STALE:
        if leaf in row.leaves and (known or not row.of_a_layer) and row.holds(name, shape):
            return row
    return None


def stale(trials: Trials, base: Trial, unexpected: Sequence[str]) -> tuple[Trial, list[str]]:
    """`base` without the stale entries among `unexpected`, and a sentence for each kind."""
    shapes = {name: shape for name, shape, _ in trials.unmatched(base)}
    model = Tree(trials.target.keys)
    found: dict[Stale, list[str]] = {}
    for name in unexpected:
        kind = stale_of(name, shapes[name], model) if name in shapes else None
        if kind is not None:
            found.setdefault(kind, []).append(name)
    sentences = []
    for kind, names in found.items():
        leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        said = f"{counted(len(names), kind.noun)} {kind.why} ({leaves})"
        done = _without(trials, base, names, said)
        base = done or base
        sentences.append(f"{said}: nothing is lost without {_pronoun(names)}")
    return base, sentences


def _pronoun(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def parts(trials: Trials, base: Trial, unexpected: Sequence[str]) -> tuple[Trial, list[str]]:
    """`base` without the parts of the net that the model has not, where the model lacks nothing
    else; and a sentence.
    """
    model = Tree(trials.target.keys)
    shapes = {name for name, _, _ in trials.unmatched(base)}
    found = roots(model, unexpected)
    if not found or not all(is_part(root, model) for root in found):
        return base, []
    names = [name for keys in found.values() for name in keys]
    if not shapes.issuperset(names):
        return base, []
    said = f"{listing(list(found))} ({counted(len(names), 'key')})"
    done = _without(trials, base, names, said, list(found))
    if done is None:
        return base, []
    return done, [f"the file also holds {said}, which the model does not have: left out"]


def is_part(root: str, model: Tree) -> bool:
    """Whether a module that `model` lacks stands for itself: neither one more of a series that
    the model has, nor a part of a block.
    """
    return not is_inside_a_series(root) and not model.members(series_of(root))


# -- rules -------------------------------------------------------------------------------------
def _without(
    trials: Trials, base: Trial, names: Sequence[str], said: str, paths: Sequence[str] = ()
) -> Trial | None:
    """`base` with rules that drop exactly `names`; None where there are none to say so."""
    for globs in _globs(names, paths):
        rules = tuple(Rule("drop", glob) for glob in globs)
        done = trials.run(base, Step(rules, f"leaving out {said}")) if rules else None
        if done is not None and _drops(base, done) == set(names):
            return done
    return None


def _drops(base: Trial, done: Trial) -> set[str | None]:
    rows = zip(base.names, done.names, strict=True)
    return {name for name, left in rows if left is None and name is not None}


def _globs(names: Sequence[str], paths: Sequence[str]) -> list[list[str]]:
    """Ways to name the keys, the shortest first."""
    leaves = [name.rpartition(".")[2] for name in names]
    ends = [".".join(name.split(".")[-2:]) for name in names]
    ways = [
        [path if path in names else f"{path}.**" for path in paths],
        list(dict.fromkeys(leaves)),
        [f"**.{end}" for end in dict.fromkeys(ends)],
        list(names),
    ]
    return [ways[0], *(way for way in ways[1:] if len(way) <= _EACH)]
