"""What is no checkpoint is called by its name, in one line, with what to do."""

import os

import pytest
from formats_support import read_path, refusal

from ckptool.errors import CkptError

# -- impostors ---------------------------------------------------------------------------------
IMPOSTORS = {
    "empty": b"",
    "zeros": b"\0" * 4096,
    "one byte": b"x",
    "gzip": b"\x1f\x8b\x08rest",
    "bzip2": b"BZh91AY",
    "xz": b"\xfd7zXZ\0\0",
    "zstd": b"\x28\xb5\x2f\xfdxx",
    "7z": b"7z\xbc\xaf\x27\x1c",
    "rar": b"Rar!\x1a\x07",
    "empty zip": b"PK\5\6" + b"\0" * 18,
    "hdf5": b"\x89HDF\r\n\x1a\n",
    "gguf": b"GGUF\3\0\0\0",
    "npy": b"\x93NUMPY\1\0",
    "2018": b"PYTORCH1xxxx",
    "png": b"\x89PNG\r\n\x1a\n",
    "jpeg": b"\xff\xd8\xff\xe0",
    "pdf": b"%PDF-1.7",
    "elf": b"\x7fELF\2\1",
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "lfs, lying": b"version https://git-lfs.github.com/spec/v1\nsize " + b"9" * 400,
    "html": b"<!DOCTYPE html><html><title>a\nb</title>",
    "html later": b"\xef\xbb\xbf \n<html>",
    "xml": b"<?xml version='1'?><Error><Code>AccessDenied</Code></Error>",
    "json": b'{"error": "no\x1b[2J"}',
    "json list": b'[\n{"a":\n 1}]',
    "index": b'{"metadata": {"total_size": 8}, "weight_map": {"w": "a.bin"}}',
    "onnx": b"\x08\x07\x12\x07pytorch\x1a\x05",
    "zip later": b"MZ" + b"x" * 298 + b"PK\3\4rest",
    "text": b"hello, I am text\nsecond line",
    "source": b"import torch\n",
    "odd": b"\x00\x01\x02\xff\xfe",
    "csv": b"(a,b)\n1,2\n",
    "yaml": b"a: 1\nb: 2\n",
    "pickle opcode text": b"cat file | less\n",
    "bracket": b"]]]]",
    "spaces": b"   \n  ",
    "latin": "größe".encode("latin-1"),
}
NO_HINT = {
    "text",
    "source",
    "odd",
    "yaml",
    "latin",
    "spaces",
    "csv",
    "pickle opcode text",
    "bracket",
}


@pytest.mark.parametrize("case", IMPOSTORS)
def test_impostors_are_named_in_one_line(case):
    error = refusal(IMPOSTORS[case])
    assert error.slug in ("not-a-checkpoint", "truncated", "pickle-invalid")
    assert error.slug != "pickle-invalid" or case in ("csv", "pickle opcode text", "bracket")
    assert len(error.text) < 200
    if case not in NO_HINT:
        assert error.hint
        assert "\n" not in error.hint


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("lfs", "git-lfs"),
        ("html", "HTML"),
        ("index", "several files"),
        ("xml", "AccessDenied"),
        ("gzip", "gzip"),
        ("zeros", "never written"),
        ("empty", "empty"),
        ("zip later", "byte 300"),
        ("hdf5", "HDF5"),
        ("onnx", "ONNX"),
        ("json", "JSON"),
    ],
)
def test_impostors_are_called_by_their_name(case, words):
    assert words in refusal(IMPOSTORS[case]).text


def test_folders_and_pipes_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "dangling",
        tmp_path / "none",
        "/dev/zero",
    ):
        with pytest.raises(CkptError) as caught:
            read_path(path)
        assert caught.value.slug == "special-file"
