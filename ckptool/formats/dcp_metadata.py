"""`.metadata` of a DCP folder, read inertly: which keys there are, and where their items lie.

Knows: the classes of torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.1 to
2.13) as nodes. Must not know: what is in an item. torch unpickles this file, so code in it runs.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ckptool.checkpoint import DType, Global, Path, Region
from ckptool.errors import (
    CkptError,
    HeaderInvalid,
    KeyDuplicate,
    LimitExceeded,
    UnsafePickle,
    Unsupported,
)
from ckptool.formats.assemble import walk_checked
from ckptool.formats.dicts import dict_items, state_items
from ckptool.formats.judge import CODE, Judge
from ckptool.formats.measures import global_name, named_dtype, whole
from ckptool.limits import Limits
from ckptool.pickles.nodes import LIST, Box, Obj, elements, items_of, text_of
from ckptool.pieces import count, overlap
from ckptool.places import Folder, Source
from ckptool.spans import Address

FILE = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES = (
    f"{_CLASSES}TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
)  # to 2.2
_AGAIN = "copy the folder again, or read it with the torch that wrote it"
_DEEP = 100
"""Dicts and lists inside each other; torch's own flattening seldom sees ten."""


class Item(NamedTuple):
    """Where one item lies: `length` bytes of `file` from `offset`."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A slice of a tensor, and the item that holds it."""

    region: Region
    item: Item


class Copied(NamedTuple):
    """One more item of slice `at` of a key (0 for an object), which another rank saved too."""

    at: int
    item: Item


class Key(NamedTuple):
    """One entry of the flattened state_dict: a tensor in `chunks` (dtype and shape set), or an
    object in the one `item`. `path` is its place in the nested one.
    """

    name: str
    path: Path
    dtype: DType | None = None
    shape: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    item: Item | None = None
    copies: tuple[Copied, ...] = ()


class Metadata(NamedTuple):
    """All keys in order; `unused_count` items that belong to none."""

    keys: tuple[Key, ...]
    version: str | None
    globals: tuple[Global, ...]
    unused_count: int


class Index(NamedTuple):
    """What the metadata of a folder say, where they lie, their bytes; `rank_count` is 0 where one
    file speaks for all ranks.
    """

    metadata: Metadata
    addresses: tuple[Address, ...]
    size_bytes: int
    rank_count: int = 0


def read_index(folder: Folder, limits: Limits) -> Index:
    """That of the one `.metadata`. Raises what `read_metadata` raises."""
    with folder.child(FILE) as source:
        return Index(read_metadata(source, limits), (source.address,), source.size)


def read_metadata(source: Source, limits: Limits, member: str = FILE) -> Metadata:
    """What one file says, which errors call `member`.

    Raises HeaderInvalid for what torch does not write, UnsafePickle where that could run code
    too, KeyDuplicate, LimitExceeded, Unsupported for compressed items.
    """
    if source.size > limits.pickle_bytes:
        text = f"a {member} of {source.size:,} bytes"
        raise LimitExceeded("pickle-bytes", text, path=source.name)
    walked = walk_checked(source.read(0, source.size), 0, limits, member)
    judged = Judge(walked, member).run()
    try:
        return _parsed(walked.root, judged)
    except CkptError as error:
        error.path = error.path or source.name
        code = [row for row in judged if row.verdict == CODE]
        if not code or not isinstance(error, HeaderInvalid):
            raise
        names = ", ".join(row.name for row in code[:3])
        raise UnsafePickle(
            f"it could run code when loaded: {names}; {error.text}", path=source.name,
            member=member, offset=code[0].offset, hint="do not load this folder with torch",
        ) from None  # fmt: skip


