"""torch 0.1's tar: members storages, tensors and pickle (formats 3.3), and its 2016 alpha.

Knows: tar headers as far as these files use them. Must not know: verbs. Nothing is extracted.
Source: torch/serialization.py, legacy_load, for the three members.
"""

from __future__ import annotations

import re
from struct import unpack
from typing import Any

from ckptool.checkpoint import Checkpoint, DType, Global, Note, Piece, Tensor
from ckptool.errors import HeaderInvalid, LimitExceeded, NotACheckpoint, PickleInvalid, Truncated
from ckptool.formats.assemble import assemble, walk_checked
from ckptool.formats.judge import Judge
from ckptool.formats.measures import View, check_bounds, id_text, storage_dtype, whole
from ckptool.formats.torch_pickle import Located, TensorReader
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import LIST, Box, Pers, Walked, elements, items_of, text_of
from ckptool.pickles.nodes import Global as GlobalNode
from ckptool.places import Source
from ckptool.spans import Span

NAME = "torch-tar"
TITLE = "PyTorch 0.1 tar"
SUFFIXES = (".pth", ".pt", ".pth.tar")
_BLOCK = 512
_PICKLE_BYTES = 1 << 16
_TIMES = frozenset((b"mtime", b"atime", b"ctime"))  # what pax headers of torch 0.1 hold
_WANTED = ("storages", "tensors", "pickle")


def read(source: Source, limits: Limits = DEFAULT) -> Checkpoint:
    """Read the three members; storages are skipped over.

    Raises NotACheckpoint for a tar of something else, HeaderInvalid, TensorBounds.
    """
    members, odd = tar_members(source, limits)
    if any(name not in members for name in _WANTED):
        names = ", ".join(f"'{name}'" for name in list(members)[:5])
        raise NotACheckpoint(
            f"a tar archive that contains {names or 'nothing'}",
            path=source.name,
            hint="unpack it with tar -xf, then give what is inside",
        )
    for text, at in odd.items():
        raise HeaderInvalid(f"a tar member that {text}: readers disagree on it", offset=at)
    state = _Reading(source, limits)
    state.read_storages(source.window(members["storages"]))
    state.read_tensors(source.window(members["tensors"]))
    window = source.window(members["pickle"])
    walked = walk_checked(window.read(0, window.size), 0, limits, "pickle")
    state.judge(walked, "pickle")
    state.reader.persistent = state.persistent
    notes = (Note("no-checksums", "a tar of torch 0.1 records no checksums"),)
    return assemble(
        source, NAME, walked, state.reader, limits, notes=notes, judged=tuple(state.verdicts)
    )


def is_header(block: bytes) -> bool:
    """Whether a block is a tar header for Python's tarfile: by its checksum, signed or not."""
    if len(block) < _BLOCK or not block.strip(b"\0") or block[:4] == b"PK\3\4":
        return False
    try:
        wanted = _size(block[148:156])
    except HeaderInvalid:
        return False
    rest = block[:148] + b" " * 8 + block[156:_BLOCK]
    return wanted in (sum(rest), sum(rest) - 256 * sum(byte > 127 for byte in rest))


def _oddity(header: bytes, name: str, size: int, records: bytes) -> str | None:
    """What makes readers see different members: renamed ones, data where others expect none."""
    kind = header[156:157]
    if not is_header(header):
        return "has a wrong checksum"
    if kind == b"x":
        keys = re.findall(rb"(?m)^\d+ ([^=\n]*)=[^\n]*$", records)
        plain = set(keys) <= _TIMES and len(keys) == records.count(b"\n") == records.count(b"=")
        return None if plain else "renames or resizes another"
    if kind in (b"0", b"\0"):
        return "is a file and a folder" if name.endswith("/") else None
    return None if kind == b"5" and not size else f"is of the kind {kind!r}"


