"""A loaded object as lines of text, every key, type, shape, byte and tie in them, so that two
loaders can be compared. Needs torch.
"""

from __future__ import annotations

import hashlib
from types import BuiltinFunctionType, FunctionType

import torch

_NAMES = ("Reference", "StorageType", "layout")  # ours, and torch's, for a class that is a value
MOST = 20_000


class TooLarge(Exception):
    """More than MOST lines: a bomb that torch loads lazily."""


def elements_of(tensor):
    """The elements of a strided tensor, contiguous, as bytes."""
    plain = tensor.detach()
    plain = plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain
    if plain.dtype is torch.bool:
        plain = plain.view(torch.uint8)  # copied as bool, any byte but 0 would become 1
    flat = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class Describer:
    """Lines of one object: `place: what`."""

    def __init__(self):
        self.lines, self.storages, self._open = [], {}, set()

    def describe(self, value, place=()):
        if len(self.lines) >= MOST:
            raise TooLarge
        if id(value) in self._open:
            self._say(place, "<cycle>")
            return
        self._open.add(id(value))
        self._one(value, place)
        self._open.discard(id(value))

    def _say(self, place, text):
        self.lines.append(f"{place!r}: {text}")

    def _one(self, value, place):
        if isinstance(value, torch.Tensor):
            self._say(place, self.tensor(value))
        elif isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            self._say(place, f"storage {value.device} {value.nbytes()} {_digest(bytes(value.untyped() if hasattr(value, 'untyped') else value))}")  # fmt: skip
        elif isinstance(value, dict):
            self._say(place, f"{type(value).__name__} of {len(value)}")
            for key, inner in value.items():
                self._say((*place, "key"), _scalar(key))
                self.describe(inner, (*place, _scalar(key)))
            if vars(value) if hasattr(value, "__dict__") else None:
                self.describe(vars(value), (*place, "__dict__"))
        elif isinstance(value, list | tuple):
            self._say(place, f"{type(value).__name__} of {len(value)}")
            for number, inner in enumerate(value):
                self.describe(inner, (*place, number))
        elif isinstance(value, set | frozenset):
            self._say(place, f"{type(value).__name__} {sorted(map(_scalar, value))}")
        else:
            self._say(place, _scalar(value))

    def tensor(self, one):
        """Type, shape, strides, bytes, and which tensors lie in one storage with it."""
        words = [
            type(one).__name__,
            str(one.dtype),
            str(tuple(one.shape)),
            f"grad={one.requires_grad}",
        ]
        if one.is_meta:
            return " ".join([*words, "meta", str(one.stride())])
        if one.layout is not torch.strided:
            return " ".join([*words, str(one.layout), *map(self.tensor, _parts(one))])
        if one.is_quantized:
            words.append(_digest(elements_of(one.int_repr())))
            return " ".join([*words, _scheme(one)])
        if one.numel() > 1 << 20:
            raise TooLarge
        home = one.untyped_storage().data_ptr() if one.numel() else None
        tied = self.storages.setdefault(home, len(self.storages)) if home else "-"
        words += [
            str(one.stride()) if one.numel() else "-",
            str(one.storage_offset()),
            f"in {tied}",
        ]
        return " ".join([*words, _digest(elements_of(one))])


def _parts(one):
    if one.layout is torch.sparse_coo:
        return (one._indices(), one._values())
    if one.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (one.crow_indices(), one.col_indices(), one.values())
    return (one.ccol_indices(), one.row_indices(), one.values())


def _scheme(one):
    """How it is quantized; nothing for one that torch itself cannot say it of."""
    try:
        return f"{one.qscheme()} {_scales(one)}"
    except RuntimeError:
        return "of no scheme"


def _scales(one):
    if "channel" not in str(one.qscheme()):
        return f"{one.q_scale()} {one.q_zero_point()}"
    return f"{one.q_per_channel_scales().tolist()} {one.q_per_channel_zero_points().tolist()}"


def _digest(data):
    return hashlib.sha1(data).hexdigest()[:16]


def _scalar(value):
    """Type and value; only the type of what is no plain value."""
    if isinstance(
        value,
        bool
        | int
        | float
        | complex
        | str
        | bytes
        | bytearray
        | torch.device
        | torch.dtype
        | type(None),
    ):
        if type(value) is int and value.bit_length() > 4000:
            return f"int of {value.bit_length()} bits, {value & 0xFFFF}"
        return f"{type(value).__name__} {value!r}"
    if (
        isinstance(value, type | FunctionType | BuiltinFunctionType)
        or type(value).__name__ in _NAMES
    ):
        return "<a name>"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(_scalar, value))})"
    return f"<{type(value).__name__}>"


def described(value):
    """The lines. Raises TooLarge."""
    one = Describer()
    one.describe(value)
    return one.lines


def tensors_in(value, place=()):
    """(path, tensor) of everything in dicts and lists, as ckptool writes a path."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict | list | tuple) and len(place) < 40:
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in rows:
            if isinstance(key, str | int | float | None):  # a class, a tensor: other words of ours
                small = type(key) is int and abs(key) < 1 << 53
                part = key if small or type(key) is str else repr(key)
                yield from tensors_in(inner, (*place, part))
