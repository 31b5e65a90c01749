"""A DCP folder saved with use_collectives=False: every rank's `__R.metadata`, put together.

Knows: what ranks that did not speak with each other write (filesystem.py of torch 2.13: the same
`Metadata`, of their own items alone), and that the lowest rank's copy counts, as in a save with
collectives. Must not know: what is in an item, verbs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptool.errors import HeaderInvalid, LimitExceeded, Unsupported
from ckptool.formats.dcp_metadata import Chunk, Copied, Index, Key, Metadata, read_metadata
from ckptool.formats.moved import Verdicts
from ckptool.formats.salvaged import WHOLE
from ckptool.limits import Limits
from ckptool.places import Folder

_RANK = re.compile(r"__(0|[1-9]\d{0,8})\.metadata")
_DATA = re.compile(r"__(0|[1-9]\d{0,8})_\d+\.distcp")


def rank_files(names: Iterable[str]) -> list[str]:
    """Those that are a rank's metadata, by rank."""
    found = [(int(match[1]), name) for name in names if (match := _RANK.fullmatch(name))]
    return [name for _, name in sorted(found)]


def read_ranks(folder: Folder, limits: Limits, strict: bool = True) -> Index:
    """The metadata of all ranks as one. Raises HeaderInvalid where a rank's is missing (`strict`
    alone), Unsupported where ranks saved different things under one key, and what `read_metadata` raises.
    """
    names = folder.list()
    files = rank_files(names)
    if len(files) > limits.shard_count:
        raise LimitExceeded("shard-count", f"{len(files):,} ranks", path=folder.path)
    if strict:
        _check_presence(folder, names, files)
    rows, addresses, size_bytes = [], [], 0
    for name in files:
        with folder.child(name) as source:
            size_bytes += source.size
            if size_bytes > limits.pickle_bytes:
                text = f"metadata of {size_bytes:,} bytes and more in {len(files):,} files"
                raise LimitExceeded("pickle-bytes", text, path=folder.path)
            rows.append(read_metadata(source, limits, name))
            addresses.append(source.address)
    return Index(merge(rows), tuple(addresses), size_bytes, len(files))


def _check_presence(folder: Folder, names: Sequence[str], files: Sequence[str]) -> None:
    """Raise HeaderInvalid for a gap between the ranks, and for items of a rank without metadata."""
    ranks = {int(match[1]) for name in files if (match := _RANK.fullmatch(name))}
    seen = ranks | {int(match[1]) for name in names if (match := _DATA.fullmatch(name))}
    gap = next((n for n in range(len(ranks) + 1) if n not in ranks), 0)
    if gap > max(seen):
        return
    missing = f"__{gap}.metadata"
    begun = f"{missing}.tmp" in names
    raise HeaderInvalid(
        f"a DCP folder that {len(ranks)} ranks saved without collectives; '{missing}' is missing"
        + (", its .tmp was never finished" if begun else ""),
        path=folder.path, hint=f"copy the files of rank {gap} ('__{gap}*') into it{WHOLE}",
    )  # fmt: skip


def merge(ranks: Sequence[Metadata]) -> Metadata:
    """Keys in the order of the first rank that has them; a slice or object that several have is
    that of the first, with the others as `copies`. Raises Unsupported.
    """
    joined: dict[str, _Joined] = {}
    verdicts = Verdicts()
    for rank, metadata in enumerate(ranks):
        verdicts.add(metadata.globals)
        for key in metadata.keys:
            found = joined.get(key.name)
            if found is None:
                joined[key.name] = _Joined(rank, key)
            else:
                found.add(rank, key)
    keys = tuple([found.key() for found in joined.values()])
    unused = sum(metadata.unused_count for metadata in ranks)
    return Metadata(keys, ranks[0].version, tuple(verdicts.rows), unused)


class _Joined:
    """What the ranks have under one key."""

    def __init__(self, rank: int, key: Key) -> None:
        self._rank = rank
        self._first = key
        self._chunks: list[Chunk] = []
        self._at: dict[object, int] = {}
        self._copies: list[Copied] = []
        self._place(key.chunks)

    def add(self, rank: int, key: Key) -> None:
        """Those of one more rank."""
        first = self._first
        if (key.path, key.dtype, key.shape) != (first.path, first.dtype, first.shape):
            raise Unsupported(
                f"rank {self._rank} saved {_described(first)}, rank {rank} {_described(key)}",
                key=key.name,
                hint="only torch.distributed.checkpoint can load it, on as many ranks as saved it",
            )
        if key.item is not None:
            self._copies.append(Copied(0, key.item))
        self._place(key.chunks)

    def _place(self, chunks: Sequence[Chunk]) -> None:
        new = [chunk for chunk in chunks if chunk.region not in self._at]
        copied = (chunk for chunk in chunks if chunk.region in self._at)
        self._copies += [Copied(self._at[chunk.region], chunk.item) for chunk in copied]
        for chunk in new:  # two of one rank stay two: they overlap
            self._at[chunk.region] = len(self._chunks)
            self._chunks.append(chunk)

    def key(self) -> Key:
        """The key of them all."""
        return self._first._replace(chunks=tuple(self._chunks), copies=tuple(self._copies))


def _described(key: Key) -> str:
    what = "an object" if key.dtype is None else f"{key.dtype.name} {list(key.shape)}"
    return what if len(key.path) < 2 else f"{what} at {'/'.join(map(str, key.path))}"
