"""The containers a checkpoint can come in: one file each, and `identify`, which decides by
content, never by name.

Knows: the order in which first bytes are asked. Must not know: verbs, rendering.
A new container is one file and one row in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import CkptError, NotACheckpoint
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Source
from ckptool.reads import at_once

if TYPE_CHECKING:
    from ckptool.formats.alike import Alike

_HEAD = 512


class Format(NamedTuple):
    """One container: `module` has `read`; where it can be written, `writer` has `write` and
    `confirm` (apart, because looking needs none of it).
    """

    name: str
    title: str
    module: str
    suffixes: tuple[str, ...]
    recognises: Callable[[bytes, int], bool]
    writer: str | None = None


def _is_safetensors(head: bytes, size: int) -> bool:
    """A sane length, then '{'. Asked before pickles: a header of 128 bytes starts with 0x80."""
    return head[8:9] == b"{" and head[:4] != b"PK\3\4" and not _is_tar(head, size)


def _is_zip(head: bytes, size: int) -> bool:
    return head[:4] == b"PK\3\4"


def _is_tar(head: bytes, size: int) -> bool:
    """By its checksum, as Python's tarfile: torch tries that before the legacy stream."""
    from ckptool.formats.torch_tar import is_header

    return is_header(head)


def _is_legacy(head: bytes, size: int) -> bool:
    """The first pickle is the magic number, in whatever protocol."""
    from ckptool.formats.torch_legacy import MAGIC

    return MAGIC.to_bytes(10, "little") in head[:32] or str(MAGIC).encode() in head[:40]


def _is_pickle(head: bytes, size: int) -> bool:
    """PROTO 0 to 5 or more, or an opcode that starts a protocol 0 or 1 pickle and is no text."""
    if head[:1] == b"\x80":
        return size > 1
    if head[:1] not in (b"(", b"]", b"}", b"c", b"\x8a") or head[:4] == b"\x28\xb5\x2f\xfd":  # zstd
        return False
    return not _looks_like_text(head)


def _looks_like_text(head: bytes) -> bool:
    return head[:1] != b"(" and b"\0" not in head and all(32 <= c < 127 or c in (9, 10, 13) for c in head) and b"\n" not in head[:2] and not head.startswith(b"c")  # fmt: skip


FORMATS: tuple[Format, ...] = (
    Format(
        "safetensors",
        "safetensors",
        "safetensors",
        (".safetensors",),
        _is_safetensors,
        "safetensors_edit",
    ),
    Format(
        "torch-zip",
        "PyTorch zip",
        "torch_zip",
        (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pyth", ".th", ".model"),
        _is_zip,
        "torch_zip_edit",
    ),
    Format("torch-tar", "PyTorch 0.1 tar", "torch_tar", (".pth", ".pt", ".tar"), _is_tar),
    Format(
        "torch-legacy",
        "PyTorch legacy stream",
        "torch_legacy",
        (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pyth", ".th", ".model"),
        _is_legacy,
        "torch_legacy_edit",
    ),
    Format("pickle", "bare pickle", "plain_pickle", (".pkl", ".pickle"), _is_pickle),
)
_OTHERS = {
    "torchscript": "TorchScript archive",
    "torch-package": "torch.package archive",
    "torch-export": "torch.export program",
    "hf-shards": "Hugging Face shards",
    "dcp": "DCP folder",
    "deepspeed-zero": "DeepSpeed ZeRO",
    "megatron": "Megatron ranks",
    "torch-unpacked": "unpacked PyTorch zip",
}
TITLES: dict[str, str] = {**{row.name: row.title for row in FORMATS}, **_OTHERS}


def identify(source: Source) -> Format:
    """The container, from the first 512 bytes. Raises NotACheckpoint, saying what it is."""
    head = source.read(0, min(_HEAD, source.size))
    for row in FORMATS:
        if row.recognises(head, source.size):
            return row
    from ckptool.formats.impostors import name_impostor

    raise name_impostor(source, head)


def read(
    source: Source, limits: Limits = DEFAULT, *, keep: bool = True, alike: Alike | None = None
) -> Checkpoint:
    """Read whatever `source` is. Every error names the file. Without `keep` what comes back can
    neither be rewritten as a pickle nor have its objects loaded, and takes less memory; `alike` as
    for `torch_zip.read`.
    """
    try:
        row = identify(source)
        module = import_module(f"ckptool.formats.{row.module}")
        found = (
            _read_zip(source, limits, keep, alike)
            if row.name == "torch-zip"
            else module.read(source, limits)
        )
    except CkptError as error:
        error.path = error.path or source.name
        raise
    return _with_suffix_note(found, row)


def _read_zip(source: Source, limits: Limits, keep: bool, alike: Alike | None) -> Checkpoint:
    """One of the archives that torch writes, told apart by their records."""
    from ckptool.formats import torch_zip

    archive = torch_zip.open_archive(at_once(source), limits)
    pickled = archive.find("data.pkl") is not None  # torch.load runs it, whatever lies beside it
    if pickled and "constants.pkl" not in archive.directory.records:  # torch minds the case here
        return torch_zip.read(source, limits, archive, keep=keep, alike=alike)
    archive = archive._replace(source=source)
    if pickled:
        from ckptool.formats.archives import read_script

        return read_script(source, archive, limits)
    if archive.find("archive_format"):
        from ckptool.formats.archives import read_export

        return read_export(source, archive, limits)
    if archive.find(".data/extern_modules"):
        from ckptool.formats.archives import read_package

        return read_package(source, archive, limits)
    raise _without_pickle(archive)


def _without_pickle(archive: Any) -> NotACheckpoint:
    """A zip of something else, or a checkpoint zipped again one folder too deep."""
    deeper = next((name for name in archive.directory.records if name.endswith("/data.pkl")), None)
    if deeper:
        inner = f"{archive.directory.top}/{deeper[: -len('/data.pkl')]}"
        return NotACheckpoint(
            f"a checkpoint zipped again one folder too deep: its data.pkl lies in '{inner}/'",
            hint=f"unpack it and zip the folder '{inner}' alone",
        )
    return NotACheckpoint(
        "not a checkpoint: a zip archive without data.pkl",
        hint="unpack it first, then give what is inside",
    )


def _with_suffix_note(found: Checkpoint, row: Format) -> Checkpoint:
    """Content decides; a name that says otherwise is mentioned."""
    lower = found.file.lower()
    claimed = [other for other in FORMATS if lower.endswith(other.suffixes)]
    if not claimed or row in claimed or row.name == "pickle":
        return found
    note = Note(
        "suffix-mismatch",
        f"named like {claimed[0].title}, in truth {TITLES[found.format]}: other tools go by the name",
    )
    return found._replace(notes=(note, *found.notes))
