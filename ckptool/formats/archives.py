"""TorchScript, torch.package and torch.export archives: looked into, never converted.

Knows: where each keeps its tensors (formats 3.4 to 3.6). Must not know: verbs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.checkpoint import (
    DTYPES,
    Checkpoint,
    DType,
    Global,
    Note,
    Piece,
    Storage,
    Table,
    Tensor,
)
from ckptool.errors import HeaderInvalid, NotACheckpoint, StorageSize
from ckptool.formats.assemble import PickleHandle, assemble, walk_checked
from ckptool.formats.dicts import state_items
from ckptool.formats.discover import Discoverer, Found
from ckptool.formats.judge import CODE, KNOWN, Judge
from ckptool.formats.measures import check_bounds, evolve, global_name, whole
from ckptool.formats.torch_pickle import Located, TensorReader
from ckptool.formats.torch_zip import Archive
from ckptool.limits import Limits
from ckptool.pickles.nodes import NEWOBJ, Obj, Walked
from ckptool.places import Source

SCRIPT_NOTE = Note(
    "torchscript",
    "TorchScript: torch.jit.load runs the code inside (code/); ckptool lists its tensors and converts nothing",
)


# -- TorchScript -------------------------------------------------------------------------------
def read_script(source: Source, archive: Archive, limits: Limits) -> Checkpoint:
    """data.pkl with `__torch__` classes; attributes are parameters, buffers or submodules."""
    walked = walk_checked(archive.read("data.pkl"), 0, limits, "data.pkl")

    def resolve(key: str, dtype: DType, count: int) -> Located:
        return archive.located(
            f"data/{key}", "stored", count * dtype.size_bytes, f"storage '{key}'"
        )

    reader = TensorReader(resolve, limits)
    discoverer = _ScriptDiscoverer(reader, limits)
    judged = tuple(_script_verdict(g) for g in Judge(walked).run())
    return assemble(source, "torchscript", walked, reader, limits, container=archive,
                    notes=(SCRIPT_NOTE,), judged=judged, discoverer=discoverer,
                    traits=frozenset(("inspect-only",)))  # fmt: skip


def _script_verdict(row: Global) -> Global:
    """Classes of the archive itself are its subject, not strangers."""
    known = row.name.startswith(("__torch__.", "torch.jit._pickle."))
    return Global(row.name, KNOWN, row.offset, row.member) if known else row


class _ScriptDiscoverer(Discoverer):
    """One table: the nested modules' tensors by dotted names."""

    def run(self, root: Any) -> Found:
        tensors = tuple(self._script_tensors(root))
        name = global_name(root.fn) if type(root) is Obj else None
        self.found.tensors = list(tensors)
        self.found.tables = [Table((), tensors, None, "module", name)]
        self.found.weights = 0 if tensors else None
        return self.found

    def _script_tensors(self, root: Any) -> Iterator[Tensor]:
        stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
        seen: set[int] = set()
        while stack:
            node, path = stack.pop()
            tensor = self.reader.tensor(node) if type(node) is Obj else None
            if tensor is not None:
                yield evolve(tensor, key=".".join(path), path=path)
                continue
            if type(node) is not Obj or node.op != NEWOBJ or id(node) in seen:
                continue
            seen.add(id(node))
            items = list((state_items(node) or {}).items())
            stack.extend((value, (*path, key)) for key, value in reversed(items))


# -- torch.package -----------------------------------------------------------------------------
def read_package(source: Source, archive: Archive, limits: Limits) -> Checkpoint:
    """Every `<package>/<resource>.pkl`, with storages at `.data/<n>.storage`."""
    names = [name for name in archive.directory.records if name.endswith(".pkl")]
    if not names:
        raise NotACheckpoint("a torch.package without a pickled resource", path=source.name)

    def resolve(key: str, dtype: DType, count: int) -> Located:
        return archive.located(
            f".data/{key}.storage", "stored", count * dtype.size_bytes, f"storage '{key}'"
        )

    reader = TensorReader(resolve, limits)
    parts = [_resource(source, archive, reader, name, limits) for name in names]
    tables = tuple(table for part, _ in parts for table in part.tables)
    note = Note(
        "torch-package",
        "torch.package: PackageImporter runs the code inside; ckptool lists its tensors and converts nothing",
    )
    return Checkpoint(
        file=source.name, format="torch-package", size_bytes=source.size, sources=(source.address,),
        tables=tables, weights=0 if tables else None,
        tensors=tuple(t for part, _ in parts for t in part.tensors),
        storages=tuple(reader.storages.values()), globals=tuple(g for _, gs in parts for g in gs),
        notes=(note,), handle=PickleHandle(parts[0][0].handle.walked, Found(), reader, archive),
        traits=frozenset(("inspect-only",)),
    )  # fmt: skip


