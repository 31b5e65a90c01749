"""Tensors that lie: shapes, strides, storages, keys."""

from __future__ import annotations

from hostile.blocks import (
    FLOAT,
    HOOKS,
    SIX,
    B,
    W,
    call,
    dictionary,
    name,
    net,
    one,
    op,
    ordered,
    stored,
    stream,
    tensor,
    tup,
)  # fmt: skip
from hostile.cases import (
    BOUNDS,
    DONE,
    INVALID,
    NO,
    OTHER,
    OTHER_FILE,
    SIZES,
    TROUBLE,
    Case,
    Want,
    refused,
)  # fmt: skip

UNHELD = VIEW = Want(DONE, DONE, DONE, TROUBLE, NO)


SWAPPED = tensor(stored(), 0, (2, 3), (1, 2))
PLAIN_PARTS = (stored(), 0, (2, 3), (3, 1), False, HOOKS)
BUILDER = name("torch._utils", "_rebuild_tensor_v2")


def flagged(flags: bytes) -> bytes:
    return call(BUILDER, *PLAIN_PARTS, flags)


def with_state(state: bytes) -> bytes:
    """A tensor that gets attributes, as a subclass does."""
    return call("torch._tensor._rebuild_from_type_v2", BUILDER, name("torch", "Tensor"),
                PLAIN_PARTS, state)  # fmt: skip


HIDING = dictionary(("data", SWAPPED))
OTHER_NUMBERS = (
    ("flag-number", "the flag neg as 1", flagged(dictionary(("neg", 1)))),
    ("flag-false", "the flag neg as False, which sets it", flagged(dictionary(("neg", False)))),
    ("flag-ordered", "the flag neg in an OrderedDict", flagged(ordered(("neg", True)))),
    ("flag-counter", "the flag neg in a Counter",
     flagged(call("collections.Counter") + b"(" + op("neg") + op(1) + b"u")),
    ("attribute", "an attribute 'data' with other numbers", with_state(HIDING)),
    ("slot", "the same among the slots", with_state(tup(None, HIDING))),
    ("ordered", "the same in an OrderedDict", with_state(ordered(("data", SWAPPED)))),
    ("parameter", "the same of a Parameter",
     call("torch._utils._rebuild_parameter_with_state", W, False, HOOKS, HIDING)),
    ("build", "BUILD gives a tensor another storage",
     W + tup(stored("1", 2), 0, (2,), (1,)) + b"b"),
    ("device-dtype", "a float32 that is cast to int32 on its device",
     call("torch._utils._rebuild_device_tensor_from_cpu_tensor", W, name("torch", "int32"), "cpu", False)),
    ("old", "a tensor of torch 0.1 over a storage of another type",
     name("torch", "IntTensor") + b")R" + tup(stored(), 0, (2, 3), (3, 1)) + b"b"),
)  # fmt: skip
GROWING = (b"]q\x06K\x03a", b"]q\x07K\x01a")


def lie(stored_ops: bytes | None = None, **shape):
    """One tensor `w` of which something is untrue."""
    arguments = {"offset": 0, "size": (2, 3), "stride": (3, 1)} | shape
    return lambda: net(one(tensor(stored_ops, *arguments.values())), {"0": SIX})


def keyed(*rows):
    return lambda: net(stream(ordered(*rows)))


def integer(bits: int) -> bytes:
    return op(1 << (bits - 1))


def dims(size: tuple[int, ...], stride: tuple[int, ...]):
    return lie(size=size, stride=stride)


def looped() -> bytes:
    """A dict and a list that hold themselves."""
    table = dictionary(("w", W)) + b"q\x05" + op("self") + b"h\x05s"
    return net(stream(table + op("l") + b"]q\x06h\x06as"))


