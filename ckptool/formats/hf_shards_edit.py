"""Writing shards as transformers reads them: numbered .safetensors and their index.

Knows: names and the index of Hugging Face (formats 3.8). Must not know: verbs.
Tensors go in file order into the current shard until the next would pass the limit, as
huggingface_hub splits them; one that is larger has a shard of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import OutputError
from ckptool.formats.contents import Filler
from ckptool.formats.rows import Row
from ckptool.formats.safetensors import read
from ckptool.formats.safetensors_edit import (
    Exported,
    alias_places,
    dtype_of,
    file_metadata,
    file_parts,
    inline_of,
    select_rows,
    size_of,
)
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.plans import Literal, Output, Plan, total_size

STEM = "model"


def write(checkpoint: Checkpoint, changes: Changes, shard_bytes: int) -> tuple[Plan, Exported]:
    """One output a shard, the index last; a single shard is `model.safetensors` without one."""
    rows, aliases, exported = select_rows(checkpoint, changes)
    shards = split(rows, shard_bytes)
    names = [_name(number, len(shards)) for number in range(len(shards))]
    homes = {row.key: number for number, shard in enumerate(shards) for row in shard}
    metadata = file_metadata(checkpoint, changes) | alias_places(exported.places)
    filler = Filler(changes.check, inline_of(checkpoint))
    outputs = []
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        mine = {second: first for second, first in aliases.items() if homes[first] == number}
        said = metadata if not number else {"format": "pt"}
        parts = file_parts(shard, said | mine, filler)
        outputs.append(Output(name, parts, total_size(parts)))
    if len(shards) > 1:
        data = _index(rows, homes, names)
        outputs.append(Output(f"{STEM}.safetensors.index.json", (Literal(data),), len(data)))
    planned = replace(exported, rows=tuple(tuple(shard) for shard in shards))
    return Plan(checkpoint.sources, tuple(outputs)), planned


def split(rows: list[Row], shard_bytes: int) -> list[list[Row]]:
    """Rows by shard; at least one."""
    shards: list[list[Row]] = [[]]
    filled = 0
    for row in rows:
        size = size_of(row)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += size
    return shards


def confirm(
    checkpoint: Checkpoint, exported: Exported, written: Source, limits: Limits, name: str
) -> None:
    """Read one output back: the header of a shard, or the index. Raises OutputError."""
    if name.endswith(".json"):
        json.loads(written.read(0, written.size))
        return
    shard = exported.rows[_number(name)]
    found = {t.key: (t.dtype, t.shape) for t in read(written, limits).tensors}
    wanted = {row.key: (dtype_of(row), row.tensor.shape) for row in shard}
    wanted |= {a: wanted[b] for a, b in exported.aliases.items() if b in wanted}
    if found != wanted:
        raise OutputError(f"self-check failed: the header of {name} was not written as planned")


def _name(number: int, count: int) -> str:
    if count == 1:
        return f"{STEM}.safetensors"
    return f"{STEM}-{number + 1:05d}-of-{count:05d}.safetensors"


def _number(name: str) -> int:
    return int(name.split("-")[1]) - 1 if "-of-" in name else 0


def _index(rows: list[Row], homes: dict[str, int], names: list[str]) -> bytes:
    """Sizes and the map of keys, sorted as transformers writes it."""
    sizes = sum(size_of(row) for row in rows)
    index = {
        "metadata": {"total_size": sizes},
        "weight_map": {row.key: names[homes[row.key]] for row in rows},
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode("utf-8") + b"\n"