def _resource(
    source: Source, archive: Archive, reader: TensorReader, name: str, limits: Limits
) -> tuple[Checkpoint, tuple[Global, ...]]:
    walked: Walked = walk_checked(archive.read(name), 0, limits, name)
    judged = Judge(walked, name).run()
    part = assemble(source, "torch-package", walked, reader, limits, judged=judged)
    packaged = tuple(
        Global(g.name, KNOWN, g.offset, g.member) if g.verdict == CODE and _is_packaged(archive, g.name) else g
        for g in judged
    )  # fmt: skip
    return part, packaged


def _is_packaged(archive: Archive, name: str) -> bool:
    """Whether a class comes from source code inside the archive."""
    module = name.rpartition(".")[0].replace(".", "/")
    return archive.find(f"{module}.py") is not None


# -- torch.export ------------------------------------------------------------------------------
_CONFIG = "data/weights/model_weights_config.json"
# torch/_export/serde/schema.py, ScalarType
_SCALAR_TYPES = dict(zip(
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 28, 29, 30, 31, 32, 33, 34, 35),
    ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32",
     "complex64", "complex128", "bool", "bfloat16", "uint16", "float8_e4m3fn", "float8_e5m2",
     "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "uint32", "uint64"), strict=True))  # fmt: skip


def read_export(source: Source, archive: Archive, limits: Limits) -> Checkpoint:
    """Weights named by a JSON file; no pickle is needed."""
    import json

    try:
        config = json.loads(archive.read(_CONFIG))["config"]
        rows = list(config.items())
        tensors = tuple(_exported(archive, key, row) for key, row in rows)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HeaderInvalid(
            f"{_CONFIG} is not what torch.export writes", path=source.name
        ) from None
    storages = tuple({t.storage.key: t.storage for t in tensors if t.storage}.values())
    note = Note(
        "torch-export", "torch.export program: ckptool lists its weights and converts nothing"
    )
    return Checkpoint(
        file=source.name, format="torch-export", size_bytes=source.size, sources=(source.address,),
        tables=(Table((), tensors),), weights=0, tensors=tensors, storages=storages, notes=(note,),
        handle=archive, traits=frozenset(("inspect-only",)),
    )  # fmt: skip


def _exported(archive: Archive, key: str, row: dict[str, Any]) -> Tensor:
    meta = row["tensor_meta"]
    dtype = DTYPES[_SCALAR_TYPES[meta["dtype"]]]
    shape = tuple(whole(size["as_int"], "the size of a tensor", None) for size in meta["sizes"])
    stride = tuple(
        whole(step["as_int"], "the stride of a tensor", None) for step in meta["strides"]
    )
    offset = whole(meta["storage_offset"]["as_int"], "the offset of a tensor", None)
    name, device = f"data/weights/{row['path_name']}", meta["device"]
    tag = device["type"] + (f":{device['index']}" if device["index"] is not None else "")
    entry = archive.find(name)
    if entry is None:
        raise StorageSize(f"the record '{name}' is not in the file", key=key)
    kind = "parameter" if row.get("is_param") is True else "tensor"
    if row.get("use_pickle"):
        return Tensor(
            key, dtype, shape, stride, offset, None, bool(meta["requires_grad"]), kind, (key,), tag
        )
    count, rest = divmod(entry.size, dtype.size_bytes)
    if rest:
        text = f"'{name}' has {entry.size:,} bytes: no whole number of {dtype.name}"
        raise StorageSize(text, key=key)
    check_bounds(shape, stride, offset, count, None)
    pieces, crc = archive.located(name, "stored", entry.size, f"'{key}'")
    storage = Storage(
        row["path_name"],
        dtype,
        count,
        tag,
        tuple(Piece(0, p.span, p.encoding) for p in pieces),
        crc,
    )
    return Tensor(
        key, dtype, shape, stride, offset, storage, bool(meta["requires_grad"]), kind, (key,), tag
    )
