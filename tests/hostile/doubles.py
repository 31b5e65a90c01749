"""One name for two things, and objects changed once they are made: torch takes other numbers."""

from __future__ import annotations

import struct

from formats_support import tar
from hostile.blocks import (
    BUILD,
    FLOAT,
    OLD_DATA,
    SIX,
    TWO,
    B,
    W,
    call,
    dictionary,
    name,
    net,
    old,
    old_storage,
    one,
    op,
    ordered,
    stored,
    stream,
    tensor,
    tup,
)  # fmt: skip
from hostile.cases import DONE, HEADER, INVALID, NO, SIZES, TROUBLE, Case, Want, refused

INT = name("torch", "IntStorage")
TWICE = refused("key-duplicate")._replace(inspect=DONE, verify=DONE, diff=NO)
COLLIDES = Want(DONE, DONE, DONE, TROUBLE, NO)
ALIKE = Want(DONE, DONE, DONE, DONE, NO)
SWAPPED = tensor(stored(), 0, (2, 3), (1, 2))
ORDERED, COUNTER = "collections.OrderedDict", "collections.Counter"
GROWS = b"]q\x05(" + op("w") + W + b"e"
SIX_OF_IT = struct.pack("<q", 6) + SIX


def pair(stored_ops: bytes) -> bytes:
    return tensor(stored_ops, 0, (2,), (1,))


def views(*storages: bytes, keys: tuple[str, ...] = ("0",), data: bytes = SIX_OF_IT):
    """A legacy file of one tensor of two numbers a storage."""
    rows = ((f"t{number}", pair(ops)) for number, ops in enumerate(storages))
    return lambda: old(ordered(*rows), keys=list(keys), data=data)


def view(*parts: object, kind: bytes = FLOAT) -> bytes:
    return tup("storage", kind, "0", "cpu", 6, tup(*parts)) + b"Q"


def new(cls: str, *args: object) -> bytes:
    return name(*cls.rsplit(".", 1)) + tup(*args) + b"\x81"


def member(count: int, *rows: bytes) -> bytes:
    return b"".join((stream(count), *rows))