def _parsed(root: Any, judged: tuple[Global, ...]) -> Metadata:
    fields = _fields(root, "Metadata")
    items = _items(fields.get("storage_data"))
    places = _paths(fields.get("planner_data"))
    keys: list[Key] = []
    seen: set[str] = set()
    used: set[Any] = set()
    for name_node, value, *_ in _rows(fields.get("state_dict_metadata"), "state_dict_metadata"):
        name = text_of(name_node)
        if name is None:
            raise HeaderInvalid("a key that is no text", hint=_AGAIN)
        if name in seen:
            raise KeyDuplicate("a key stands twice in one state_dict", key=name, hint=_AGAIN)
        seen.add(name)
        path = places.get(name, (name,))
        keys.append(_key(name, path, value, items, used))
    return Metadata(tuple(keys), text_of(fields.get("version")), judged, len(items) - len(used))


def _key(name: str, path: Path, node: Any, items: dict[Any, Item], used: set[Any]) -> Key:
    kind = _class_of(node)
    if kind == f"{_CLASSES}BytesStorageMetadata":
        used.add((name, None))
        return Key(name, path, item=_item(items, name, None))
    if kind != f"{_CLASSES}TensorStorageMetadata":
        raise HeaderInvalid(f"an entry of the class {kind or 'none'}", key=name, hint=_AGAIN)
    try:
        fields = state_items(node) or {}
        shape = _size(fields.get("size"), node)
        chunks = []
        for chunk in _listed(fields.get("chunks")):
            region = _region(chunk)
            start = tuple([low for low, _ in region])
            used.add((name, start))
            chunks.append(Chunk(region, _item(items, name, start)))
        return Key(name, path, _dtype(fields.get("properties")), shape, tuple(chunks))
    except CkptError as error:
        error.key = error.key or name
        raise


def _item(items: dict[Any, Item], name: str, start: tuple[int, ...] | None) -> Item:
    found = items.get((name, start))
    if found is None:
        where = "" if start is None else f" of the slice at {list(start)}"
        raise HeaderInvalid(f"no item holds the bytes{where}", key=name, hint=_AGAIN)
    return found


# -- what the classes hold ---------------------------------------------------------------------
def _class_of(node: Any) -> str | None:
    return global_name(node.fn) if type(node) is Obj else None


def _fields(node: Any, cls: str) -> dict[str, Any]:
    """The attributes of an object of one of the metadata classes."""
    full = cls if "." in cls else _CLASSES + cls
    found = state_items(node) if _class_of(node) == full else None
    if found is None:
        raise HeaderInvalid(
            f"no {cls.rpartition('.')[2]} where torch writes one", hint=_AGAIN,
            offset=getattr(node, "end", None),
        )  # fmt: skip
    return found


def _rows(node: Any, what: str) -> list[tuple[Any, Any, int, int, int]]:
    rows = dict_items(node)
    if rows is None:
        raise HeaderInvalid(f"{what} is no dict", hint=_AGAIN)
    return rows


def _listed(node: Any) -> list[Any]:
    if type(node) is not Box or node.kind != LIST:
        raise HeaderInvalid("the chunks of a tensor are no list", hint=_AGAIN)
    return [value for value, *_ in elements(node)]


