"""The part of the Python API that changes a model: load_into, freeze.

Knows: verbs, and models that are at hand. Must not know: click; nothing here prints.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ckptool.limits import DEFAULT, Limits
from ckptool.models.onto import Frozen
from ckptool.models.onto import freeze as _freeze
from ckptool.places import PlaceLike
from ckptool.verbs import load_into as _into
from ckptool.verbs.load_choice import Rules

__all__ = ["Frozen", "Loading", "freeze", "load_into"]


@dataclass(frozen=True, slots=True)
class Loading(_into.Loading):
    """What `load_into` did, as a few lines of text."""

    def __str__(self) -> str:
        from ckptool.render.load import loading_text

        return loading_text(self.to_dict())

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def load_into(
    model: Any,
    place: PlaceLike,
    *,
    optimizer: Any = None,
    device: Any = None,
    rules: Rules = "auto",
    strict: bool = True,
    mismatched: str = "error",
    at: str | None = None,
    optimizer_at: str | None = None,
    check: bool = True,
    limits: Limits = DEFAULT,
) -> Loading:
    """Load a file into a model, wrapped or not on either side, and into its optimizer.

    The keys of the file follow the rule that explains them (`rules="auto"`), none (None), or
    those given, in the words of `convert`: [("strip-prefix", "net.")]. `at` names the state_dict
    in the file, `optimizer_at` the optimizer's state, as dotted paths, where there are several.
    `strict` asks that no key is missing or unexpected; `mismatched="skip"` lets the model keep
    what has another shape. Numbers go where the model has its own, or with it to `device`; a
    model on the meta device gets its tensors there (default: the CPU). The optimizer's moments
    go to their parameters, its groups and shapes are compared first.
    The report has `.loaded`, `.missing_keys`, `.unexpected_keys`, `.mismatched`, `.cause` and
    `.extras`: `start = report.extras["epoch"] + 1`.
    Raises CkptError with cause and fix; then model and optimizer are as they were.
    """
    options = _into.Options(
        optimizer, device, rules, strict, mismatched, at, optimizer_at, check
    )  # fmt: skip
    done = _into.load_into_place(model, place, options, limits)
    return Loading(**{row.name: getattr(done, row.name) for row in fields(done)})


def freeze(model: Any, keep: Any = (), *, only: Any = None) -> Frozen:
    """Set requires_grad to False for all parameters of a model, or for those in `only`, but
    those in `keep`: `freeze(net, keep=["fc.*"])`, `freeze(net, only=report.loaded)`.

    Names are those of the net without its wrappers; globs are those of every verb. Returns the
    names that are frozen and those that are not. Statistics of BatchNorm still move in training
    mode. Raises CkptError for a name or glob that matches nothing; then nothing was changed.
    """
    return _freeze(model, _names(keep), None if only is None else _names(only))


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
