"""Honest files that look odd: none of them may be refused, none called dangerous."""

from __future__ import annotations

import json
import struct

from formats_support import tar
from hostile.blocks import (
    BUILD,
    FLOAT,
    HOOKS,
    MARK,
    MEMOIZE,
    NEWOBJ,
    PLAIN,
    ROW_B,
    ROW_W,
    ROWS,
    SIX,
    STACK_GLOBAL,
    STORED,
    TWO,
    B,
    W,
    call,
    dictionary,
    entries,
    name,
    net,
    old,
    op,
    ordered,
    safe,
    storage,
    stored,
    stream,
    tensor,
    tup,
)  # fmt: skip
from hostile.cases import DONE, NO, OTHER, SAME, TROUBLE, Case, Want
from hostile.zipbytes import Entry, zipped

INDEX = "model.safetensors.index.json"
BIG = {"0": struct.pack(">6f", *range(6)), "1": struct.pack(">2f", 7, 8)}
BARE = Want(DONE, DONE, DONE, TROUBLE, NO)
W_ON_1 = tensor(storage("0", 6, FLOAT, "cuda:1"))


def resumed() -> bytes:
    weights = ordered(("module.w", tensor(storage("0", 6, FLOAT, "cuda:0"))),
                      ("module.b", tensor(storage("1", 2, FLOAT, "cuda:1"), 0, (2,), (1,))))  # fmt: skip
    moment = tensor(storage("2", 6, FLOAT, "cuda:0"))
    state = dictionary((0, dictionary(("step", 3), ("exp_avg", moment))))
    groups = [dictionary(("lr", 0.1), ("params", [0, 1]))]
    optimizer = dictionary(("state", state), ("param_groups", groups))
    body = dictionary(("epoch", 7), ("state_dict", weights), ("optimizer", optimizer),
                      ("best_acc", 0.5))  # fmt: skip
    return net(stream(body), STORED | {"2": SIX})


def with_extra(key: str, value: bytes):
    return lambda: net(stream(dictionary((key, value), ("state_dict", PLAIN))))


def scalar() -> bytes:
    kind = call("numpy.dtype", "f8", False, True)
    kind += tup(3, "<", None, None, None, -1, -1, 0) + BUILD
    data = call("_codecs.encode", "\0" * 6 + "\xe0?", "latin1")
    return call("numpy.core.multiarray.scalar", kind, data)


def module() -> bytes:
    """torch.save(nn.Linear(3, 2))"""

    def parameter(ops: bytes) -> bytes:
        return call("torch._utils._rebuild_parameter", ops, True, HOOKS)

    rows = (("weight", parameter(W)), ("bias", parameter(B)))
    state = dictionary(("training", True), ("_parameters", ordered(*rows)), ("_buffers", HOOKS),
                       ("_modules", HOOKS), ("in_features", 3), ("out_features", 2))  # fmt: skip
    return net(stream(name("torch.nn.modules.linear", "Linear") + NEWOBJ + state + BUILD))


def protocol_4() -> bytes:
    """FRAME, MEMOIZE, STACK_GLOBAL, as torch.save(pickle_protocol=4) writes them."""

    def short(text: str) -> bytes:
        return b"\x8c" + bytes([len(text)]) + text.encode()

    def named(where: str, what: str) -> bytes:
        return short(where) + short(what) + STACK_GLOBAL

    empty = named("collections", "OrderedDict") + b")R"
    pid = MARK + short("storage") + named("torch", "FloatStorage") + short("0") + short("cpu")
    args = tup(pid + op(6) + b"tQ", 0, (2, 3), (3, 1), False, empty)
    one = named("torch._utils", "_rebuild_tensor_v2") + args + b"R"
    body = empty + MARK + short("w") + MEMOIZE + one + b"u."
    return net(b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body, {"0": SIX})


def altered(large: bool = True, **changes):
    """The entries of an honest zip with the same fields changed in each."""

    def make() -> bytes:
        rows = entries()
        for row in rows:
            for field, value in changes.items():
                setattr(row, field, value)
        return zipped(rows, large=large)

    return make


def shards() -> dict[str, bytes]:
    rows = {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 32}, "weight_map": rows}
    return {
        rows["w"]: safe({"w": ROW_W}, SIX),
        rows["b"]: safe({"b": ROW_B | {"data_offsets": [0, 8]}}, TWO),
        INDEX: json.dumps(index).encode(),
    }