def tar_members(source: Source, limits: Limits) -> tuple[dict[str, Span], dict[str, int]]:
    """The regular members by name, and what makes them doubtful, with its byte.

    Raises HeaderInvalid for links, devices and repeats.
    """
    members: dict[str, Span] = {}
    odd: dict[str, int] = {}
    at = 0
    while at + _BLOCK <= source.size:
        header = source.read(at, _BLOCK)
        if not header.strip(b"\0"):
            break
        name = header[:100].split(b"\0")[0].decode("utf-8", "replace")
        size, kind = _size(header[124:136]), header[156:157]
        data = Span(at + _BLOCK, size)
        if data.end > source.size:
            raise Truncated(
                f"the tar member '{name}' is cut", path=source.name, hint="download it again"
            )
        records = source.read(data.offset, size) if kind == b"x" and size < _PICKLE_BYTES else b"="
        oddity = _oddity(header, name, size, records)
        if oddity is not None:
            odd.setdefault(oddity, at)
        if kind in (b"0", b"\0"):
            if name in members:
                raise HeaderInvalid(f"the tar member '{name}' stands twice", offset=at)
            members[name] = data
        elif name in _WANTED:
            raise HeaderInvalid(
                f"the tar member '{name}' is a link or a device, not a file", offset=at
            )
        if len(members) > limits.entry_count:
            raise LimitExceeded("entries", "too many tar members")
        at = data.offset + -(-size // _BLOCK) * _BLOCK
    return members, odd


def _size(field: bytes) -> int:
    """Octal text, or base 256 where the first bit is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.partition(b"\0")[0].strip(b" ") or b"0"
    if text.strip(b"01234567"):
        raise HeaderInvalid("a tar header whose size is no number")
    return int(text, 8)


class _Reading:
    """What the members say, gathered in order: storages, their views, then tensors."""

    def __init__(self, source: Source, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self.layout: dict[str, Span] = {}
        self.views: dict[str, View] = {}
        self.tensors: dict[str, Tensor] = {}
        self.names: set[str] = set()
        self.verdicts: list[Global] = []
        self.reader = TensorReader(self._resolve, limits)

    def _resolve(self, key: str, dtype: DType, count: int) -> Located:
        span = self.layout[key]
        return ((Piece(0, span),) if span.size else ()), None

    def judge(self, walked: Walked, member: str) -> None:
        """Add the verdicts on one of the many pickles."""
        known = {(g.name, g.verdict) for g in self.verdicts}
        self.verdicts += [
            g for g in Judge(walked, member).run() if (g.name, g.verdict) not in known
        ]

    def _next(
        self, window: Source, at: int, member: str, most: int = _PICKLE_BYTES
    ) -> tuple[Any, int]:
        if at >= window.size:
            raise Truncated(f"the tar member '{member}' ends early", hint="download it again")
        data = window.read(at, min(most, window.size - at))
        walked = walk_checked(data, 0, self.limits, member)
        self.judge(walked, member)
        return walked.root, at + walked.end

    def _new_name(self, node: Any) -> str:
        """A key of storages, views and tensors together: torch keeps the last of a name."""
        name = _name(node)
        if name in self.names:
            raise HeaderInvalid(f"the key '{name}' stands twice among storages and tensors")
        self.names.add(name)
        return name

    def read_storages(self, window: Source) -> None:
        """n, then n times (key, location, type), count, data; then the views."""
        count, at = self._next(window, 0, "storages")
        for _ in range(whole(count, "the number of storages", None)):
            root, at = self._next(window, at, "storages")
            items = items_of(root) or ()
            if len(items) not in (2, 3):
                raise PickleInvalid("a storage that is not (key, location, type)")
            dtype = storage_dtype(items[-1], None)
            elements = unpack("<q", window.read(at, 8))[0]
            span = Span(
                at + 8, whole(elements, "the element count of a storage", None) * dtype.size_bytes
            )
            key = self._new_name(items[0])
            self.layout[key] = window.absolute(span)
            window.window(span)
            device = text_of(items[1]) if len(items) == 3 else "cpu"
            self.views[key] = View(
                self.reader.add_storage(key, dtype, elements, device or "cpu", None)
            )
            at = span.end
        if at < window.size:
            self._read_views(self._next(window, at, "storages", self.limits.pickle_bytes)[0])

    def _read_views(self, root: Any) -> None:
        """[(target, root, offset, count), …] in elements."""
        if type(root) is not Box or root.kind != LIST:
            raise PickleInvalid("storage views that are no list")
        for view, *_ in elements(root):
            items = items_of(view) or ()
            if len(items) != 4 or _name(items[1]) not in self.views:
                raise PickleInvalid("a storage view of an unknown storage")
            base = self.views[_name(items[1])]
            offset = whole(items[2], "a storage view's offset", None)
            size = whole(items[3], "a storage view's size", None)
            if base.offset + offset + size > base.storage.count:
                raise HeaderInvalid("a storage view reaches past its storage")
            key = self._new_name(items[0])
            self.views[key] = View(base.storage, base.offset + offset)

    def read_tensors(self, window: Source) -> None:
        """n, then n times (key, storage, type), rank, sizes, strides, offset."""
        count, at = self._next(window, 0, "tensors")
        for _ in range(whole(count, "the number of tensors", None)):
            root, at = self._next(window, at, "tensors")
            items = items_of(root) or ()
            if len(items) != 3:
                raise PickleInvalid("a tensor that is not (key, storage, type)")
            storage_key = items[2] if type(items[1]) is GlobalNode else items[1]
            rank = unpack("<i", window.read(at, 4))[0]
            if not 0 <= rank <= self.limits.rank:
                raise LimitExceeded("rank", f"a tensor of {rank:,} dimensions")
            numbers = unpack(f"<{2 * rank + 1}q", window.read(at + 8, 16 * rank + 8))
            at += 16 + 16 * rank
            key = self._new_name(items[0])
            self.tensors[key] = self._tensor(_name(storage_key), numbers, rank)

    def _tensor(self, storage_key: str, numbers: tuple[int, ...], rank: int) -> Tensor:
        view = self.views.get(storage_key)
        if view is None:
            raise PickleInvalid(f"a tensor of the unknown storage '{storage_key}'")
        shape = tuple(whole(n, "the size of a tensor", None) for n in numbers[:rank])
        stride = tuple(whole(n, "the stride of a tensor", None) for n in numbers[rank : 2 * rank])
        offset = whole(numbers[-1], "the offset of a tensor", None) + view.offset
        check_bounds(shape, stride, offset, view.storage.count, None)
        return Tensor(
            "",
            view.storage.dtype,
            shape,
            stride,
            offset,
            view.storage,
            False,
            "tensor",
            (),
            view.storage.device,
        )

    def persistent(self, node: Pers) -> View | Tensor | None:
        """The id of a tensor or storage as text; a class comes with its source."""
        if items_of(node.pid) is not None:
            return None
        key = _name(node.pid)
        found = self.tensors.get(key) or self.views.get(key)
        if found is None:
            raise PickleInvalid(f"an id of no tensor and no storage: '{key}'", offset=node.end)
        return found


def _name(node: Any) -> str:
    text = id_text(node)
    if text is not None:
        return text
    raise PickleInvalid("a key that is neither a number nor a text")
