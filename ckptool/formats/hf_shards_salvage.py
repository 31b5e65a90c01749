"""What is whole of Hugging Face shards of which some are missing or damaged.

Knows: that a shard that cannot be read takes the keys with it that the index has there.
Must not know: verbs, checksums of storages (whoever compares them says which are wrong).
"""

from __future__ import annotations

from ckptool.errors import CkptError, LimitExceeded, PathEscape
from ckptool.formats import read as read_file
from ckptool.formats.collector import paused
from ckptool.formats.hf_index import Index, read_index
from ckptool.formats.hf_shards import Merger, unnamed
from ckptool.formats.salvage import remains
from ckptool.formats.salvaged import Remains
from ckptool.limits import Limits
from ckptool.places import Folder, Source


def read_remains(folder: Folder, limits: Limits, name: str) -> Remains:
    """The shards that can be read, by the index `name`. Raises CkptError where the index itself is
    damaged, or a shard is none.
    """
    index = read_index(folder, name, limits)
    merger = Merger(index, limits)
    keys = _keys(index)
    lost: dict[str, str] = {}
    with paused() as let_go:
        for shard in index.shards:
            number = len(merger.sources)
            found = _shard(folder, shard, limits)
            if isinstance(found, str):
                merger.absent |= dict.fromkeys(keys[shard], found)
                continue
            merger.add(number, shard, found.checkpoint, found.checkpoint.size_bytes)
            lost |= {f"{number}/{key}": f"{shard}: {why}" for key, why in found.lost.items()}
            let_go()
    notes = (*index.notes, *unnamed(folder.list(), index))
    return Remains(merger.finish(folder.path, notes), lost, merger.absent)


def _keys(index: Index) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, shard in index.files.items():
        found.setdefault(shard, []).append(key)
    return found


def _shard(folder: Folder, name: str, limits: Limits) -> Remains | str:
    """What is left of one, or why nothing is."""
    if not folder.holds(name):
        return f"{name} is missing"
    try:
        with folder.child(name) as source:
            return _read(source, limits)
    except (LimitExceeded, PathEscape):
        raise
    except CkptError as error:
        return f"{name}: {error.text}"


def _read(source: Source, limits: Limits) -> Remains:
    """Raises the error of the strict reading where nothing can be told in spite of it."""
    try:
        return Remains(read_file(source, limits), {})
    except LimitExceeded:
        raise
    except CkptError as error:
        try:
            return remains(source, limits)
        except CkptError:
            raise error from None