SHAPES = (
    Case("size-grows", "lists as size and stride that get items after the call", BOUNDS,
         lambda: net(stream(ordered(("w", tensor(stored(), 0, *GROWING)),
                                    ("x", b"h\x06K\x02a"), ("y", b"h\x07K\x03a"))))),
    *(Case(f"other-numbers-{row[0]}", row[1], INVALID, lambda made=row[2]: net(one(made)))
      for row in OTHER_NUMBERS),
    Case("dict-of-dict", "an OrderedDict made of another object: its keys stand in no dict", INVALID,
         lambda: net(stream(call("collections.OrderedDict", ordered(("w", W)))
                            + b"(" + op("b") + B + b"u"))),
    Case("dict-then-items", "an OrderedDict of pairs, one of which is then set anew",
         Want(DONE, DONE, TROUBLE, TROUBLE, NO, "key-duplicate"),
         lambda: net(stream(call("collections.OrderedDict", [["w", W], ["b", B]])
                            + b"(" + op("w") + SWAPPED + b"u"))),
    Case("offset", "an offset behind the storage", BOUNDS, lie(offset=1000)),
    Case("stride", "a stride that leaves the storage", BOUNDS, dims((4,), (1000,))),
    Case("size", "a shape larger than the storage", BOUNDS, dims((1 << 20,), (1,))),
    Case("size-negative", "a size of -4", BOUNDS, dims((-4,), (1,))),
    Case("stride-negative", "a stride of -1", BOUNDS, lie(offset=3, size=(4,), stride=(-1,))),
    Case("offset-negative", "an offset of -1", BOUNDS, lie(offset=-1)),
    Case("rank", "two sizes, one stride", BOUNDS, dims((2, 3), (1,))),
    Case("rank-huge", "100,000 dimensions", refused("limit-rank"),
         dims((1,) * 100_000, (1,) * 100_000)),
    Case("size-dict", "a shape that is a dict", BOUNDS, lie(size=dictionary(("a", 1)))),
    Case("size-bool", "a shape with True in it", BOUNDS, dims((True, 3), (3, 1))),
    Case("overflow", "a shape whose product overflows to 0", VIEW,
         dims((1 << 32, 1 << 32, 4), (0, 0, 0)), weights=False),
    Case("stride-0", "24 bytes that are shown as 10**12 numbers: 4 TB when written out", VIEW,
         dims((10**12,), (0,)), weights=False),
    Case("numel-2-62", "2**62 elements: the bytes overflow 64 bits", SIZES,
         lie(stored(count=1 << 62))),
    Case("numel-negative", "a storage of -1 elements", BOUNDS, lie(stored(count=-1))),
    Case("numel-text", "a storage whose size is text", BOUNDS, lie(stored(count="6"))),
    Case("numel-float", "a storage of 6.0 elements", BOUNDS, lie(stored(count=6.0))),
    Case("numel-bool", "a storage of True elements", BOUNDS, lie(stored(count=True))),
    Case("numel-bits", "a storage whose size has 2,000 bits", SIZES,
         lie(stored(count=integer(2000)))),
    Case("numel-twice", "one storage declared with 6 and with 1,000 elements", SIZES,
         lambda: net(stream(ordered(("w", W), ("b", tensor(stored(count=1000), 0, (1000,), (1,))))),
                     {"0": SIX})),
    Case("dtype-twice", "one storage read as float32 and as int64", UNHELD,
         lambda: net(stream(ordered(
             ("w", W), ("i", tensor(stored(count=3, kind=name("torch", "LongStorage")), 0, (3,), (1,))))),
                     {"0": SIX})),
    Case("dtype-unknown", "a storage type that torch has not", INVALID,
         lie(stored(kind=name("torch", "EvilStorage")))),
    Case("key-escape", "a storage at ../../../../etc/passwd", SIZES,
         lie(stored("../../../../etc/passwd"))),
    Case("key-absolute", "a storage at /etc/passwd", SIZES, lie(stored("/etc/passwd"))),
    Case("key-int", "a storage key that is a number", OTHER, lie(stored(0))),
    Case("pid-short", "a persistent id of three parts", INVALID,
         lie(tup("storage", FLOAT, "0") + b"Q")),
    Case("pid-module", "a persistent id that is no storage", INVALID,
         lie(tup("module", name("torch.nn", "Linear"), "/etc/hostname") + b"Q")),
    Case("location-huge", "a device number that no machine has", OTHER,
         lie(stored(location="cuda:99999999999999"))),
    Case("location-odd", "a device that is not one", OTHER, lie(stored(location="toaster:-1"))),
)  # fmt: skip

TWICE = refused("key-duplicate")._replace(inspect=DONE, verify=DONE, diff=NO)
B_ONLY = ("b", B)

KEYS = (
    Case("twice", "one key twice: loaders silently take the last", TWICE,
         keyed(("w", W), ("w", B)), weights=False),
    Case("equal-keys", "1 and True: two keys to us, one to Python", TWICE,
         lambda: net(stream(dictionary(("w", W), (1, B), (True, W)))), weights=False),
    Case("no-text", "a key that is a number, among others", UNHELD, keyed(("w", W), (0, B))),
    Case("no-text-at-all", "keys that are a number, None, a tuple, bytes", OTHER,
         lambda: net(stream(dictionary((0, W), (None, W), (tup(1, 2), W), (b"C\x01x", W)), 3))),
    Case("surrogate", "a key that is no UTF-8", UNHELD, keyed(("a\ud800b", W))),
    Case("nul", "a key with NUL, and an empty one", OTHER, keyed(("a\0b", W), ("", B))),
    Case("metadata", "a tensor called __metadata__, which .safetensors reserves", UNHELD,
         keyed(("__metadata__", W), B_ONLY)),
    Case("prefix-clash", "module.w and w: stripped they become one", OTHER,
         keyed(("module.w", W), ("w", B)), weights=False),
    Case("look-alike", "two spellings of one accented key", OTHER,
         keyed(("caf\u00e9", W), ("cafe\u0301", B)), keys=("caf\u00e9", "cafe\u0301")),
    Case("cycle", "a dict and a list that hold themselves", OTHER, looped),
    Case("number", "the object is a number", OTHER_FILE,
         lambda: net(stream(42))),
    Case("tensor", "the object is a bare tensor", OTHER,
         lambda: net(stream(W))),
)  # fmt: skip

CASES = (*SHAPES, *KEYS)
