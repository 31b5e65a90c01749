"""Which numpy dtypes of a pickle are harmless: those that leave bytes numbers.

Knows: what numpy.dtype.__reduce__ writes. Must not know: other calls, containers.
BUILD sets the flags of a dtype as the file has them (numpy/_core/src/multiarray/descriptor.c,
arraydescr_setstate). With the flags of an object dtype cleared, bytes of the file become
pointers to Python objects, and what they point at is run. Without a copy it is numpy's own
float32 that is changed, for everyone.
"""

from __future__ import annotations

import re
from typing import Any

from ckptool.formats.measures import global_name
from ckptool.pickles.nodes import DICT, Box, Obj, Tup, items_of, pairs, text_of

_NUMBERS = re.compile(r"[<>=|]?(?:[?bBhHiIlLqQefdgFDG]|[biufcmM]\d{1,2}|bool|[SUVa]\d{1,10})")
_SIZED = re.compile(r"[<>=|]?([A-Za-z])(\d{1,10})")  # numpy writes the bytes (U: the letters)
_OBJECTS = re.compile(r"\|?O[48]?")
_OBJECT_FLAGS = 63  # NPY_OBJECT_DTYPE_FLAGS
_HOLDS_OBJECTS = 7  # NPY_ITEM_REFCOUNT, NPY_LIST_PICKLE, NPY_ITEM_IS_POINTER


def is_plain_dtype(call: Obj) -> bool:
    """Whether this call of numpy.dtype, with its state, is as numpy writes it."""
    args = items_of(call.args) or ()
    kind = text_of(args[0]) if args else None
    if kind is None or not (_NUMBERS.fullmatch(kind) or _OBJECTS.fullmatch(kind)):
        return False
    if call.state is None:
        return True
    state = items_of(call.state.value) or ()
    if len(args) != 3 or args[2] not in (1, True) or not 8 <= len(state) <= 9:
        return False
    subarray, names, fields, size, _, flags = state[2:8]
    if subarray is not None or not all(type(n) is int for n in (size, flags)):
        return False
    if _OBJECTS.fullmatch(kind):
        return flags == _OBJECT_FLAGS and names is None and fields is None
    if flags & _HOLDS_OBJECTS:
        return False
    if names is None and fields is None:
        return True
    return type(fields) is Box and fields.kind == DICT and _inside(fields, kind, size)


def _inside(fields: Box, kind: str, size: int) -> bool:
    """Whether every field is a number, and lies within the record."""
    digits = kind.lstrip("<>=|V")
    whole = digits.isdigit() and int(digits) == size
    return whole and all(_fits(value, size) for _, value, *_ in pairs(fields))


def _fits(field: Any, size: int) -> bool:
    parts = field.items if type(field) is Tup else []
    if len(parts) != 2 or type(parts[0]) is not Obj or type(parts[1]) is not int:
        return False
    args = items_of(parts[0].args) or ()
    kind = text_of(args[0]) if args and global_name(parts[0].fn) == "numpy.dtype" else None
    sized = _SIZED.fullmatch(kind or "")
    if sized is None or not _NUMBERS.fullmatch(kind or "") or not is_plain_dtype(parts[0]):
        return False
    width = int(sized[2]) * (4 if sized[1] == "U" else 1)
    return parts[1] >= 0 and parts[1] + width <= size
