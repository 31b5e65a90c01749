"""One run of a model's own `load_state_dict` on tensors that have shapes and no numbers.

Knows: torch's loading and what it says. Must not know: files, rules, messages for people.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch  # noqa: TID253 - this room is imported only where torch is asked for
from torch.nn.parameter import UninitializedParameter  # noqa: TID253
from torch.overrides import TorchFunctionMode  # noqa: TID253

from ckptool.checkpoint import Mismatched, Wanted
from ckptool.models.expected_borrow import SMALL, Borrowed

_EXTRA = "_extra_state"
_SIZE = re.compile(
    r"size mismatch for (.*): copying a param with shape (.*?) from checkpoint, "
    r"the shape in current model is (.*?)\.?",
    re.DOTALL,
)
_COPY = re.compile(r'While (?:copying|swapping) the parameter named "(.*?)", ', re.DOTALL)
"""Torch does not say what shape that has: it is no tensor, or cannot be copied."""
_HEAD = "Error(s) in loading state_dict for "
_SETS = ("Missing key(s) in state_dict: ", "Unexpected key(s) in state_dict: ")
"""What a strict load puts before its complaints; the sets are known from the lists themselves."""
_LARGE = 1 << 50
"""Elements of a meta tensor with strides of its own; torch counts its bytes in 63 bits."""
_HUGE = 1 << 28
"""Elements of a tensor that gets no zeros: a hook would compute with them, in real memory."""
_ALIASES = (torch.Tensor.data.__get__, torch.Tensor.detach)  # type: ignore[attr-defined]
"""Ways to a tensor's numbers past the tensor: `weight.data.copy_(…)`."""


