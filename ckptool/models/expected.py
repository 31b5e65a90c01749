"""What a model expects of a state_dict, and what its own `load_state_dict` would say of a file's.

Knows: state_dicts of modules, torch's sets. Must not know: files, causes, printing.

The sets are torch's own: its `load_state_dict(strict=False)` runs, with every hook of the model,
on tensors that have shapes and no numbers. An overridden `load_state_dict` or `state_dict` is
called as the user's program would call it. Neither changes the model, and no number is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptool.checkpoint import Match, Mismatched, Note, Wanted
from ckptool.errors import ModelError
from ckptool.models import torch_missing
from ckptool.models.spec_prints import quiet_stdout
from ckptool.models.spec_words import failed, said, spot_of

try:
    import torch  # this room is imported only where torch is asked for
    from torch.nn.parameter import is_lazy
except (ImportError, OSError) as error:
    raise torch_missing(error) from error

from ckptool.models.expected_borrow import Borrowed, borrowed
from ckptool.models.expected_load import NoSuchTensor, Said, file_values, run_load

Shapes = Mapping[str, Sequence[int] | None]
_QUANTIZED = "torch.ao."


class Matched(NamedTuple):
    """A match, and what to know about it. `complaints` are torch's errors that are not about
    shapes, in its words (a value that is no tensor: its key counts as mismatched).
    """

    match: Match
    notes: tuple[Note, ...] = ()
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """The keys of a model, and its own judge of a file's keys. `wanted` is in state_dict order."""

    model: torch.nn.Module
    wanted: tuple[Wanted, ...]

    def match(
        self,
        wanted: Sequence[Wanted] | None,
        have: Shapes,
        metadata: Mapping[str, Any] | None = None,
    ) -> Match:
        """What torch's `load_state_dict(strict=False)` would say: its sets, in its order. `have`
        are shapes in elements by key (None: no tensor), `metadata` is the file's `_metadata`.
        `wanted` is not looked at: the model itself is asked.
        """
        return self.compare(have, metadata).match

    def compare(self, have: Shapes, metadata: Mapping[str, Any] | None = None) -> Matched:
        """The same, with what to know about it.

        Where the model's hooks ask for numbers they get zeros, which a note says; where they
        raise all the same, names and shapes are compared without them, which a note says too.
        """
        try:
            return self._run(have, metadata, real=False)
        except Exception as error:
            failure = error
        try:
            found = self._run(have, metadata, real=True)
        except Exception as error:
            return self._without_hooks(have, metadata, error)
        return found._replace(notes=_on_zeros(failure))

    def _run(self, have: Shapes, metadata: Mapping[str, Any] | None, real: bool) -> Matched:
        rows = {row.key: row for row in self.wanted}
        with quiet_stdout():
            values = file_values(have, rows, self._own_values, real)
            with borrowed(self.model, real=real) as loan:
                result = run_load(loan, values, metadata, real)
                came = _from_file(loan, have, result)
        known = {*result.missing_keys, *(row.key for row in result.mismatched)}
        match = Match(
            tuple(row.key for row in self.wanted if row.key not in known and came(row)),
            result.missing_keys,
            result.unexpected_keys,
            tuple(_with_shape(row, rows) for row in result.mismatched),
        )
        return Matched(match, (), result.complaints)

    def _own_values(self) -> Mapping[str, Any]:
        """The model's state_dict, for what it holds that is no plain tensor."""
        with borrowed(self.model) as loan:
            return _state_dict(loan)

    def _without_hooks(
        self, have: Shapes, metadata: Mapping[str, Any] | None, failure: Exception
    ) -> Matched:
        from ckptool.compare import match

        spot = spot_of(failure)
        at = f" ({spot})" if spot else ""
        what = f"the model's own load_state_dict raises {said(failure)}{at} on these keys"
        what = str(failure) if isinstance(failure, NoSuchTensor) else what
        text = f"{what}; names and shapes were compared without its hooks"
        return Matched(match(self.wanted, have, metadata), (Note("hooks-not-run", text),))


def expect(model: torch.nn.Module) -> Expected:
    """The keys that `model` expects, whatever wraps it. The model stays as it is.

    Raises ModelError where its `state_dict()` raises.
    """
    with quiet_stdout():
        return Expected(model, _wanted(model))


def _wanted(model: torch.nn.Module) -> tuple[Wanted, ...]:
    """From stand-ins; where hooks of `state_dict` ask for numbers, from the model as it is."""
    for real in (False, True):
        with suppress(Exception), borrowed(model, real=real) as loan:
            return _rows(_state_dict(loan), loan)
    try:
        return _rows(model.state_dict(), Borrowed(real=True))
    except Exception as error:
        raise failed(f"{type(model).__name__}.state_dict()", error) from error


def _state_dict(loan: Borrowed) -> Mapping[str, Any]:
    """The model's own, holding the very stand-ins where it can."""
    for module in loan.modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            module.__dict__["get_extra_state"] = lambda: None
    try:
        found = loan.root.state_dict(keep_vars=True)
    except TypeError:  # overridden, without the word
        found = loan.root.state_dict()
    if not isinstance(found, Mapping):
        raise ModelError(f"state_dict() gives a {type(found).__name__}, not a dict")
    return found


def _rows(state: Mapping[str, Any], loan: Borrowed) -> tuple[Wanted, ...]:
    rows: list[Wanted] = []
    first: dict[Any, str] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            rows.append(Wanted(key, None, None, "extra"))
            continue
        tie = first.setdefault(_place(loan.originals.get(id(value), value)), key)
        shape = None if is_lazy(value) else tuple(value.shape)
        kind = loan.kinds.get(id(value), "tensor")
        dtype = str(value.dtype).removeprefix("torch.")
        rows.append(Wanted(key, shape, dtype, kind, tie if tie != key else None))
    return tuple(rows)


def _place(tensor: torch.Tensor) -> Any:
    """What two names of one tensor have in common: the object, or the same view of a storage."""
    if is_lazy(tensor) or not tensor.numel():
        return id(tensor)
    try:
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    except (RuntimeError, NotImplementedError):  # sparse, wrapped
        return id(tensor)


def _from_file(loan: Borrowed, have: Shapes, result: Said) -> Callable[[Wanted], bool]:
    """Whether a key's tensor came from the file, under that name or through a hook.

    Asked of the tensors that stand there after the load: some hooks replace the model's own.
    """
    after: Mapping[str, Any] = {}
    with suppress(Exception):
        after = _state_dict(loan)

    def came(row: Wanted) -> bool:
        now = id(after.get(row.key))
        if row.kind not in ("parameter", "buffer") or row.key not in after:
            return row.key in have
        return now in result.copied or (now not in loan.originals and row.key in have)

    return came


def _with_shape(row: Mismatched, rows: Mapping[str, Wanted]) -> Mismatched:
    """What is no tensor in the file, with the model's shape."""
    if row.file_shape is not None or row.key not in rows:
        return row
    return row._replace(model_shape=rows[row.key].shape or ())


def _on_zeros(failure: Exception) -> tuple[Note, ...]:
    """Said where the user's hooks asked for numbers; torch's quantized layers only cast them."""
    trace = failure.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        loading = trace.tb_frame.f_code.co_name == "_load_from_state_dict"
        if loading and module.startswith(_QUANTIZED):
            return ()
        trace = trace.tb_next
    spot = spot_of(failure)
    at = f" ({spot})" if spot else ""
    text = f"the model's load hooks read numbers; they were run on zeros instead{at}"
    return (Note("hooks-on-zeros", text),)
