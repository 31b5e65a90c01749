"""torch.save's zip: `<top>/data.pkl` and one record for each storage (formats 2).

Knows: record names and what they promise. Must not know: verbs, how a zip is laid out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptool.checkpoint import Checkpoint, DType, Global, Note, Piece
from ckptool.commands import convert_command
from ckptool.errors import (
    CkptError,
    HeaderInvalid,
    NotACheckpoint,
    StorageSize,
    Truncated,
    ZipAmbiguous,
)
from ckptool.formats.assemble import assemble, walk_checked
from ckptool.formats.judge import Judge
from ckptool.formats.torch_pickle import Located, Resolver, TensorReader
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import Walked
from ckptool.places import Source
from ckptool.reads import at_once
from ckptool.spans import Span
from ckptool.ziplayout import REPACK
from ckptool.zips import Directory, Entry, read_directory, read_entry

if TYPE_CHECKING:
    from ckptool.formats.alike import Alike

NAME = "torch-zip"
TITLE = "PyTorch zip"
SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
_AGAIN = "download or copy it again"


class Archive(NamedTuple):
    """An open archive: its directory, and whether its numbers are big-endian."""

    source: Source
    directory: Directory
    limits: Limits

    def find(self, name: str) -> Entry | None:
        """A record by its name in the top folder; torch's own lookup ignores case."""
        records = self.directory.records
        found = records.find(name)
        if found is not None:
            return found
        lower = name.lower()
        return next((entry for key, entry in records.items() if key.lower() == lower), None)

    def read(self, name: str) -> bytes:
        """A small record's bytes. Raises NotACheckpoint when it is not there."""
        entry = self.find(name)
        if entry is None:
            raise NotACheckpoint(f"a zip without {name}: not a checkpoint", path=self.source.name)
        return self.read_entry(entry)

    def read_entry(self, entry: Entry) -> bytes:
        """The bytes of one of its small records."""
        return read_entry(self.source, entry, self.limits)

    def located(self, name: str, encoding: str, size_bytes: int, what: str) -> Located:
        """Where a record's bytes lie. Raises StorageSize unless they are `size_bytes`."""
        entry = self.find(name)
        if entry is None:
            raise StorageSize(f"{what} is not in the file: no record '{name}'", hint=_AGAIN)
        if entry.size != size_bytes:
            raise StorageSize(
                f"{what} has {entry.size:,} bytes, its tensors need {size_bytes:,}",
                member=name,
                hint=_AGAIN,
            )
        if entry.method:
            encoding = "deflated" if encoding == "stored" else "deflated-swapped"
        span = Span(entry.data_offset, entry.compressed_size)
        pieces = (Piece(0, self.source.absolute(span), encoding),) if entry.size else ()
        return pieces, entry.crc or None


def open_archive(source: Source, limits: Limits) -> Archive:
    """Read the directory. Raises what `read_directory` raises; a cut file says what is whole."""
    try:
        archive = Archive(source, read_directory(source, limits), limits)
    except Truncated as error:
        raise _cut(source, limits, error) from None
    if archive.directory.links and archive.find("constants.pkl"):
        raise ZipAmbiguous("a TorchScript archive with two data.pkl", path=source.name, hint=REPACK)
    return archive


def read(
    source: Source,
    limits: Limits = DEFAULT,
    archive: Archive | None = None,
    *,
    keep: bool = True,
    alike: Alike | None = None,
) -> Checkpoint:
    """Read directory and data.pkl, no storage. `keep` as for `assemble`. `alike` knows files that were
    read before: what is told of one of them has a handle that no rewrite can use.
    """
    archive = archive or open_archive(at_once(source), limits)
    data, resolve, encoding = _pickle(archive)
    traits = frozenset(("big-endian",)) if encoding == "swapped" else frozenset()
    if alike is not None and (archive.directory.links or not alike.takes(data)):
        alike = None
    told = alike.tell(source, data, resolve, limits, traits) if alike is not None else None
    if told is not None:
        return told
    walked, reader = walk_checked(data, 0, limits, "data.pkl"), TensorReader(resolve, limits)
    archive = Archive(source, archive.directory, limits)  # for later: the file itself
    notes: tuple[Note, ...] = ()
    left = len(walked.data) - walked.end
    if left:
        text = f"{left:,} bytes after the end of data.pkl; no loader reads them"
        notes += (Note("bytes-after-stop", text),)
    found = assemble(
        source, NAME, walked, reader, limits, container=archive, notes=notes, traits=traits,
        keep=keep or alike is not None,
    )  # fmt: skip
    if alike is not None:
        alike.note(data, found, limits)
    return _with_older(found, archive) if archive.directory.links else found


