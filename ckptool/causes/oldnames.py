"""Names that libraries have changed between their versions, in both directions.

Knows: which names, and how they were changed. Must not know: prefixes, files, torch.
A new one is a row of `CHANGES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptool.causes.spelling import is_exact, spell
from ckptool.causes.trials import Step, Target, Trial, Trials
from ckptool.keynames import Rule


class Change(NamedTuple):
    """Names of one kind: `rows` are (expression, new text) as `--rename` takes them; `sign` is
    found in a name of a model that goes by the new ones.
    """

    rows: tuple[tuple[str, str], ...]
    sign: str
    deed: str


_P = r"(^|\.)"
_PAR = r"parametrizations\."

# Sources: torchvision/models/densenet.py (_load_state_dict), torch/nn/utils/parametrizations.py
# (the hooks of weight_norm and spectral_norm), peft/utils/save_and_load.py,
# torchvision/models/detection/rpn.py (RPNHead, version 2).
CHANGES: tuple[Change, ...] = (
    Change(
        ((rf"{_P}(denselayer\d+\.(?:norm|relu|conv))\.([12])(?=\.)", r"\g<1>\g<2>\g<3>"),),
        r"denselayer\d+\.(norm|conv)[12]\.",
        "renaming DenseNet's layers as from torch 0.4 on (norm.1 is norm1)",
    ),
    Change(
        ((rf"{_P}([^.]+)_g$", r"\g<1>parametrizations.\g<2>.original0"),
         (rf"{_P}([^.]+)_v$", r"\g<1>parametrizations.\g<2>.original1")),
        rf"{_P}{_PAR}[^.]+\.original0$",
        "renaming weight_norm's weight_g and weight_v to parametrizations.weight.original0 and original1",
    ),
    Change(
        ((rf"{_P}{_PAR}([^.]+)\.original0$", r"\g<1>\g<2>_g"),
         (rf"{_P}{_PAR}([^.]+)\.original1$", r"\g<1>\g<2>_v")),
        rf"{_P}[^.]+_g$",
        "renaming weight_norm's parametrizations.weight.original0 and original1 to weight_g and weight_v",
    ),
    Change(
        ((rf"{_P}([^.]+)_orig$", r"\g<1>parametrizations.\g<2>.original"),
         (rf"{_P}([^.]+)_u$", r"\g<1>parametrizations.\g<2>.0._u"),
         (rf"{_P}([^.]+)_v$", r"\g<1>parametrizations.\g<2>.0._v")),
        rf"{_P}{_PAR}[^.]+\.0\._u$",
        "renaming spectral_norm's weight_orig, weight_u and weight_v to parametrizations.weight",
    ),
    Change(
        ((rf"{_P}{_PAR}([^.]+)\.original$", r"\g<1>\g<2>_orig"),
         (rf"{_P}{_PAR}([^.]+)\.0\._u$", r"\g<1>\g<2>_u"),
         (rf"{_P}{_PAR}([^.]+)\.0\._v$", r"\g<1>\g<2>_v")),
        rf"{_P}[^.]+_orig$",
        "renaming spectral_norm's parametrizations.weight to weight_orig, weight_u and weight_v",
    ),
    Change(
        ((rf"{_P}gamma$", r"\g<1>weight"), (rf"{_P}beta$", r"\g<1>bias")),
        rf"{_P}weight$",
        "renaming gamma and beta to weight and bias",
    ),
    Change(
        ((rf"{_P}weight$", r"\g<1>gamma"), (rf"{_P}bias$", r"\g<1>beta")),
        rf"{_P}gamma$",
        "renaming weight and bias to gamma and beta",
    ),
    Change(
        ((rf"{_P}a_2$", r"\g<1>weight"), (rf"{_P}b_2$", r"\g<1>bias")),
        rf"{_P}weight$",
        "renaming a_2 and b_2 to weight and bias",
    ),
    Change(
        ((rf"{_P}(lora_(?:embedding_)?[AB])\.weight$", r"\g<1>\g<2>.default.weight"),
         (rf"{_P}(lora_embedding_[AB])$", r"\g<1>\g<2>.default")),
        rf"{_P}lora_(embedding_)?[AB]\.default",
        "adding PEFT's adapter name 'default'",
    ),
    Change(
        ((rf"{_P}(lora_(?:embedding_)?[AB])\.default\.weight$", r"\g<1>\g<2>.weight"),
         (rf"{_P}(lora_embedding_[AB])\.default$", r"\g<1>\g<2>")),
        rf"{_P}lora_[AB]\.weight$",
        "removing PEFT's adapter name 'default'",
    ),
    Change(
        ((rf"{_P}(rpn\.head\.conv)\.(weight|bias)$", r"\g<1>\g<2>.0.0.\g<3>"),
         (rf"{_P}(roi_heads\.mask_head)\.mask_fcn1\.(weight|bias)$", r"\g<1>\g<2>.0.0.\g<3>"),
         (rf"{_P}(roi_heads\.mask_head)\.mask_fcn2\.(weight|bias)$", r"\g<1>\g<2>.1.0.\g<3>"),
         (rf"{_P}(roi_heads\.mask_head)\.mask_fcn3\.(weight|bias)$", r"\g<1>\g<2>.2.0.\g<3>"),
         (rf"{_P}(roi_heads\.mask_head)\.mask_fcn4\.(weight|bias)$", r"\g<1>\g<2>.3.0.\g<3>")),
        rf"{_P}rpn\.head\.conv\.0\.0\.weight$",
        "renaming the detector's heads as from torchvision 0.13 on",
    ),
)  # fmt: skip

_BLUNT = frozenset({"weight", "bias"})
"""What nearly every name ends in: such a row is tried on names that lack a place alone."""


class _Row(NamedTuple):
    old: re.Pattern[str]
    new: str
    change: Change


def _rows(names: Sequence[str], target: Target) -> Iterator[_Row]:
    """The rows whose old names the file has and whose new ones the model has."""
    for change in CHANGES:
        sign = re.compile(change.sign)
        if not any(sign.search(key) for key in target.keys):
            continue
        for old, new in change.rows:
            expression = re.compile(old)
            if any(expression.search(name) for name in names):
                yield _Row(expression, new, change)


def renamed_everywhere(trials: Trials, base: Trial) -> Trial | None:
    """Every change that both sides show, on all names: what lies in front may differ yet."""
    names = [name for name in base.names if name is not None]
    done: Trial | None = None
    for change, rows in _by_change(_rows(names, trials.target)):
        if any(row.old.pattern.removeprefix(_P).removesuffix("$") in _BLUNT for row in rows):
            continue
        rules = tuple(Rule("rename", row.old.pattern, row.new) for row in rows)
        done = trials.run(done or base, Step(rules, change.deed)) or done
    return done


def _by_change(rows: Iterator[_Row]) -> list[tuple[Change, list[_Row]]]:
    found: dict[Change, list[_Row]] = {}
    for row in rows:
        found.setdefault(row.change, []).append(row)
    return list(found.items())


def renamed_where_missing(trials: Trials, base: Trial) -> Trial | None:
    """The changes on names without a place that get one by it, and on no other name."""
    lacking = trials.unmatched(base)
    shapes = {name: shape for name, shape, _ in lacking}
    taken = {name for name in base.names if name is not None}
    steps: list[Step] = []
    for change, rows in _by_change(_rows(list(shapes), trials.target)):
        pairs: dict[str, str] = {}
        for row in rows:
            for name, shape in shapes.items():
                new = row.old.sub(row.new, name)
                if new != name and new not in taken and trials.target.takes(new, shape):
                    pairs[name] = new
                    taken.add(new)
        if pairs:
            steps.append(Step(_said(change, pairs, base), change.deed))
            for name in pairs:
                del shapes[name]
    return trials.run(base, *steps) if steps else None


def _said(change: Change, pairs: dict[str, str], base: Trial) -> tuple[Rule, ...]:
    """The rows themselves where they rename nothing else, or narrower rules."""
    names = [name for name in base.names if name is not None]
    rows = [Rule("rename", old, new) for old, new in change.rows]
    used = [rule for rule in rows if any(re.search(rule.argument or "", name) for name in pairs)]
    return tuple(used) if is_exact(used, pairs, names) else spell(pairs, names)
