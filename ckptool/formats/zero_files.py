"""One file of a DeepSpeed ZeRO checkpoint: what it says, as plain records.

Knows: the names and entries that DeepSpeed gives (deepspeed/checkpoint/constants.py,
runtime/engine.py, runtime/zero/stage_1_and_2.py, stage3.py). Must not know: folders, how ranks are
put together. Containers that a call of the pickle makes are refused: nobody here would run it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Extra, Tensor
from ckptool.errors import HeaderInvalid, Unsupported
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items
from ckptool.formats.measures import global_name
from ckptool.formats.moved import Moved
from ckptool.limits import Limits
from ckptool.pickles.nodes import DICT, LIST, SET, Box, Obj, Tup, elements, items_of, text_of

Shape = tuple[int, ...]
RANK_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt"
)
"""(data-parallel rank, model-parallel rank, what): DeepSpeed's engine.py, `_get_ckpt_name` and
`_get_rank_zero_ckpt_name`.
"""
CONSUMED = frozenset(("module", "buffer_names", "param_shapes", "shared_params",
                      "frozen_param_shapes", "frozen_param_fragments"))  # fmt: skip
_ORDERED = ("collections.OrderedDict", "collections.defaultdict")
_SETS = ("builtins.set", "__builtin__.set")
_AGAIN = "copy the folder again, or save the checkpoint again"


class ModelState(NamedTuple):
    """A `*_model_states.pt`: parameters by optimizer group in the order of its flat buffer,
    `shared` as (name that is not stored, name that is), whole or partial `fragments` of frozen
    parameters.
    """

    buffers: tuple[Tensor, ...]
    groups: tuple[dict[str, Shape], ...]
    shared: tuple[tuple[str, str], ...]
    frozen: dict[str, Shape]
    fragments: dict[str, Tensor]
    extras: tuple[Extra, ...]


class OptimState(NamedTuple):
    """A `*_optim_states.pt`: the flat fp32 tensors of this rank, one a group; `paddings` are the
    elements left free behind each parameter, where DeepSpeed recorded any; `state_names` what the
    optimizer keeps beside them (exp_avg).
    """

    stage: int
    partition_counts: tuple[int, ...]
    flat: tuple[Tensor, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    state_names: tuple[str, ...]


class Record:
    """The root dict of one file; `fail` makes errors that name it."""

    def __init__(self, found: Checkpoint, moved: Moved, limits: Limits) -> None:
        if not isinstance(found.handle, PickleHandle):
            raise HeaderInvalid("not a file of DeepSpeed's", path=found.file, hint=_AGAIN)
        self.file = found.file
        self.limits = limits
        self._reader = found.handle.reader
        self._moved = moved
        self.entries = self.dict_of(found.handle.walked.root, "the file")

    def fail(self, text: str, key: str | None = None) -> HeaderInvalid:
        """An error about this file."""
        return HeaderInvalid(text, path=self.file, key=key, hint=_AGAIN)

    def dict_of(self, node: Any, what: str) -> dict[str, Any]:
        """A plain or ordered dict by its text keys, the last of two as in Python."""
        plain = type(node) is Box and node.kind == DICT
        ordered = type(node) is Obj and global_name(node.fn) in _ORDERED
        rows = dict_items(node) if plain or ordered else None
        if rows is None:
            raise self.fail(f"{what} is not a dict")
        return {name: value for key, value, *_ in rows if (name := text_of(key)) is not None}

    def list_of(self, node: Any, what: str) -> list[Any]:
        """The items of a plain list, tuple or set."""
        if type(node) is Obj and global_name(node.fn) in _SETS:
            node = (items_of(node.args) or [None])[0]
        if type(node) is Box and node.kind in (LIST, SET):
            return [value for value, *_ in elements(node)]
        items = items_of(node)
        if items is None:
            raise self.fail(f"{what} is not a list")
        return list(items)

    def number(self, node: Any, what: str) -> int:
        """A whole number, or an IntEnum's (ZeroStageEnum)."""
        args = items_of(node.args) if type(node) is Obj else None
        found = args[0] if args and len(args) == 1 else node
        if type(found) is not int or found < 0:
            raise self.fail(f"{what} is not a whole number")
        return found

    def tensor(self, node: Any, key: str) -> Tensor:
        """A tensor with numbers of its own; its storage knows the file it is in."""
        found = self._reader.tensor(node)
        if found is None or found.kind not in ("tensor", "parameter") or found.storage is None:
            raise self.fail("not a plain tensor", key)
        return self._moved.tensors([found])[0]

    def shapes(self, node: Any, what: str) -> dict[str, Shape]:
        """{name: torch.Size}."""
        return {key: self._shape(value, key) for key, value in self.dict_of(node, what).items()}

    def _shape(self, node: Any, key: str) -> Shape:
        if type(node) is Obj and global_name(node.fn) == "torch.Size":
            node = (items_of(node.args) or [()])[0]
        if type(node) not in (Tup, Box, tuple):
            raise self.fail("its shape is no list of numbers", key)
        sizes = tuple(self.list_of(node, "its shape"))
        if len(sizes) > self.limits.rank or any(type(n) is not int or n < 0 for n in sizes):
            raise self.fail("its shape is no list of whole numbers", key)
        return sizes