def pickled(archive: Archive, limits: Limits) -> tuple[Walked, TensorReader, str]:
    """data.pkl, walked; who reads its tensors; how storages are encoded that are not deflated."""
    data, resolve, encoding = _pickle(archive)
    return walk_checked(data, 0, limits, "data.pkl"), TensorReader(resolve, limits), encoding


def _pickle(archive: Archive) -> tuple[bytes, Resolver, str]:
    """The bytes of data.pkl; where its storages lie, and how those that are not deflated are
    encoded.
    """
    _check_version(archive)
    encoding = "swapped" if _is_big_endian(archive) else "stored"
    data = archive.read("data.pkl")

    def resolve(key: str, dtype: DType, count: int) -> Located:
        size = count * dtype.size_bytes
        return archive.located(f"data/{key}", encoding, size, f"storage '{key}'")

    return data, resolve, encoding


def _with_older(found: Checkpoint, archive: Archive) -> Checkpoint:
    """The checkpoint with what the pickles could do that in-place edits replaced (rule P)."""
    known = {(row.name, row.verdict) for row in found.globals}
    rows: list[Global] = []
    for number, entry in enumerate(archive.directory.older, 1):
        member = f"data.pkl before edit {number}"
        data = archive.read_entry(entry)
        judged = Judge(walk_checked(data, 0, archive.limits, member), member).run()
        rows += [row for row in judged if (row.name, row.verdict) not in known]
        known.update((row.name, row.verdict) for row in judged)
    count = len(archive.directory.links)
    times = "once" if count == 1 else f"{count} times"
    note = Note(
        "edited-in-place",
        f"edited in place {times}, undo possible: the former bytes are still in the file",
        convert_command(found.file, "--undo"),
    )
    return found._replace(globals=(*found.globals, *rows), notes=(note, *found.notes))


def _is_big_endian(archive: Archive) -> bool:
    entry = archive.find("byteorder")
    if entry is None:
        return False
    order = archive.read_entry(entry)
    if order not in (b"little", b"big"):
        raise HeaderInvalid(f"the byteorder record says {order[:20]!r}, neither little nor big")
    return order == b"big"


def _check_version(archive: Archive) -> None:
    """Torch reads `version` or `.data/version`, 1 to 10 (caffe2/serialize/versions.h)."""
    entry = archive.find("version") or archive.find(".data/version")
    if entry is None:
        raise HeaderInvalid(
            "no version record: torch cannot read this archive", path=archive.source.name
        )
    text = archive.read_entry(entry)[:20].strip()
    if not text.isdigit() or not 1 <= int(text) <= 10:
        raise HeaderInvalid(
            f"archive version {text!r} does not exist (1 to 10 do)", path=archive.source.name
        )


# -- cut files ---------------------------------------------------------------------------------
def _cut(source: Source, limits: Limits, error: Truncated) -> CkptError:
    """Say which tensors of a zip without a directory are whole, from its local headers."""
    from ckptool.zipcut import walk_local_headers

    found = walk_local_headers(source)
    whole = {name: span for name, span, complete in found if complete}
    data = next((span for name, span in whole.items() if name.endswith("/data.pkl")), None)
    if data is None:
        return Truncated(
            f"the file is cut at {source.size:,} bytes, before the end of its data.pkl",
            path=source.name,
            hint="download it again",
        )
    top = next(name for name in whole if name.endswith("/data.pkl"))[: -len("data.pkl")]
    try:
        walked = walk_checked(source.read(data.offset, data.size), 0, limits, "data.pkl")
        reader = TensorReader(lambda key, dtype, count: ((), None), limits)
        checkpoint = assemble(source, NAME, walked, reader, limits)
    except CkptError:
        return error
    lost = [
        t.key for t in checkpoint.tensors if t.storage and f"{top}data/{t.storage.key}" not in whole
    ]
    return cut_error(
        source, len(checkpoint.tensors), lost, f"cut at {source.size:,} bytes: no zip directory"
    )


def cut_error(source: Source, count: int, lost: list[str], what: str) -> Truncated:
    """Truncated, saying how many tensors are whole and which is the first that is not."""
    text = f"{what}; {count - len(lost)} of {count} tensors are whole"
    if lost:
        text += f", cut at '{lost[0]}'"
    again = "download it again"
    if len(lost) < count:
        command = convert_command(source.name, "--salvage -o OUT")
        again += f", or take what is whole: {command}"
    error = Truncated(text, path=source.name, hint=again)
    error.findings = tuple(lost)
    return error
