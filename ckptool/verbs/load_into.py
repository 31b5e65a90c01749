"""load_into: a checkpoint into a model and its optimizer, by the rule that explains the names.

Knows: what is checked before anything is touched, and in which order. Must not know: how tensors
are made, how rules are found, printing.
Everything is read, and every checksum compared, before the model is touched; when its own hooks
fail after that, model and optimizer are put back.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Match, Mismatched, Note, Path
from ckptool.errors import CkptError, DoesNotFit, ModelError, Unsupported, UsageError
from ckptool.keynames import some
from ckptool.limits import DEFAULT, Limits
from ckptool.models import onto, optimizers
from ckptool.models.expected import expect
from ckptool.models.onto_kept import is_plain, put_back
from ckptool.models.tensors import Loader, find_device
from ckptool.places import PlaceLike
from ckptool.records import first_record
from ckptool.verbs import load_entries
from ckptool.verbs.fitting import Asked
from ckptool.verbs.joined_sums import check_joined
from ckptool.verbs.load import refuse_ranks, staying
from ckptool.verbs.load_choice import AUTO, Choice, Rules, choose, refuse
from ckptool.verbs.opening import doubting
from ckptool.verbs.reading import Opened, opened
from ckptool.verbs.tables import path_name

_META, _CPU = "meta", "cpu"


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked of a load; `at` and `optimizer_at` are dotted paths in the file."""

    optimizer: Any = None
    device: Any = None
    rules: Rules = AUTO
    strict: bool = True
    mismatched: str = "error"
    at: str | None = None
    optimizer_at: str | None = None
    check: bool = True


