"""A model from what `--model SPEC` names, built without its numbers where that can be.

Knows: torch's meta device, what can be called. Must not know: checkpoints, printing.

SPEC is the user's own code and is run on purpose; nothing here reads a checkpoint.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from ckptool.checkpoint import Note
from ckptool.errors import CkptError, UsageError
from ckptool.models import torch_missing
from ckptool.models.spec_imports import Words, find, parse, surroundings
from ckptool.models.spec_prints import quiet_stdout
from ckptool.models.spec_words import failed, said, spot_of

try:
    import torch  # this room is imported only where torch is asked for
except (ImportError, OSError) as error:
    raise torch_missing(error) from error

_TEXTS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_NO_OP_COPY = "for .*: copying from a non-meta parameter"


class Built(NamedTuple):
    """A model definition come to life. `on_meta`: its tensors have shapes and no numbers;
    `name` is how it was called, `net.Net(num_classes=10)`.
    """

    model: torch.nn.Module
    on_meta: bool
    notes: tuple[Note, ...] = ()
    name: str = ""


def build(spec: str, arguments: Mapping[str, str] | None = None) -> Built:
    """Import what SPEC names and call it with `arguments`, texts that are Python literals where
    they can be (`10`, `[2, 2]`, `True`), else themselves.

    Under the meta device; on the CPU where the model's constructor needs numbers, which a note
    says. Raises UsageError (SPEC names nothing that can be built), ModelError (the user's code
    raised: its file and line).
    """
    words = parse(spec)
    values = {name: literal(text) for name, text in (arguments or {}).items()}
    with quiet_stdout(), surroundings(words), torch.random.fork_rng(devices=[]):
        found = find(words)
        made = _ready(words, found, values)
        if made is None:
            _check_call(words, found, values)
            made = _call(words, found, values)
        _check_module(words, made.model)
    return made._replace(notes=made.notes + _doubts(arguments or {}))


def literal(text: str) -> Any:
    """The Python literal that `text` is, else the text."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text


def _doubts(arguments: Mapping[str, str]) -> tuple[Note, ...]:
    """`pretrained=false` is the text 'false', which is true for Python: said."""
    return tuple(
        Note(
            "model-arg-text",
            f"--model-arg {name}={text} gives the text '{text}'; Python's word is {_TEXTS[text.lower()]}",
        )
        for name, text in arguments.items()
        if text.lower() in _TEXTS and isinstance(literal(text), str)
    )


def _ready(words: Words, found: Any, values: dict[str, Any]) -> Built | None:
    """A net that the module made itself."""
    if not isinstance(found, torch.nn.Module):
        return None
    if values:
        raise UsageError(f"{words.shown} is a ready-made net: --model-arg has nothing to go to")
    tensors = [*found.parameters(), *found.buffers()]
    if tensors and all(tensor.is_meta for tensor in tensors):
        return Built(found, True, (), words.shown)
    text = f"{words.shown} was made when its module was imported: its numbers stand in memory"
    return Built(found, False, (Note("model-on-cpu", text),), words.shown)


def _check_call(words: Words, found: Any, values: dict[str, Any]) -> None:
    """Raise UsageError where it cannot be called with these names."""
    if not callable(found):
        raise UsageError(_not_a_module(words.shown, found, "is"))
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return  # written in C, perhaps: calling it will tell
    try:
        signature.bind(**values)
    except TypeError as error:
        hint = f"{words.shown}{signature}: arguments are given by --model-arg NAME=VALUE"
        raise UsageError(f"{words.shown}: {error}", hint=hint) from error


def _call(words: Words, found: Callable[..., Any], values: dict[str, Any]) -> Built:
    name = f"{words.shown}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NO_OP_COPY)
            return Built(_called(name, found, values, torch.device("meta")), True, (), name)
    except CkptError as error:
        cause = error.__cause__ or error
    model = _called(name, found, values, nullcontext())
    spot = spot_of(cause)
    at = f" ({spot})" if spot else ""
    text = f"{name} was built on the CPU, since it needs numbers: {said(cause)}{at}"
    return Built(model, False, (Note("model-on-cpu", text),), name)


def _called(
    name: str, found: Callable[..., Any], values: dict[str, Any], place: AbstractContextManager[Any]
) -> Any:
    """What the user's callable gives. Raises ModelError from whatever it raised."""
    try:
        with place:
            return found(**values)
    except (Exception, SystemExit) as error:
        raise failed(name, error) from error


def _check_module(words: Words, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(_not_a_module(words.shown, model, "gives"))


def _not_a_module(name: str, found: Any, verb: str) -> str:
    kind = type(found).__name__
    inside = ""
    if isinstance(found, tuple | list) and len(found) <= 8:
        inside = f" ({', '.join(type(item).__name__ for item in found)})"
    article = "an" if kind[0].lower() in "aeio" else "a"
    return f"{name} {verb} {article} {kind}{inside}, not a torch.nn.Module"
