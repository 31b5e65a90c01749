"""Payloads where they are not looked for, and streams no reader should accept."""

from __future__ import annotations

import struct

from formats_support import tar
from hostile.blocks import (
    BAD,
    COMMAND,
    MAGIC,
    OLD_DATA,
    OLD_PLAIN,
    PLAIN,
    POP,
    SIX,
    TWO,
    B,
    W,
    call,
    net,
    old,
    old_storage,
    op,
    ordered,
    stream,
    tensor,
    tup,
)  # fmt: skip
from hostile.cases import (
    BOUNDS,
    CODE,
    DONE,
    HEADER,
    INVALID,
    NO,
    OTHER_FILE,
    SAME,
    SHORT,
    SIZES,
    TROUBLE,
    Case,
    Want,
)  # fmt: skip

RUN = call("os.system", COMMAND)
NUMBER = op(0x1950A86A20F9469CFC6C)
APPENDED = Want(NO, NO, TROUBLE, TROUBLE, DONE, "unsafe-pickle")
NO_WEIGHTS = Want(NO, NO, TROUBLE, TROUBLE, NO, "unsafe-pickle")


def header_of(body: bytes):
    return lambda: net(body)


def counted(first: int) -> bytes:
    return struct.pack("<q", first) + SIX + struct.pack("<q", 2) + TWO


def old_tar(pickle: bytes, storages: bytes | None = None) -> bytes:
    none = stream(0) + stream(b"]") if storages is None else storages
    return tar({"storages": none, "tensors": stream(0), "pickle": pickle})


LEGACY = (
    Case("magic", "the first pickle runs code and gives the magic number", NO_WEIGHTS,
         lambda: old(magic=stream(RUN + POP + call("builtins.eval", str(0x1950A86A20F9469CFC6C))))),
    Case("version", "the payload is in the second pickle", CODE,
         lambda: old(version=RUN + POP + op(1001))),
    Case("system", "the payload is in the third pickle", CODE, lambda: old(system=RUN)),
    Case("object", "the payload is in the fourth pickle", CODE,
         lambda: old(RUN + POP + OLD_PLAIN)),
    Case("keys", "the payload is in the fifth pickle, after all tensors", CODE,
         lambda: old(keys=RUN + POP + op(["0", "1"]))),
    Case("tar", "a tar of 2016 whose pickle runs code (CVE-2025-32434)", NO_WEIGHTS,
         lambda: old_tar(stream(RUN)), file="net.pt"),
    Case("tar-storages", "a tar whose list of storages runs code", OTHER_FILE,
         lambda: tar({"storages": stream(RUN)}), file="net.pt"),
    Case("tar-link", "a member of a tar that is a link to /etc/passwd", HEADER,
         lambda: tar({"storages": b"/etc/passwd", "tensors": b"", "pickle": b""}, ("storages",)),
         file="net.pt"),
    Case("cut", "the end of the last storage is missing", SHORT, lambda: old()[:-3]),
    Case("count", "the data says another number of elements than the pickle", SIZES,
         lambda: old(data=counted(1000))),
    Case("count-negative", "the data says -1 elements", SIZES, lambda: old(data=counted(-1))),
    Case("count-huge", "the pickle says 2**40 elements: torch allocates before it reads", SIZES,
         lambda: old(ordered(("w", tensor(old_storage(count=1 << 40)))), keys=["0"])),
    Case("key-unknown", "the list of storages names one that no tensor uses", SIZES,
         lambda: old(keys=["0", "9"])),
    Case("key-missing", "the list of storages lacks one: torch gives uninitialised memory", SIZES,
         lambda: old(keys=["0"], data=OLD_DATA[:32])),
    Case("view", "a view that reaches past its storage", BOUNDS,
         lambda: old(ordered(("w", tensor(old_storage(view=tup("v", 100, 2)), 0, (2,), (1,)))),
                     keys=["0"], data=OLD_DATA[:32])),
    Case("large", "a tensor larger than its storage: torch may grow it", BOUNDS,
         lambda: old(ordered(("w", tensor(old_storage(), 0, (1000,), (1,))),
                             ("b", tensor(old_storage("1", 2), 0, (2,), (1,)))))),
    Case("tail", "a kilobyte after the last storage", SAME._replace(slug="trailing-bytes"),
         lambda: old(tail=b"x" * 1024)),
    Case("magic-twice", "a second legacy file after the first", SAME._replace(slug="trailing-bytes"),
         lambda: old(tail=MAGIC)),
)  # fmt: skip

CASES = (
    Case("empty", "data.pkl holds one byte", INVALID, header_of(b"\x80")),
    Case("underflow", "POP of an empty stack, TUPLE without MARK", INVALID, header_of(b"\x80\x02t0R.")),
    Case("memo", "a memo slot that was never set", INVALID, header_of(b"\x80\x02h\x07.")),
    Case("protocol", "protocol 255", INVALID, header_of(b"\x80\xff" + PLAIN + b".")),
    Case("protocol-late", "PROTO that is not the first opcode", INVALID,
         header_of(b"N0\x80\x02" + PLAIN + b".")),
    Case("protocol-twice", "PROTO twice", INVALID, header_of(b"\x80\x02\x80\x02" + PLAIN + b".")),
    Case("buffer", "an out-of-band buffer that is not there", INVALID,
         header_of(stream(ordered(("w", b"\x97")), 5))),
    Case("bool-or-number", "I+1: True to the reader in C, 1 to the one in Python", INVALID,
         header_of(stream(ordered(("w", W), ("b", B), ("n", b"I+1\n"))))),
    Case("no-stop", "no STOP", INVALID, header_of(b"\x80\x02" + PLAIN)),
    Case("second", "a second, malicious pickle after STOP: no loader runs it",
         SAME._replace(slug="bytes-after-stop"), header_of(stream() + BAD)),
    Case("set-tensor", "SETITEM on a tensor (CVE-2026-24747)", INVALID,
         header_of(stream(ordered(("w", W + op(0) + op(1) + b"s"))))),
    Case("append-dict", "APPENDS on a dict", APPENDED,
         header_of(stream(ordered(("w", W), ("b", B)) + b"(" + op(1) + b"e"))),
    Case("arity", "a rebuild function with two arguments", INVALID,
         header_of(stream(ordered(("w", call("torch._utils._rebuild_tensor_v2", 1, 0)))))),
    Case("bytes8", "BINBYTES8 of 2**62 bytes", INVALID,
         header_of(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.")),
    Case("unicode-4g", "a string of 4 GiB in a file of 20 bytes", INVALID,
         header_of(b"\x80\x02X\xff\xff\xff\xffx.")),
    Case("long-2g", "an integer of 2 GiB", INVALID, header_of(b"\x80\x02\x8b\xff\xff\xff\x7f\x01.")),
    Case("long-negative", "an integer of -1 bytes", INVALID,
         header_of(b"\x80\x02\x8b\xff\xff\xff\xff\x01.")),
    Case("frame-huge", "a frame of 2**63 bytes", INVALID,
         header_of(b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + PLAIN + b".")),
)  # fmt: skip