@dataclass(frozen=True, slots=True)
class Loading:
    """What was loaded. `match` has the model's keys as torch would list them, once the rule that
    its `cause` names was applied; `extras` are the plain values beside the weights, `renames`
    {key of the file: its name in the model}, `left_out` keys of the file that the rule left out,
    `optimizer` the place of the optimizer's state in the file; `findings` say more of what differs.
    """

    file: str
    model: str
    match: Match
    extras: dict[Any, Any] = field(repr=False)
    table: Path = ()
    renames: dict[str, str] = field(default_factory=dict, repr=False)
    left_out: tuple[str, ...] = ()
    optimizer: Path | None = None
    notes: tuple[Note, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def loaded(self) -> tuple[str, ...]:
        """The model's keys that have the file's numbers now."""
        return self.match.loaded

    @property
    def missing_keys(self) -> tuple[str, ...]:
        """In the model, not in the file."""
        return self.match.missing_keys

    @property
    def unexpected_keys(self) -> tuple[str, ...]:
        """In the file, not in the model."""
        return self.match.unexpected_keys

    @property
    def mismatched(self) -> tuple[Mismatched, ...]:
        """In both, with different shapes: the model keeps its own."""
        return self.match.mismatched

    @property
    def cause(self) -> str:
        """What was done to the names and what still differs, in a sentence."""
        return self.match.cause

    def to_dict(self) -> dict[str, Any]:
        """Plain data; of the extras their names."""
        return {
            "schema": 1,
            "file": self.file,
            "model": self.model,
            "table": list(self.table),
            "loaded": list(self.loaded),
            "missing_keys": list(self.missing_keys),
            "unexpected_keys": list(self.unexpected_keys),
            "mismatched": [
                {
                    "key": row.key,
                    "file_shape": None if row.file_shape is None else list(row.file_shape),
                    "model_shape": list(row.model_shape),
                }
                for row in self.mismatched
            ],
            "cause": self.cause,
            "findings": list(self.findings),
            "fix": self.match.fix,
            "renames": dict(self.renames),
            "left_out": list(self.left_out),
            "optimizer": None if self.optimizer is None else list(self.optimizer),
            "extras": [str(name) for name in self.extras],
            "notes": [{"slug": n.slug, "text": n.text, "command": n.command} for n in self.notes],
        }


def load_into_place(
    model: Any, place: PlaceLike, options: Options = Options(), limits: Limits = DEFAULT
) -> Loading:
    """Load a file into a model. Raises CkptError with cause and fix; then nothing was touched."""
    name = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else None
    try:
        run = _Run(model, options)

        def read(patient: bool) -> tuple[Checkpoint, _Staged]:
            with opened(place, limits, strict=True, patient=patient) as found:
                return found.checkpoint, run.staged(found)

        checkpoint, staged = doubting(read)
        run.apply(staged)
        return run.report(checkpoint, staged)
    except CkptError as error:
        error.path = error.path or name
        raise


class _Staged(NamedTuple):
    """All that was read, complete: what goes into the model, the optimizer, the report."""

    choice: Choice
    state: OrderedDict[str, Any]
    optimizer: dict[str, Any] | None
    optimizer_path: Path | None
    extras: dict[Any, Any]


class _Run:
    """One load: the net without its wrappers, and what was asked."""

    def __init__(self, model: Any, options: Options) -> None:
        if options.mismatched not in ("error", "skip"):
            raise UsageError(f"mismatched={options.mismatched!r}: one of 'error', 'skip'")
        self.options = options
        self.net = onto.bare(model)
        self.device = find_device(options.device)
        self.on_meta = onto.is_on_meta(self.net)
        if self.device is not None:
            if self.device.type == _META:
                raise UsageError("nothing can be loaded onto meta, which holds no numbers")
            onto.check_wrapped(model, self.device)
        if self.on_meta and options.optimizer is not None:
            raise UsageError(
                "the model is on the meta device: its Parameters are replaced, and the optimizer would keep the old ones",
                hint="load the model first, then build the optimizer and load it with load_into again",
            )
        expected = expect(self.net)
        name = type(self.net).__name__
        self.asked = Asked(name, expected.wanted, expected.match)

    # -- reading -----------------------------------------------------------------------------
    def staged(self, found: Opened) -> _Staged:
        """Check everything, then read everything."""
        options, checkpoint = self.options, found.checkpoint
        refuse_ranks(checkpoint)
        choice = choose(checkpoint, self.asked, options.rules, options.at)
        refuse(checkpoint, self.asked, choice, options.at,
               strict=options.strict, skip=options.mismatched == "skip")  # fmt: skip
        self._check_meta()
        if options.check:
            check_joined(checkpoint)
        beside = self._loader(found, _CPU)
        goes = beside
        if self.on_meta and self.device is not None:
            goes = self._loader(found, str(self.device))
        path, prepared = self._optimizer(found, choice, beside)
        state = self._state(choice, goes)
        taken = () if choice.table.path else self._taken(choice)
        extras = load_entries.extras(checkpoint, beside, taken)
        goes.finish()
        beside.finish()
        return _Staged(choice, state, prepared, path, extras)

    def _check_meta(self) -> None:
        lost = onto.unsaved(self.net, {row.key for row in self.asked.wanted})
        if lost and self.options.strict:
            raise ModelError(
                f"the model is on the meta device, and no checkpoint holds its buffers {some(list(lost))}",
                hint="build it on the CPU, or compute those afterwards and give strict=False",
            )

    def _loader(self, found: Opened, device: str) -> Loader:
        return Loader(
            found.checkpoint, found.source, find_device(device),
            stays=staying(found.checkpoint), check=self.options.check,
        )  # fmt: skip

    def _state(self, choice: Choice, loader: Loader) -> OrderedDict[str, Any]:
        """What goes into the model, by its names. A net without hooks needs only what it takes."""
        loaded = frozenset(choice.match.loaded)
        out = {row.key for row in choice.match.mismatched}
        plain = is_plain(self.net, ())
        keys = [key for key in choice.keys if choice.name(key) not in out]
        if plain:
            keys = [key for key in keys if choice.name(key) in loaded]
        read = loader.table(choice.table, frozenset(keys))
        wanted = self._taken(choice)
        state: OrderedDict[str, Any] = OrderedDict()
        for key, value in read.items():
            refusal = _refusal(key, value)
            if refusal is None:
                state[choice.name(key)] = value
            elif key in wanted:
                raise refusal
        if choice.metadata is not None:
            layers = {path: dict(row) for path, row in choice.metadata.items()}
            state._metadata = OrderedDict(layers)  # type: ignore[attr-defined]
        return state

    def _taken(self, choice: Choice) -> frozenset[str]:
        """The keys of the file that the model has too."""
        wanted = {row.key for row in self.asked.wanted}
        return frozenset(key for key in choice.keys if choice.name(key) in wanted)

    # -- the optimizer -----------------------------------------------------------------------
    def _optimizer(
        self, found: Opened, choice: Choice, loader: Loader
    ) -> tuple[Path | None, dict[str, Any] | None]:
        """The state that fits the optimizer. Shapes decide, so nothing is read to choose."""
        if self.options.optimizer is None:
            return None, None
        file = found.checkpoint.file
        every = load_entries.optimizers(load_entries.root_of(found.checkpoint))
        candidates = load_entries.choose(every, self.options.optimizer_at, file)
        shapes = self._loader(found, _META)
        refusals = {path: self._refusal(shapes, node, choice) for path, node in candidates.items()}
        fitting = [path for path, refusal in refusals.items() if refusal is None]
        if not fitting:
            raise next(refusal for refusal in refusals.values() if refusal is not None)
        if len(fitting) > 1:
            raise UsageError(
                f"{len(fitting)} optimizers in the file fit: {load_entries.listed(fitting)}",
                hint=f"name one: optimizer_at='{path_name(fitting[0])}'",
            )
        return fitting[0], self._prepared(loader, candidates[fitting[0]], choice)

    def _refusal(self, loader: Loader, node: Any, choice: Choice) -> DoesNotFit | None:
        """Why a state does not fit the optimizer; None where it does."""
        try:
            self._prepared(loader, node, choice)
        except DoesNotFit as refusal:
            return refusal
        return None

    def _prepared(self, loader: Loader, node: Any, choice: Choice) -> dict[str, Any]:
        names = {row.key for row in self.asked.wanted}

        def renamed(name: str) -> str:
            """By the rule; wrappers may stand before names here that stand before no key."""
            new = choice.name(name)
            while new not in names and new.startswith(_WRAPPERS):
                new = new.partition(".")[2]
            return new

        return optimizers.prepare(self.options.optimizer, loader.value(node), self.net, renamed)

    # -- loading -----------------------------------------------------------------------------
    def apply(self, staged: _Staged) -> None:
        """Touch the model and the optimizer; put both back when that fails."""
        optimizer, match = self.options.optimizer, staged.choice.match
        foreseen = match._replace(
            missing_keys=(*match.missing_keys, *(row.key for row in match.mismatched))
        )
        plain = is_plain(self.net, staged.state.values())
        with put_back(self.net, optimizer, numbers=not plain and not self.on_meta):
            if self.device is not None:
                onto.move(self.net, self.device)
            if staged.optimizer is not None:  # first: it may fail, a plain net cannot
                optimizers.load(optimizer, staged.optimizer)
            onto.load_state(self.net, staged.state, assign=self.on_meta, expected=foreseen)

    def report(self, checkpoint: Checkpoint, staged: _Staged) -> Loading:
        """What was done."""
        choice = staged.choice
        notes: list[Note] = []
        left = onto.without_numbers(self.net) if self.on_meta else ()
        if left:
            notes.append(Note("on-meta", f"still without numbers: {some(list(left))}"))
        dtypes = {row.key: row.dtype for row in self.asked.wanted if row.dtype}
        lossy = onto.lossy(staged.state, dtypes)
        if lossy:
            text = (
                f"of another kind of number in the model, so that something is lost: {some(lossy)}"
            )
            notes.append(Note("lossy-cast", text))
        return Loading(
            checkpoint.file, self.asked.name, choice.match, staged.extras, choice.table.path,
            choice.outcome.renames, choice.outcome.drops, staged.optimizer_path, tuple(notes),
            choice.found.cause.findings if choice.found is not None else (),
        )  # fmt: skip


_WRAPPERS = ("module.", "_orig_mod.")


def _refusal(key: str, value: Any) -> Unsupported | None:
    """Why a value of the file cannot go into a model; None where it can."""
    record = first_record(value)
    if record is not None:
        name = repr(record.class_name)[1:-1]
        return Unsupported(
            f"what the file has there is a {name}, which ckptool does not unpickle", key=key,
            hint="if you trust the file: model.load_state_dict(ckptool.load(path, trust=True)[…])",
        )  # fmt: skip
    if onto.lacks_numbers(value):
        return Unsupported("the file holds no numbers of it, only its shape", key=key)
    return None