class Said(NamedTuple):
    """What the load said, in torch's order. `copied` {id: tensor} are those of the model that came
    from the file; `complaints` are its errors about other things than shapes.
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched: tuple[Mismatched, ...]
    complaints: tuple[str, ...]
    copied: Mapping[int, Any]


class NoSuchTensor(Exception):
    """The file claims a shape that torch cannot make."""


class Inert:
    """A value of the file that is no tensor, and of which nothing is known."""

    __slots__ = ()


def file_values(
    have: Mapping[str, Sequence[int] | None],
    wanted: Mapping[str, Wanted],
    own: Callable[[], Mapping[str, Any]],
    real: bool,
) -> OrderedDict[str, Any]:
    """A state_dict that has the shapes of a file: meta tensors, or zeros that take no memory.

    What is no tensor there is the model's own value of that key, so that hooks meet the type
    they know. `own` gives the model's state_dict. A dtype is that of the model.
    """
    values: OrderedDict[str, Any] = OrderedDict()
    for key, shape in have.items():
        row = wanted.get(key)
        if shape is None:
            values[key] = _no_tensor(key, row, own)
        elif real and row is not None and row.dtype and row.dtype.startswith("q"):
            values[key] = _quantized(key, tuple(shape), own())
        else:
            values[key] = _blank(key, tuple(shape), row, real)
    return values


def _blank(key: str, shape: tuple[int, ...], row: Wanted | None, real: bool) -> Any:
    """A tensor of the shape. Large or absurd ones repeat one element: no memory, no overflow."""
    dtype = getattr(torch, row.dtype or "", None) if row is not None else None
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    count = prod(shape)
    device = "cpu" if real and count <= _HUGE else "meta"
    try:
        if count <= (SMALL if device == "cpu" else _LARGE):
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise NoSuchTensor(f"no tensor can have the shape {list(shape)} of '{key}'") from error


def _no_tensor(key: str, row: Wanted | None, own: Callable[[], Mapping[str, Any]]) -> Any:
    if row is None:
        return Inert()
    if row.kind in ("parameter", "buffer"):  # not initialised on both sides, where it is lazy here
        return _lazy() if row.shape is None else Inert()
    value = own().get(key)
    return value if value is not None and not isinstance(value, torch.Tensor) else Inert()


def _lazy() -> Any:
    kind: Any = UninitializedParameter
    return kind(device="meta")


def _quantized(key: str, shape: tuple[int, ...], own: Mapping[str, Any]) -> Any:
    """Packing asks for a quantized tensor: the model's own, or one of the file's shape."""
    value = own.get(key)
    if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
        return value
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.qint8
    return torch._empty_affine_quantized(shape, scale=1.0, zero_point=0, dtype=dtype)


class _Trail(TorchFunctionMode):
    """Follows the file's tensors through whatever hooks do with them, to where they are copied."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        self.known: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        self.copied: dict[int, Any] = {}
        self._aliases: dict[int, tuple[Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_:
            source = args[1] if len(args) > 1 else (kwargs or {}).get("src")
            if id(source) in self.known:
                _, target = self._aliases.get(id(args[0]), (None, args[0]))
                self.copied[id(target)] = target
        elif isinstance(out, torch.Tensor):
            if self._from_file(args, kwargs):
                self.known[id(out)] = out
            elif func in _ALIASES:
                self._aliases[id(out)] = out, args[0]
        elif type(out) in (list, tuple) and self._from_file(args, kwargs):
            self.known.update((id(part), part) for part in out if isinstance(part, torch.Tensor))
        return out

    def _from_file(self, args: Any, kwargs: Any) -> bool:
        parts = [*args, *(kwargs or {}).values()]
        for part in parts:
            if isinstance(part, list | tuple):
                parts.extend(item for item in part if isinstance(item, torch.Tensor))
        return any(id(part) in self.known for part in parts)


class _Lists:
    """The lists that torch fills while it loads; it keeps them to itself when it raises."""

    def __init__(self) -> None:
        self.met: list[tuple[list[str], list[str], list[str]]] = []

    def tap(self, modules: Sequence[Any]) -> None:
        """Stand before `_load_from_state_dict` of these modules (borrowed: undone later)."""
        for module in modules:
            module.__dict__["_load_from_state_dict"] = self._before(module._load_from_state_dict)

    def _before(self, load: Callable[..., None]) -> Callable[..., None]:
        def tapped(*args: Any, **kwargs: Any) -> None:
            names = ("missing_keys", "unexpected_keys", "error_msgs")
            rest = [*args[4:7], *(kwargs[name] for name in names if name in kwargs)]
            if len(rest) == 3 and not any(rest[0] is met[0] for met in self.met):
                self.met.append((rest[0], rest[1], rest[2]))
            load(*args, **kwargs)

        return tapped

    def all(self, number: int) -> list[str]:
        """Every entry of one kind, in order."""
        return [entry for met in self.met for entry in met[number]]


def run_load(
    loan: Borrowed, values: OrderedDict[str, Any], metadata: Mapping[str, Any] | None, real: bool
) -> Said:
    """Load `values` into a borrowed model with its own `load_state_dict(strict=False)`.

    Raises whatever its hooks raise.
    """
    if metadata is not None:
        values._metadata = _own_metadata(metadata)  # type: ignore[attr-defined]
    root, lists, trail = loan.root, _Lists(), _Trail(values)
    theirs = type(root).load_state_dict is not torch.nn.Module.load_state_dict
    lists.tap(loan.modules() if theirs else [root])
    _silence_extra_state(loan.modules())
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if not real:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(trail)
        result = _load(root, values, lists)
    return _gather(result, lists, trail)


def _own_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Hooks may write into it; what is no dict, torch could not read."""
    return {
        path: dict(entry) if isinstance(entry, Mapping) else {} for path, entry in metadata.items()
    }


def _silence_extra_state(modules: Sequence[Any]) -> None:
    """No value of the file is known, so none is handed over; that it is there is all that counts."""
    for module in modules:
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            module.__dict__["set_extra_state"] = lambda state: None


def _load(root: Any, values: OrderedDict[str, Any], lists: _Lists) -> Any:
    words = {"strict": False} if _takes_strict(root.load_state_dict) else {}
    try:
        return root.load_state_dict(values, **words)
    except RuntimeError as error:
        if not str(error).startswith(_HEAD) or not lists.all(2):
            raise  # not torch's list of errors: a hook failed
        return None


def _takes_strict(load: Callable[..., Any]) -> bool:
    """Whether an overridden load_state_dict knows the word; else it may be strict, as its sets
    are known all the same.
    """
    try:
        signature(load).bind({}, strict=False)
    except TypeError:
        return False
    return True


def _gather(result: Any, lists: _Lists, trail: _Trail) -> Said:
    found = [getattr(result, name, None) for name in ("missing_keys", "unexpected_keys")]
    if not all(isinstance(keys, list) for keys in found):
        found = [lists.all(0), lists.all(1)]
    mismatched, complaints = [], []
    for text in lists.all(2):
        row = _mismatch(text.strip())
        mismatched += [row] if row else []
        if (row is None or row.file_shape is None) and not text.startswith(_SETS):
            complaints.append(text)
    return Said(
        tuple(found[0] or ()), tuple(found[1] or ()), tuple(mismatched), tuple(complaints),
        {**trail.known, **trail.copied},
    )  # fmt: skip


def _mismatch(text: str) -> Mismatched | None:
    """The key and the shapes that one of torch's errors names; None for another error."""
    size, copy = _SIZE.fullmatch(text), _COPY.match(text)
    if size:
        file, model = _shape(size[2]), _shape(size[3])
        return Mismatched(size[1], file, model) if file is not None and model is not None else None
    return Mismatched(copy[1], None, ()) if copy else None


def _shape(text: str) -> tuple[int, ...] | None:
    """`torch.Size([3, 4])`, as torch writes it."""
    numbers = re.fullmatch(r"(?:torch\.Size\()?[\[(]([\d, ]*)[\])]\)?", text)
    if numbers is None:
        return None
    return tuple(int(number) for number in numbers[1].split(",") if number.strip())