def tar_row(key: object, data: bytes) -> bytes:
    return stream(tup(key, "cpu", FLOAT)) + struct.pack("<q", len(data) // 4) + data


def tar_tensor(key: object, storage: object) -> bytes:
    said = stream(tup(key, storage, name("torch", "FloatTensor")))
    return said + struct.pack("<ii", 1, 0) + struct.pack("<3q", 2, 1, 0)


def old_tar(storages: bytes, listed: bytes = b"]", tensors: bytes | None = None):
    tensors = member(1, tar_tensor(3, 1)) if tensors is None else tensors
    files = {
        "storages": storages + stream(listed),
        "tensors": tensors,
        "pickle": stream(ordered(("w", op("3") + b"Q"))),
    }
    return lambda: tar(files)


TWO_ROWS = member(2, tar_row(1, SIX), tar_row(2, TWO))

STORAGES = (
    Case("view-key", "two views of one key: torch reads both as the first", INVALID,
         views(view("v", 0, 2), view("v", 2, 2))),
    Case("view-own", "a view named like its own storage: torch ignores it", INVALID,
         views(view("0", 2, 2))),
    Case("view-other", "a view named like another storage", INVALID,
         views(old_storage("1", 2), view("1", 2, 2), keys=("0", "1"), data=OLD_DATA)),
    Case("view-first", "a storage named like a view before it: its bytes go into the other", SIZES,
         views(view("1", 2, 2), old_storage("1", 2), keys=("0", "1"), data=OLD_DATA)),
    Case("view-dtype", "a view of another type than its storage", INVALID,
         views(old_storage(), view("v", 2, 2, kind=INT))),
    Case("view-list", "a view that is spelled as a list", INVALID,
         views(old_storage(view=["v", 2, 2]))),
    Case("view-number", "a view whose key is a number", INVALID, views(view(7, 2, 2))),
    Case("number-text", "a storage by the number 0 and by the text '0': torch reads it twice", SIZES,
         lambda: net(stream(ordered(("w", tensor(stored(0))), ("x", tensor(stored("0", kind=INT))))),
                     {"0": SIX})),
    Case("state", "a storage that BUILD tells of another type", INVALID,
         lambda: net(one(tensor(stored() + dictionary(("dtype", name("torch", "int32"))) + BUILD)))),
    Case("tar-storage", "two storages of one key in a tar", HEADER,
         old_tar(member(2, tar_row(1, SIX), tar_row(1, TWO)))),
    Case("tar-text", "one of them by text", HEADER,
         old_tar(member(2, tar_row(1, SIX), tar_row("1", TWO)))),
    Case("tar-view", "a view in the place of a storage", HEADER,
         old_tar(TWO_ROWS, op([tup(1, 2, 0, 2)]))),
    Case("tar-views", "views that are a tuple, not a list", INVALID,
         old_tar(TWO_ROWS, tup(tup(1, 2, 0, 2)))),
    Case("tar-tensor", "two tensors of one key", HEADER,
         old_tar(TWO_ROWS, tensors=member(2, tar_tensor(3, 1), tar_tensor(3, 2)))),
    Case("tensor-called", "torch.FloatTensor(w): a tensor of another's numbers", INVALID,
         lambda: net(one(call("torch.FloatTensor", W)))),
    Case("tensor-numbers", "torch.IntTensor([1, 2])", INVALID,
         lambda: net(one(call("torch.IntTensor", [1, 2])))),
    Case("tensor-bare", "torch.FloatTensor(2, 3): whatever memory holds", INVALID,
         lambda: net(one(call("torch._tensor._rebuild_from_type_v2", name("torch", "FloatTensor"),
                              name("torch", "Tensor"), (2, 3), None)))),
)  # fmt: skip

DICTS = (
    Case("counter", "a Counter that is made of a dict with tensors",
         Want(DONE, DONE, DONE, DONE, DONE),
         lambda: net(stream(call(COUNTER, dictionary(("w", W), ("b", B)))))),
    Case("counter-pairs", "a Counter of pairs: it counts them", INVALID,
         lambda: net(stream(call(COUNTER, [("w", 1)]) + b"(" + op("b") + B + b"u"))),
    Case("letters", "a text of two letters among pairs: a key and its value", INVALID,
         lambda: net(stream(call(ORDERED, [("w", W), "wx"])))),
    Case("pair-grows", "a pair of a dict that is a list, and grows later", INVALID,
         lambda: net(stream(ordered(("p", GROWS), ("d", call(ORDERED, [b"h\x05"])),
                                    ("x", call(ORDERED, [b"h\x05K\x01a"])))))),
    *(Case(f"made-anew-{label}", f"NEWOBJ makes {label} of pairs: it stays empty", INVALID,
           lambda made=made: net(stream(made)))
      for label, made in (
          ("ordered", new(ORDERED, [("w", W), ("b", B)])),
          ("counter", new(COUNTER, dictionary(("w", W)))),
          ("filled", new(ORDERED, dictionary(("w", W))) + b"(" + op("b") + B + b"u"),
      )),
    *(Case(f"equal-{label}", f"two keys that are one to Python: {label}", TWICE,
           lambda keys=keys: net(stream(dictionary((keys[0], W), (keys[1], B)))), weights=False)
      for label, keys in (
          ("large", (1 << 60, 1 << 60)),
          ("float", (1 << 53, float(1 << 53))),
          ("tuple", ((1, 2.0), (True, 2))),
          ("bytes", (b"C\x01a", b"C\x01a")),
          ("nan", (b"G\x7f\xf8\0\0\0\0\0\0q\x05", b"h\x05")),
          ("none", (None, None)),
      )),
    *(Case(f"alike-{label}", f"two state_dicts under keys that read alike: {label}", ALIKE,
           lambda keys=keys: net(stream(dictionary(*((key, ordered(("w", made), ("b", B)))
                                                     for key, made in zip(keys, (W, SWAPPED), strict=True))))))
      for label, keys in (
          ("float", (1.5, "1.5")),
          ("none", (None, "None")),
          ("object", (call("torch.device", "cpu"), call("torch.device", "meta"))),
          ("tuple", (((1,), 2), ((2,), 2))),
      )),
    Case("names", "two places of one dotted name", COLLIDES,
         lambda: net(stream(dictionary(("a", [[W]]), ("a.0", [B]))))),
)  # fmt: skip

CASES = (*STORAGES, *DICTS)
