"""Files that are something else, cut off, damaged, wrongly named, or no files at all."""

from __future__ import annotations

import gzip
import struct

from hostile.blocks import BAD, COMMAND, SIX, call, net, op, safe, stream
from hostile.cases import (
    CODE,
    DONE,
    INVALID,
    NO,
    OTHER_FILE,
    SAME,
    SHORT,
    SPECIAL,
    TROUBLE,
    Case,
    Special,
    Want,
    refused,
)  # fmt: skip

PAGE = b"<!DOCTYPE html><html><head><title>Virus scan warning</title></head><body></body></html>"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
RUN = call("os.system", COMMAND)
RUNS = Want(NO, NO, TROUBLE, TROUBLE, NO, "unsafe-pickle")
FLIPPED = Want(DONE, NO, TROUBLE, TROUBLE, DONE)


def flipped(part: bytes, ahead: int):
    """An honest checkpoint with one bit changed near `part`."""

    def make() -> bytes:
        data = bytearray(net())
        data[data.index(part) + ahead] ^= 1
        return bytes(data)

    return make


def zeroed() -> bytes:
    data = net()
    return data[: len(data) * 6 // 10].ljust(len(data), b"\0")


def only(special: Special):
    return lambda: {"net.pth": special}


ELSE = (
    ("lfs", "a Git LFS pointer", "net.pth", lambda: POINTER),
    ("page", "a web page saved in its place", "net.pth", lambda: PAGE),
    ("zeros", "all zeros", "net.pth", lambda: bytes(2048)),
    ("hdf5", "a Keras file", "net.pth", lambda: b"\x89HDF\r\n\x1a\n" + bytes(100)),
    ("gguf", "a GGUF file", "net.pth", lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 0)),
    ("png", "a picture", "net.pt", lambda: b"\x89PNG\r\n\x1a\n" + bytes(60)),
    ("words", "a text", "net.ckpt", lambda: b"hello world, I am not a checkpoint\n" * 3),
    ("7z", "a 7z archive around a malicious checkpoint", "net.pth",
     lambda: b"7z\xbc\xaf'\x1c\0\x04" + bytes(24) + net(BAD)),
    ("gzip", "a gzip around a checkpoint", "net.pth", lambda: gzip.compress(net(), mtime=0)),
    ("elf", "a program", "net.pth", lambda: b"\x7fELF\x02\x01\x01" + bytes(57)),
)  # fmt: skip

CASES = (
    Case("one-byte", "one byte", SHORT, lambda: b"P"),
    Case("empty", "no bytes", OTHER_FILE, lambda: b""),
    *(Case(name, tries, OTHER_FILE, make, file=file) for name, tries, file, make in ELSE),
    Case("cut-tail", "a download without its last 200 bytes", SHORT, lambda: net()[:-200]),
    Case("cut-half", "half a download", SHORT, lambda: net()[: len(net()) // 2]),
    Case("cut-byte", "the last byte is missing", SHORT, lambda: net()[:-1]),
    Case("zero-tail", "the right size, the last 40 % zeros", SHORT, zeroed),
    Case("bit-storage", "one bit of a storage flipped", FLIPPED,
         flipped(SIX, 5), weights=False, unread=True),
    Case("bit-pickle", "one bit of data.pkl flipped: another key", refused("crc-mismatch"),
         flipped(op("w"), 5)),
    Case("bare", "a bare malicious pickle", RUNS, lambda: stream(RUN)),
    Case("bare-bin", "the same, named .bin (CVE-2025-10155)", RUNS, lambda: stream(RUN),
         file="net.bin"),
    Case("bare-storages", "a malicious data.pkl without its archive", INVALID, lambda: BAD),
    Case("zip-as-safe", "a malicious zip named .safetensors (CVE-2025-1889)", CODE,
         lambda: net(BAD), file="net.safetensors"),
    Case("zip-as-text", "a malicious zip named .txt", CODE, lambda: net(BAD), file="net.txt"),
    Case("safe-as-pth", "a .safetensors named .pth", SAME, safe),
    Case("folder", "a folder named net.pth", OTHER_FILE, only(Special("folder"))),
    Case("fifo", "a FIFO: opening it would wait for ever", SPECIAL, only(Special("fifo"))),
    Case("zero-device", "a link to /dev/zero", SPECIAL, only(Special("link", "/dev/zero"))),
    Case("dangling", "a link to nothing", SPECIAL, only(Special("link", "nowhere"))),
)  # fmt: skip
