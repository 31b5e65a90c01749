"""What is often named .pth and is no checkpoint, told in one line with what to do.

Knows: first bytes of other formats. Must not know: how checkpoints are read.
"""

from __future__ import annotations

from ckptool.errors import CkptError, NotACheckpoint, Truncated
from ckptool.places import Source

_UNPACK = "unpack it first, then give what is inside"
# (first bytes, what it is, what to do)
_MAGIC = (
    (b"\x1f\x8b", "a gzip file", "run gunzip on it first"),
    (b"BZh", "a bzip2 file", "run bunzip2 on it first"),
    (b"\xfd7zXZ\0", "an xz file", "run unxz on it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "run unzstd on it first"),
    (b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (b"Rar!", "a RAR archive", _UNPACK),
    (b"PK\x05\x06", "an empty zip archive", "download it again"),
    (b"\x89HDF", "an HDF5 file (Keras saves such)", "open it with Keras or h5py"),
    (b"GGUF", "a GGUF file (llama.cpp)", "open it with llama.cpp or the gguf package"),
    (b"\x93NUMPY", "a numpy array (.npy)", "open it with numpy.load"),
    (b"PYTORCH1", "a preview archive of 2018 that no released torch reads", "find another copy"),
    (b"\x89PNG", "a PNG picture", "check what was downloaded"),
    (b"\xff\xd8\xff", "a JPEG picture", "check what was downloaded"),
    (b"%PDF", "a PDF document", "check what was downloaded"),
    (b"\x7fELF", "a program (ELF)", "check what was downloaded"),
)


def name_impostor(source: Source, head: bytes) -> CkptError:
    """The error that says what `source` is, from its first 512 bytes."""
    if not head:
        return NotACheckpoint(
            "an empty file", path=source.name, hint="the save or the download failed; make it again"
        )
    for magic, what, hint in _MAGIC:
        if head.startswith(magic):
            return NotACheckpoint(f"not a checkpoint: {what}", path=source.name, hint=hint)
    for judge in (_lfs, _markup, _json, _onnx, _zeros, _zip_later, _text):
        found = judge(source, head)
        if found is not None:
            return found
    return NotACheckpoint(
        f"not a checkpoint: it begins with the bytes {head[:8].hex(' ')}", path=source.name
    )


def _lfs(source: Source, head: bytes) -> CkptError | None:
    if not head.startswith(b"version https://git-lfs"):
        return None
    size = next((line[5:] for line in head.splitlines() if line.startswith(b"size ")), b"")
    digits = size.decode("ascii", "replace")
    what = f" for {int(digits):,} bytes" if digits.isdecimal() and len(digits) < 20 else ""
    return NotACheckpoint(
        f"not a checkpoint: a git-lfs pointer{what}, not the file itself",
        path=source.name,
        hint="run git lfs pull",
    )


def _markup(source: Source, head: bytes) -> CkptError | None:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"<"):
        return None
    lower = head.lower()
    kind = "an XML error" if start.startswith(b"<?xml") else "an HTML page"
    title = ""
    for opening, closing in ((b"<title>", b"</title>"), (b"<code>", b"</code>")):
        at = lower.find(opening)
        if at >= 0:
            inner = head[at + len(opening) :][:80]
            stop = inner.lower().find(closing)
            title = f' ("{_one_line(inner[:stop] if stop >= 0 else inner)}")'
            break
    return NotACheckpoint(
        f"not a checkpoint: {kind}, {source.size:,} bytes{title}",
        path=source.name,
        hint="the download saved a web page instead of the file",
    )


def _one_line(data: bytes) -> str:
    return " ".join(data.decode("utf-8", "replace").split())


def _json(source: Source, head: bytes) -> CkptError | None:
    if not head.lstrip().startswith((b"{", b"[")):
        return None
    if b'"weight_map"' in head:
        return NotACheckpoint(
            "the index of a checkpoint in several files: it holds no tensors itself",
            path=source.name,
            hint="give the files that it names, one or all",
        )
    return NotACheckpoint(
        f"not a checkpoint: JSON text: {_one_line(head.lstrip()[:60])}",
        path=source.name,
        hint="a server's error message may have been saved instead of the file",
    )


def _onnx(source: Source, head: bytes) -> CkptError | None:
    if head[:1] == b"\x08" and b"pytorch" in head[:64]:
        return NotACheckpoint(
            "not a checkpoint: an ONNX model", path=source.name, hint="open it with onnx"
        )
    return None


def _zeros(source: Source, head: bytes) -> CkptError | None:
    if head.strip(b"\0"):
        return None
    return NotACheckpoint(
        f"{source.size:,} bytes that begin with zeros: preallocated and never written",
        path=source.name,
        hint="download it again",
    )


def _zip_later(source: Source, head: bytes) -> CkptError | None:
    at = head.find(b"PK\3\4")
    if at < 0:
        return None
    return NotACheckpoint(
        f"not a checkpoint: a zip starts at byte {at:,}, something stands before it",
        path=source.name,
        hint=f"cut off the first {at:,} bytes if you trust the file",
    )


def _text(source: Source, head: bytes) -> CkptError | None:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if not all(c.isprintable() or c in "\t\r\n" for c in text):
        return None
    if source.size < 4:
        return Truncated(f"only {source.size} bytes", path=source.name, hint="download it again")
    first = text.splitlines()[0][:60]
    return NotACheckpoint(f"not a checkpoint: a text file: {first!r}", path=source.name)
