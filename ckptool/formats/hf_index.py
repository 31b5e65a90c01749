"""The index of a checkpoint in several files: which file holds which key (formats 3.8).

Knows: the text that transformers writes, and the lies it could tell. Must not know: what is in
the files it names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.checkpoint import Note
from ckptool.errors import CkptError, HeaderInvalid, LimitExceeded, PathEscape
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Folder, Source, is_plain_name

_FIELDS = ("metadata", "weight_map")


class Index(NamedTuple):
    """An index: `files` maps each key to the name of its file, in the order of the text;
    `shards` are these names in order of first mention; `total_size` is in bytes, as said.
    """

    name: str
    path: str
    size_bytes: int
    files: dict[str, str]
    shards: tuple[str, ...]
    total_size: int | None = None
    notes: tuple[Note, ...] = ()


def read_index(folder: Folder, name: str, limits: Limits = DEFAULT) -> Index:
    """Read and check the index `name`; nothing it names is opened.

    Raises HeaderInvalid, PathEscape, LimitExceeded, and what `Folder.child` raises.
    """
    with folder.child(name) as source:
        path, size = source.name, source.size
        if size > limits.header_bytes:
            raise LimitExceeded("header-bytes", f"an index of {size:,} bytes", path=path)
        try:
            found, escaped = _parsed(source)
            files = _weight_map(found, name, escaped, limits)
            total, notes = _said(found)
        except CkptError as error:
            error.path = path
            raise
    shards = tuple(dict.fromkeys(files.values()))
    return Index(name, path, size, files, shards, total, notes)


def _parsed(source: Source) -> tuple[dict[str, Any], bool]:
    """The index, and whether a text in it is spelled with escapes."""
    import json

    try:
        text = source.read(0, source.size).decode("utf-8")  # the bytes are not kept beside it
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise HeaderInvalid("the index is nested too deeply") from None
    except ValueError as error:
        raise HeaderInvalid(f"the index is not JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise HeaderInvalid("the index is not a JSON object")
    return found, "\\u" in text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HeaderInvalid(
            "a name stands twice in the index: readers disagree on which counts", key=twice
        )
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _weight_map(
    found: dict[str, Any], own_name: str, escaped: bool, limits: Limits
) -> dict[str, str]:
    """{key: file name}, every name a plain one. Raises HeaderInvalid, PathEscape, LimitExceeded."""
    files = found.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise HeaderInvalid("the index has no weight_map, which says what file holds which key")
    if len(files) > limits.entry_count:
        raise LimitExceeded("entry-count", f"an index of {len(files):,} keys")
    for key, name in files.items():
        if not isinstance(name, str):
            raise HeaderInvalid("the index gives no file name for it", key=key)
    try:
        "".join(files if escaped else ()).encode()
    except UnicodeEncodeError:
        raise HeaderInvalid("a key of the index has half a surrogate pair: no text") from None
    names = dict.fromkeys(files.values())
    if len(names) > limits.shard_count:
        raise LimitExceeded("shard-count", f"an index of {len(names):,} files")
    for name in names:
        _check_name(name, own_name)
    return files


def _check_name(name: str, own_name: str) -> None:
    if not is_plain_name(name):
        raise PathEscape(
            "the index names a file that does not lie beside it",
            member=name,
            hint="do not use this index, or put the file beside it and edit the name",
        )
    if name == own_name:
        raise HeaderInvalid("the index names itself as the file of a tensor", member=name)


def _said(found: dict[str, Any]) -> tuple[int | None, tuple[Note, ...]]:
    """The total size that the index gives, and what is odd."""
    notes = []
    unknown = [name for name in found if name not in _FIELDS]
    if unknown:
        text = f"the index has {len(unknown)} fields that are not known and ignored: {unknown[0]}"
        notes.append(Note("index-extra-field", text))
    metadata = found.get("metadata", {})
    if not isinstance(metadata, dict):
        raise HeaderInvalid("the metadata of the index is not a JSON object")
    total = metadata.get("total_size")
    if total is None or (type(total) is int and total >= 0):
        return total, tuple(notes)
    notes.append(Note("index-total-size", "the total_size of the index is not a whole number"))
    return None, tuple(notes)