# -- model states ------------------------------------------------------------------------------
def model_state(found: Checkpoint, number: int, limits: Limits) -> ModelState:
    """Read a `*_model_states.pt`, file `number` of the checkpoint. Raises HeaderInvalid, Unsupported."""
    record = Record(found, Moved(number, "cpu"), limits)
    entries = record.entries
    for name in ("buffer_names", "param_shapes", "module"):
        if name not in entries:
            raise record.fail(f"not a model_states file: it holds no '{name}'")
    _refuse_experts(record)
    if entries["module"] is None:
        raise Unsupported(
            "a pipeline-parallel checkpoint: its weights are in layer files",
            path=found.file, hint="load it with DeepSpeed and save its module's state_dict",
        )  # fmt: skip
    shapes = record.list_of(entries["param_shapes"], "'param_shapes'")
    frozen, fragments = entries.get("frozen_param_shapes"), entries.get("frozen_param_fragments")
    return ModelState(
        _buffers(record),
        tuple([record.shapes(group, "a group of 'param_shapes'") for group in shapes]),
        _shared(record),
        {} if frozen is None else record.shapes(frozen, "'frozen_param_shapes'"),
        {} if frozen is None or fragments is None else _fragments(record, fragments),
        tuple([e for e in found.extras if e.path and e.path[0] not in CONSUMED]),
    )


def _buffers(record: Record) -> tuple[Tensor, ...]:
    """Entries of `module` that are buffers, in its order."""
    texts = map(text_of, record.list_of(record.entries["buffer_names"], "'buffer_names'"))
    names = {name for name in texts if name is not None}
    module = record.dict_of(record.entries["module"], "'module'")
    return tuple(
        [named(record.tensor(node, key), key) for key, node in module.items() if key in names]
    )


def named(t: Tensor, key: str) -> Tensor:
    """The same tensor, of the state_dict that comes out."""
    return Tensor(key, t.dtype, t.shape, t.stride, t.offset, t.storage, False, path=(key,))


def _shared(record: Record) -> tuple[tuple[str, str], ...]:
    node = record.entries.get("shared_params")
    rows = {} if node is None else record.dict_of(node, "'shared_params'")
    return tuple([(key, name) for key, value in rows.items() if (name := text_of(value))])


def _fragments(record: Record, node: Any) -> dict[str, Tensor]:
    rows = record.dict_of(node, "'frozen_param_fragments'")
    return {key: record.tensor(value, key) for key, value in rows.items()}


def _refuse_experts(record: Record) -> None:
    """Experts that ZeRO-3 partitions among their own replicas: DeepSpeed's script refuses too."""
    for name in ("ds_autoep_layers", "autoep_layers"):
        node = record.entries.get(name)
        for layer in record.list_of(node, name) if type(node) is Box and node.kind == LIST else ():
            if type(layer) is Box and layer.kind == DICT:
                kind = text_of(record.dict_of(layer, name).get("checkpoint_format"))
                if kind == "zero3_partitioned":
                    raise _experts(record)


def _experts(record: Record) -> Unsupported:
    return Unsupported(
        "expert parameters that are partitioned among expert replicas", path=record.file,
        hint="use DeepSpeed's ds_to_universal.py",
    )  # fmt: skip


# -- optimizer states --------------------------------------------------------------------------
def optim_state(found: Checkpoint, number: int, limits: Limits) -> OptimState:
    """Read a `*_optim_states.pt`, file `number` of the checkpoint. Raises HeaderInvalid, Unsupported."""
    record = Record(found, Moved(number, "cpu"), limits)
    if "optimizer_state_dict" not in record.entries:
        raise record.fail("not an optim_states file: it holds no 'optimizer_state_dict'")
    record.entries = record.dict_of(
        record.entries["optimizer_state_dict"], "'optimizer_state_dict'"
    )
    if "zero_stage" not in record.entries:
        raise Unsupported(
            "an optimizer that is not ZeRO's (no 'zero_stage'): zero_to_fp32.py cannot join it either",
            path=found.file, hint="use DeepSpeed's ds_to_universal.py",
        )  # fmt: skip
    stage = record.number(record.entries["zero_stage"], "'zero_stage'")
    if stage not in (1, 2, 3):
        raise record.fail(f"there is no ZeRO stage {stage}")
    if record.entries.get("ds_zero_partition_groups") is not None:
        raise _experts(record)
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    if name not in record.entries:
        raise record.fail(f"it holds no '{name}'")
    nodes = record.list_of(record.entries[name], f"'{name}'")
    flat = tuple([record.tensor(node, f"{name}.{at}") for at, node in enumerate(nodes)])
    return OptimState(stage, _counts(record), flat, _paddings(record), _state_names(found, name))


def _counts(record: Record) -> tuple[int, ...]:
    node = record.entries.get("partition_count")
    if type(node) is Box:
        rows = record.list_of(node, "'partition_count'")
        return tuple([record.number(row, "'partition_count'") for row in rows])
    return (record.number(node, "'partition_count'"),)


def _paddings(record: Record) -> tuple[tuple[int, ...], ...] | None:
    name = "param_alignment_paddings"
    node = record.entries.get(name)
    if node is None:
        return None
    groups = [record.list_of(group, f"'{name}'") for group in record.list_of(node, f"'{name}'")]
    return tuple([tuple([record.number(n, f"'{name}'") for n in group]) for group in groups])


def _state_names(found: Checkpoint, flat_name: str) -> tuple[str, ...]:
    """Names of the optimizer's own tensors."""
    paths = [tensor.path for tensor in found.tensors if flat_name not in tensor.path]
    names = {path[-1]: None for path in paths if path and type(path[-1]) is str}
    return tuple([str(name) for name in names if name != "step"][:8])
