"""Every way in which a checkpoint is known to be broken gets its own sentence, and exit status 2."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from formats_support import safetensors, saved, saved_legacy
from verbs_support import cli

STATE = {"conv.weight": torch.ones(2, 3), "conv.bias": torch.zeros(2), "n": torch.tensor(5)}
PLAIN, LEGACY = saved(STATE), saved_legacy(STATE)


def rewritten(change=lambda name, data: (name, data), extra=(), method=0, before=b""):
    """PLAIN's records packed again: each changed, or left out where `change` gives None."""
    stream = io.BytesIO()
    stream.write(before)
    with zipfile.ZipFile(io.BytesIO(PLAIN)) as old, zipfile.ZipFile(stream, "a", method) as new:
        rows = [change(name, old.read(name)) for name in old.namelist()]
        for name, data in [*filter(None, rows), *extra]:
            new.writestr(name, data)
    return stream.getvalue()


def without(end):
    return rewritten(lambda name, data: None if name.endswith(end) else (name, data))


def with_content(end, content):
    return rewritten(lambda name, data: (name, content(data) if name.endswith(end) else data))


def empty_zip():
    stream = io.BytesIO()
    zipfile.ZipFile(stream, "w").close()
    return stream.getvalue()


def numpy_archive():
    stream = io.BytesIO()
    np.savez(stream, w=np.ones(3))
    return stream.getvalue()


def tar_around():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as out:
        info = tarfile.TarInfo("model.pth")
        info.size = len(PLAIN)
        out.addfile(info, io.BytesIO(PLAIN))
    return stream.getvalue()


def header(rows, data=b"\0" * 16):
    return safetensors(rows, data)


def row(begin, end, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HTML = b"<!DOCTYPE html><title>Google Drive - Virus scan warning</title>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n"
# what stands in the file, what is said of it, and how many of its tensors are whole (None: unknown)
BROKEN = {
    "empty": (b"", "an empty file", None),
    "one byte": (b"\x80", "it begins with the bytes 80", None),
    "zeros": (bytes(4096), "preallocated and never written", None),
    "html": (HTML, 'an HTML page, 63 bytes ("Google Drive - Virus scan warning")', None),
    "blank html": (b"\n\n<html></html>", "an HTML page", None),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "AccessDenied", None),
    "json": (json.dumps({"error": "Repository not found"}).encode(), "Repository not found", None),
    "lfs": (POINTER, "a git-lfs pointer for 12,345 bytes", None),
    "gzip": (gzip.compress(PLAIN), "a gzip file", None),
    "7z": (b"7z\xbc\xaf\x27\x1c" + bytes(40), "a 7z archive", None),
    "rar": (b"Rar!\x1a\x07\x01\0" + bytes(40), "a RAR archive", None),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "an HDF5 file", None),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(40), "a GGUF file", None),
    "npy": (b"\x93NUMPY\x01\0" + bytes(40), "a numpy array (.npy)", None),
    "npz": (numpy_archive(), "a numpy archive (.npz) with w.npy", None),
    "preview": (b"PYTORCH1" + bytes(40), "a preview archive of 2018", None),
    "tar": (tar_around(), "a tar archive that contains 'model.pth'", None),
    "empty zip": (empty_zip(), "an empty zip archive", None),
    "prefix": (rewritten(before=b"#!/bin/sh\n"), "a zip starts at byte 10", None),
    "no folder": (
        rewritten(lambda name, data: (name.partition("/")[2], data)),
        "zipped without their folder", None,
    ),
    "too deep": (
        rewritten(lambda name, data: (f"a/{name}", data)),
        "one folder too deep: its data.pkl lies in 'a/archive/'", None,
    ),
    "foreign entry": (
        rewritten(extra=[("__MACOSX/._x", b"")]),
        "more than one folder at the top of the zip: __MACOSX, archive", None,
    ),
    "bzip2": (rewritten(method=zipfile.ZIP_BZIP2), "compression method 12", None),
    "no version": (without("/version"), "no version record", 3),
    "version 11": (with_content("/version", lambda _: b"11\n"), "archive version b'11'", 3),
    "byte order": (with_content("byteorder", lambda _: b"middle"), "neither little nor big", 3),
    "missing storage": (without("data/1"), "conv.bias: storage '1' is not in the file", 2),
    "short storage": (
        with_content("data/0", lambda data: data[:-4]),
        "conv.weight: storage '0' has 20 bytes, its tensors need 24", 2,
    ),
    "cut directory": (PLAIN[:-40], f"cut at {len(PLAIN) - 40:,} bytes: no zip directory", 3),
    "cut end record": (PLAIN[:-4], "no zip directory", 3),
    "tail": (PLAIN + bytes(20_000), "20,000 bytes after the end of the zip", 3),
    "cut storage": (PLAIN[: PLAIN.index(b"data/1") + 30], "no zip directory", 1),
    "cut pickle": (PLAIN[:200], "before the end of its data.pkl", None),
    "cut legacy": (LEGACY[:-3], "3 bytes are missing", 2),
    "cut legacy pickle": (LEGACY[:300], "inside its main pickle", None),
    "protocol 0": (saved(STATE, pickle_protocol=0), "a persistent id that is not a storage", None),
    "bad json": (safetensors(b'{"a":'), "the header is not JSON", None),
    "twice": (safetensors(b'{"a":1,"a":2}'), "a: a name stands twice in the header", None),
    "hole": (header({"a": row(0, 8), "b": row(12, 20)}, bytes(20)), "bytes overlap or are left out", None),
    "overlap": (header({"a": row(0, 8), "b": row(4, 12)}, bytes(12)), "bytes overlap or are left out", None),
    "huge header": (struct.pack("<Q", 1 << 60) + b"{}", "a header of 1,152,921,504,606,846,976 bytes", None),
    "short": (header({"a": row(0, 8), "b": row(8, 16)}, bytes(12)), "should have 16 bytes, the file has 12", 1),
    "trailing": (header({"a": row(0, 8)}, bytes(13)), "5 bytes after the last tensor", None),
    "size": (header({"a": row(0, 4)}, bytes(4)), "4 bytes for 2 elements of float32", None),
    "dtype": (header({"a": row(0, 8, "Q9")}, bytes(8)), "the dtype 'Q9' does not exist", None),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_gets_its_sentence(kind, tmp_path, capsys):
    data, sentence, whole = BROKEN[kind]
    path = tmp_path / "net.pth"
    path.write_bytes(data)
    status, out, err = cli(capsys, "verify", path)
    assert status == 2
    assert sentence in out + err
    assert "Traceback" not in out + err
    if whole is not None:
        count = 2 if data[8:9] == b"{" else 3
        assert f"  {whole} of {count} tensors are whole\n" in out
    else:
        assert "tensors are whole" not in out


def test_the_archives_packed_again_are_otherwise_whole(tmp_path, capsys):
    path = tmp_path / "net.pth"
    path.write_bytes(rewritten())
    assert cli(capsys, "verify", path)[0] == 0
