"""A file against a model or another file: whether it fits, why not, and the rule that mends it.

Knows: who is asked (a model definition, a file, a list of keys), what a conversion makes of the
answer. Must not know: printing, how a rule is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool import compare
from ckptool.checkpoint import Checkpoint, Match, Note, Table, Wanted
from ckptool.errors import CkptError, DoesNotFit, LimitExceeded, NotACheckpoint, UsageError
from ckptool.formats.judge import FOREIGN
from ckptool.keynames import Rule, some
from ckptool.limits import DEFAULT, Limits
from ckptool.places import open_source
from ckptool.rules import apply
from ckptool.verbs.advice import offer
from ckptool.verbs.numbering import tie_of
from ckptool.verbs.reading import opened
from ckptool.verbs.request import Request
from ckptool.verbs.tables import choose_table, path_name, table_at

if TYPE_CHECKING:
    from ckptool.causes import Cause, Matcher


_NOT_ASKED = "hooks-not-run"
"""A note of `models.expected`: names and shapes were compared without the model's own hooks."""


class Asked(NamedTuple):
    """Whom a file is compared with: `wanted` in its order, `matcher` its own judge of keys.
    `is_model` tells a model from a file; `notes` say how it was built; `flags` are those of
    `convert` that name it (none for a model that is only in Python); `heard` fills with what
    the matcher had to say while it judged, until `forget`.
    """

    name: str
    wanted: tuple[Wanted, ...]
    matcher: Matcher
    is_model: bool = True
    notes: tuple[Note, ...] = ()
    flags: str = ""
    heard: Mapping[Note, None] = MappingProxyType({})
    forget: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer: `cause.match` as the file stands, `cause.after` once the rule is applied.
    `command` mends it, where a command can.
    """

    asked: Asked
    table: Table | None
    cause: Cause
    command: str | None
    notes: tuple[Note, ...]

    @property
    def fits(self) -> bool:
        """Whether the file loads as it is, strictly, as far as the model could be asked."""
        return self.cause.match.fits and not any(n.slug == _NOT_ASKED for n in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """The `match` of JSON schema 1, and what the screen needs beside it."""
        cause = self.cause
        return {
            "model": self.asked.name,
            "is_model": self.asked.is_model,
            "fits": self.fits,
            "wanted_count": len(self.asked.wanted),
            **_sets(cause.match),
            "cause": cause.sentence,
            "fix": self.command,
            "table": list(cause.table),
            "rules": [rule.flag for rule in cause.rules],
            "after": _sets(cause.after),
            "findings": list(cause.findings),
            "choices": list(cause.choices),
        }


def _sets(match: Match) -> dict[str, Any]:
    return {
        "loaded_count": len(match.loaded),
        "missing_keys": list(match.missing_keys),
        "unexpected_keys": list(match.unexpected_keys),
        "mismatched": [
            {
                "key": m.key,
                "file_shape": _listed(m.file_shape),
                "model_shape": _listed(m.model_shape),
            }
            for m in match.mismatched
        ],
    }


def _listed(shape: Sequence[int] | None) -> list[int] | None:
    return None if shape is None else list(shape)


# -- who is asked ------------------------------------------------------------------------------
def ask(
    model: Any = None,
    arguments: Mapping[str, str] | None = None,
    against: str | None = None,
    limits: Limits = DEFAULT,
) -> Asked | None:
    """Whom `--model` (a SPEC, from Python also a torch.nn.Module) or `--against` names; None
    for neither. Raises UsageError, ModelError, Unsupported without torch, and what reading
    raises.
    """
    if model is not None and against is not None:
        raise UsageError("--model and --against are two questions: give one of them")
    if arguments and not isinstance(model, str):
        raise UsageError("--model-arg needs --model or --fit with the name of a model")
    if against is not None:
        return _ask_file(against, limits)
    return None if model is None else _ask_model(model, arguments or {})


def _ask_model(model: Any, arguments: Mapping[str, str]) -> Asked:
    from ckptool.models.expected import expect

    name, flags = type(model).__name__, ""
    notes: tuple[Note, ...] = ()
    if isinstance(model, str):
        from ckptool.models.spec import build

        words = [f"--model-arg {quote(f'{word}={text}')}" for word, text in arguments.items()]
        flags = " ".join([f"--fit {quote(model)}", *words])
        model, _, notes, name = build(model, arguments)
    expected, heard = expect(model), dict[Note, None]()

    def matcher(wanted: object, have: Any, metadata: Mapping[str, Any] | None) -> Match:
        found = expected.compare(have, metadata)
        said = (Note("complaint", f"torch would say: {text}") for text in found.complaints)
        heard.update(dict.fromkeys((*found.notes, *said)))
        return found.match

    return Asked(name, expected.wanted, matcher, True, notes, flags, heard, heard.clear)


def _ask_file(path: str, limits: Limits) -> Asked:
    wanted = _listed_keys(path, limits) if path.lower().endswith(".json") else None
    if wanted is None:
        with opened(path, limits) as found:
            table = choose_table(found.checkpoint, None)
        if table is None:
            raise NotACheckpoint("it holds no state_dict to compare with", path=path)
        wanted = wanted_of(table)
    return Asked(path, wanted, compare.match, is_model=False)


def wanted_of(table: Table) -> tuple[Wanted, ...]:
    """What a file that fits this state_dict must have."""
    first: dict[Any, str] = {}
    rows = []
    for t in table.tensors:
        place = tie_of(t)
        owner = first.setdefault(place, t.key) if place is not None else t.key
        tie = owner if owner != t.key else None
        rows.append(Wanted(t.key, t.shape, t.dtype.name if t.dtype else None, "tensor", tie))
    return (*rows, *(Wanted(key, None, None, "extra") for key, _ in table.others))


def _listed_keys(path: str, limits: Limits) -> tuple[Wanted, ...] | None:
    """Keys from JSON: a list of names, {name: shape or null}, or what `inspect --json` prints;
    None for an index of shards, which is read as its folder.
    """
    if path.endswith(".index.json"):
        return None
    with open_source(path) as source:
        if source.size > limits.header_bytes:
            raise LimitExceeded("names", f"a file of keys of {source.size:,} bytes", path=path)
        data = source.read(0, source.size)
    try:
        found = json.loads(data.decode("utf-8-sig"))
        return tuple(_wanted_row(*row) for row in _key_rows(found))
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        text = "no keys in it: a list of names, {name: shape}, or what inspect --json prints"
        raise UsageError(text, path=path) from error


def _key_rows(found: Any) -> list[tuple[Any, Any]]:
    if isinstance(found, list):
        return [(key, None) for key in found]
    if "tables" not in found:
        return list(found.items())
    chosen = [t for t in found["tables"] if t["path"] == found["weights"]] or found["tables"][:1]
    return [(t["key"], t["shape"]) for t in chosen[0]["tensors"]] if chosen else []


def _wanted_row(key: Any, shape: Any) -> Wanted:
    if type(key) is not str or not (shape is None or all(type(n) is int for n in shape)):
        raise ValueError
    return Wanted(key, None if shape is None else tuple(shape))


# -- the answer --------------------------------------------------------------------------------
def fit(checkpoint: Checkpoint, asked: Asked, at: str | None = None) -> Fit:
    """Compare, and look for the rule that explains a difference. Raises UsageError for a path
    that does not exist.
    """
    from ckptool.causes import explain

    asked.forget()
    place = table_at(checkpoint, at).path if at is not None else None
    cause = explain(asked.wanted, checkpoint.tables, checkpoint.weights, asked.matcher, at=place)
    table = next((t for t in checkpoint.tables if t.path == cause.table), None)
    options = _options(cause, asked)
    command = offer(checkpoint, options, "fit") if options else None
    beside = _beside(checkpoint, table, options)
    return Fit(asked, table, cause, command, (*asked.notes, *asked.heard, *beside))


def _beside(checkpoint: Checkpoint, table: Table | None, options: str) -> Iterator[Note]:
    """What stands in the way though names and shapes agree."""
    if table is not None and table.kind == "tensors":
        text = "the file holds no state_dict: the keys are places of tensors in it"
        yield Note("places-as-keys", text)
    foreign = [row.name for row in checkpoint.globals if row.verdict == FOREIGN]
    if foreign and table is not None and table.path and table.kind == "state_dict":
        if "--select" not in options:
            options = f"--select {quote(path_name(table.path))} {options}".rstrip()
        text = f"torch.load needs the package of {some(foreign)} for this file; the weights alone need none"
        yield Note("foreign-beside", text, offer(checkpoint, options, "fit"))


def _options(cause: Cause, asked: Asked) -> str:
    """Flags that do as much as can be done: key rules, else --fit where those cannot say it."""
    after = cause.after
    if cause.match.fits or not after.loaded:
        return ""
    said = cause.partial if after.mismatched else cause.options
    if asked.flags and not after.missing_keys and (after.unexpected_keys or not said):
        return f"{asked.flags} --partial" if after.mismatched else asked.flags
    return said or cause.options


def numbers(found: Fit) -> dict[str, str]:
    """{key of the file: its number in list(net.parameters())}, exact, since the model says so."""
    kept = [row.key for row in found.asked.wanted if row.kind == "parameter" and row.tie is None]
    places = {key: str(i) for i, key in enumerate(kept)}
    ties = {row.key: row.tie for row in found.asked.wanted if row.tie}
    if found.table is None:
        return {}
    keys = [t.key for t in found.table.tensors]
    renames = apply(found.cause.rules, keys).renames if found.cause.rules else {}
    named = ((key, renames.get(key, key)) for key in keys)
    rows = ((key, places.get(ties.get(name) or name)) for key, name in named)
    return {key: number for key, number in rows if number is not None}


# -- convert --fit -----------------------------------------------------------------------------
def fitted(checkpoint: Checkpoint, request: Request) -> tuple[Request, tuple[Note, ...]]:
    """The request with the rules that make the file fit `request.fit`, and what to say.

    Tensors the model does not have are left out. Raises DoesNotFit when something stays missing
    or mismatched, unless `request.partial`; UsageError beside other key rules.
    """
    asked = ask(request.fit, dict(request.model_arguments))
    assert asked is not None
    at = request.select if request.select is not None else next(iter(request.at), None)
    found = fit(checkpoint, asked, at)
    after = found.cause.after
    if not request.partial and (after.missing_keys or after.mismatched or not after.loaded):
        raise _does_not_fit(checkpoint, found)
    if not after.loaded:
        raise DoesNotFit(f"nothing in it fits {asked.name}; nothing written", path=checkpoint.file)
    out = (*after.unexpected_keys, *(row.key for row in after.mismatched))
    leave = (Rule("leave-out", pairs=tuple((key, "") for key in out)),) if _held(found, out) else ()
    place = path_name(found.cause.table)
    default = choose_table(checkpoint, None)
    other = found.table is not default and request.select is None and len(checkpoint.tables) > 1
    return replace(
        request, rules=(*found.cause.rules, *leave), keep_module=True, at=(place,),
        select=place or "." if other else request.select,
    ), (*found.notes, *_said(found))  # fmt: skip


def _held(found: Fit, names: Sequence[str]) -> bool:
    """Whether the table has any of these."""
    if found.table is None or not names:
        return False
    keys, others = [t.key for t in found.table.tensors], [key for key, _ in found.table.others]
    renames = apply(found.cause.rules, keys, others).renames if found.cause.rules else {}
    return not {renames.get(key, key) for key in (*keys, *others)}.isdisjoint(names)


def _said(found: Fit) -> list[Note]:
    after = found.cause.after
    said = [Note("fit", f"{found.asked.name}: {found.cause.sentence}")]
    if not after.fits:
        said += [Note("fit-finding", text) for text in found.cause.findings]
    if after.missing_keys:
        keys = some(list(after.missing_keys))
        text = f"{len(after.missing_keys):,} of its keys are not in the output: {keys}"
        said.append(Note("fit-missing", text))
    if after.mismatched:
        rows = [
            f"{m.key} {_listed(m.file_shape)} (model {_listed(m.model_shape)})"
            for m in after.mismatched
        ]
        text = f"{len(rows):,} left out, being of another shape: {some(rows)}"
        said.append(Note("fit-mismatched", text))
    return said


def _does_not_fit(checkpoint: Checkpoint, found: Fit) -> CkptError:
    after = found.cause.after
    lost = {"missing": list(after.missing_keys), "mismatched": [m.key for m in after.mismatched]}
    facts = [f"{len(keys):,} {word} ({some(keys)})" for word, keys in lost.items() if keys]
    text = f"it does not fit {found.asked.name}: {'; '.join(facts) or 'no key matches'}; nothing written"
    hint = f"{found.cause.sentence}; --partial writes the {len(after.loaded):,} that fit"
    return DoesNotFit(
        text, path=checkpoint.file, hint=hint if after.loaded else found.cause.sentence
    )