def before_markers() -> bytes:
    rows = {"data.pkl": stream(), "data/0": SIX, "data/1": TWO, "version": b"3\n"}
    return zipped([Entry(f"archive/{name}", data) for name, data in rows.items()])


NO_CRC = {"crc": 0}
LATER = {"crc": 0, "packed": 0, "size": 0}
NAMESPACE = name("argparse", "Namespace") + NEWOBJ
FOREIGN = name("hostile_canary", "Config") + NEWOBJ
STATE = dictionary(("lr", 0.1), ("arch", "resnet50")) + BUILD
VERSIONS = PLAIN + dictionary(("_metadata", ordered(("", dictionary(("version", 1)))))) + BUILD
TIED = (("w", W), ("tied", W), ("view", tensor(None, 1, (2,), (2,))))
EMPTY = tensor(stored("1", 0), 0, (0, 3), (3, 1))
ODD = (("s", tensor(None, 0, (), ())), ("e", EMPTY), ("w", tensor(None, 0, (2, 3), (3, 1), True)))
CHINESE = "\u7f16\u7801\u5668.\u6743\u91cd"
BOTH = ("w", "b")

CASES = (
    Case("plain", "a state_dict, as torch writes it", SAME, net, keys=BOTH),
    Case("resume", "a checkpoint to resume from, DataParallel on two GPUs", OTHER, resumed,
         weights=False, keys=("module.w", "module.b")),
    Case("namespace", "args of argparse, which weights_only refuses", OTHER,
         with_extra("args", NAMESPACE + STATE), keys=BOTH, loads=False),
    Case("foreign", "an object of a class nobody has, and nothing else",
         OTHER, with_extra("config", FOREIGN + STATE), keys=BOTH, loads=False),
    Case("scalar", "an accuracy that is a number of numpy", OTHER, with_extra("acc", scalar()),
         keys=BOTH, loads=False),
    Case("module", "a whole pickled nn.Linear", OTHER, module, keys=("weight", "bias")),
    Case("legacy", "a stream from before 1.6", SAME, old, keys=BOTH),
    Case("crc-0", "checksums of 0: torch was told not to compute them", SAME,
         altered(local=NO_CRC, central=NO_CRC), keys=BOTH),
    Case("deflated", "zipped again by hand: deflated, not aligned", SAME,
         altered(large=False, method=8, aligned=False), keys=BOTH),
    Case("descriptors", "sizes behind the data, as torch writes them", SAME,
         altered(flags=0x808, described=True, local=LATER), keys=BOTH),
    Case("protocol-4", "protocol 4 with its frame", OTHER, protocol_4, keys=("w",)),
    Case("tied", "two names of one tensor, and a strided view", OTHER,
         lambda: net(stream(ordered(*TIED)), {"0": SIX})),
    Case("empty", "a tensor of no dimensions, one of no elements, one with a gradient", OTHER,
         lambda: net(stream(ordered(*ODD)), {"0": SIX, "1": b""}), keys=("s", "e", "w")),
    Case("chinese", "keys in Chinese and with accents", OTHER,
         lambda: net(stream(ordered((CHINESE, W), ("caf\xe9", B)))), keys=(CHINESE, "caf\xe9")),
    Case("big-endian", "numbers with the large byte first", SAME,
         lambda: net(None, BIG, byteorder=b"big"), keys=BOTH),
    Case("torch-1.6", "a zip without any marker", SAME, before_markers, keys=BOTH),
    Case("versions", "layer versions, as nn.Module.state_dict() gives them", SAME,
         lambda: net(stream(VERSIONS)), keys=BOTH),
    Case("gpu", "a tensor on the second GPU", OTHER,
         lambda: net(stream(ordered(("w", W_ON_1))), {"0": SIX}), keys=("w",)),
    Case("safetensors", "a .safetensors with metadata", SAME,
         lambda: safe({"__metadata__": {"format": "pt"}, **ROWS}), file="net.safetensors",
         keys=BOTH),
    Case("shards", "two shards and their index", SAME, shards, file=INDEX, keys=BOTH),
    Case("tar", "a tar of 2016 without tensors", BARE,
         lambda: tar({"storages": stream(0) + stream(b"]"), "tensors": stream(0),
                      "pickle": stream(ordered(("epoch", 1)))}), file="net.pt"),
)  # fmt: skip