def _size(node: Any, owner: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    args = items_of(node.args) if _class_of(node) == "torch.Size" else None
    numbers = items_of(args[0]) if args and len(args) == 1 else None
    if numbers is None or len(numbers) > 64:
        raise HeaderInvalid("a size that is no torch.Size", offset=getattr(owner, "end", None))
    return tuple([_number(number, "a size", owner) for number in numbers])


def _region(node: Any) -> Region:
    fields = _fields(node, "ChunkStorageMetadata")
    starts, sizes = _size(fields.get("offsets"), node), _size(fields.get("sizes"), node)
    if len(starts) != len(sizes):
        raise HeaderInvalid("a chunk whose offsets and sizes differ in number", hint=_AGAIN)
    return tuple([(low, low + size) for low, size in zip(starts, sizes, strict=True)])


def _dtype(node: Any) -> DType:
    """Of TensorProperties, whose state is (dtype, layout, requires_grad, memory format, pinned)."""
    is_one = _class_of(node) in _PROPERTIES and node.state is not None
    parts = items_of(node.state.value) if is_one else None
    if not parts:
        raise HeaderInvalid("no TensorProperties where torch writes one", hint=_AGAIN)
    layout = items_of(parts[1].args) if len(parts) > 1 and type(parts[1]) is Obj else None
    if layout and text_of(layout[0]) != "torch.strided":
        raise Unsupported(f"a tensor of the layout {text_of(layout[0])}")
    return named_dtype(parts[0], node)


def _items(node: Any) -> dict[Any, Item]:
    """{(key, start of the slice or None): item}. Raises KeyDuplicate, Unsupported."""
    found: dict[Any, Item] = {}
    for index, info, *_ in _rows(node, "storage_data"):
        fields = _fields(index, "MetadataIndex")
        name, at = text_of(fields.get("fqn")), fields.get("offset")
        if name is None:
            raise HeaderInvalid("an item without a key", hint=_AGAIN)
        place = (name, None if at is None else _size(at, index))
        if place in found:
            raise KeyDuplicate("two items for one slice", key=name, hint=_AGAIN)
        found[place] = _storage_info(info, name)
    return found


def _storage_info(node: Any, name: str) -> Item:
    fields = _fields(node, _INFO)
    transforms = fields.get("transform_descriptors")
    if transforms is not None:
        listed = [text_of(value) for value, *_ in elements(transforms)] if type(transforms) is Box else []  # fmt: skip
        if listed or type(transforms) is not Box:
            named = ", ".join(f"'{text}'" for text in listed if text) or "something unknown"
            raise Unsupported(
                f"its bytes went through {named} when they were written", key=name,
                hint="load and save it again with torch.distributed.checkpoint, without extensions",
            )  # fmt: skip
    file = text_of(fields.get("relative_path"))
    if file is None:
        raise HeaderInvalid("an item without a file name", key=name, hint=_AGAIN)
    offset = _number(fields.get("offset"), "the offset of an item", node)
    return Item(file, offset, _number(fields.get("length"), "the length of an item", node))


def _number(value: Any, what: str, node: Any) -> int:
    """Of 63 bits, as torch's are."""
    found = whole(value, what, node)
    if found >= 1 << 63:
        raise HeaderInvalid(f"{what} of more than 63 bits", hint=_AGAIN)
    return found


def _paths(node: Any) -> dict[str, Path]:
    """Where each key stands in the nested state_dict; empty where it was not flattened."""
    found: dict[str, Path] = {}
    for key, value, *_ in _rows(node, "planner_data") if node is not None else ():
        name, parts = text_of(key), items_of(value)
        if name is None or not parts or len(parts) > _DEEP:
            raise HeaderInvalid("a place in the state_dict that is no path", key=name, hint=_AGAIN)
        path = tuple([part if type(part) is int else text_of(part) for part in parts])
        if any(part is None or (type(part) is int and part < 0) for part in path):
            raise HeaderInvalid("a place in the state_dict that is no path", key=name, hint=_AGAIN)
        found[name] = path  # type: ignore[assignment]
    return found


def check_tiling(key: Key) -> None:
    """Raise HeaderInvalid unless the slices of a tensor lie in it, apart, and fill it."""
    regions = [chunk.region for chunk in key.chunks]
    for region in regions:
        inside = len(region) == len(key.shape)
        inside = inside and all(high <= n for (_, high), n in zip(region, key.shape, strict=True))
        if not inside:
            text = f"a slice {_shown(region)} outside of a tensor of {list(key.shape)}"
            raise HeaderInvalid(text, key=key.name, hint=_AGAIN)
    full = [region for region in regions if count(region)]
    pair = overlap(full)
    if pair:
        text = f"two slices overlap: {_shown(full[pair[0]])} and {_shown(full[pair[1]])}"
        raise HeaderInvalid(text, key=key.name, hint=_AGAIN)
    have, wanted = sum(map(count, full)), prod(key.shape)
    if have != wanted:
        text = f"its slices hold {have:,} of {wanted:,} elements"
        raise HeaderInvalid(text, key=key.name, hint="the folder lacks what some rank saved")


def _shown(region: Region) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in region) + "]"
