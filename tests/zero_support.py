"""DeepSpeed ZeRO checkpoints, written as DeepSpeed writes them, without DeepSpeed.

The layouts are those of deepspeed 0.19 (runtime/engine.py `_save_zero_checkpoint`,
zero/stage_1_and_2.py `state_dict`, zero/stage3.py `_rigid_state_dict`), written anew here. What a
test compares with are the tensors that were taken apart, not a second program that joins them.
"""

from __future__ import annotations

import enum
import math
import sys
import types
from collections import OrderedDict
from contextlib import contextmanager
from typing import NamedTuple

import torch

TAG = "global_step5"


class Net(NamedTuple):
    """fp32 parameters by optimizer group, and what is no part of the optimizer."""

    groups: list[dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    shared: dict[str, str]

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        """The state_dict in the order of zero_to_fp32.py: buffers, frozen, parameters, shared."""
        found = {**self.buffers, **self.frozen}
        for group in self.groups:
            found |= group
        for name, owner in self.shared.items():
            found[name] = found[owner]
        return found


def net(seed=0):
    """Sizes that no number of ranks divides, a scalar, an empty one; two groups."""
    torch.manual_seed(seed)
    first = {"embed.weight": torch.randn(7, 5), "layers.0.weight": torch.randn(5, 5)}
    second = {
        "layers.0.bias": torch.randn(5),
        "empty": torch.randn(0, 3),
        "head.bias": torch.randn(3),
    }
    return Net(
        [first | {"scale": torch.randn(())}, second],
        {
            "norm.mean": torch.randn(5),
            "norm.count": torch.tensor(7),
            "norm.mask": torch.tensor([True, False]),
        },
        {"frozen.weight": torch.randn(3, 5).to(torch.bfloat16), "frozen.bias": torch.randn(2)},
        {"head.weight": "embed.weight", "head.again": "head.weight"},
    )


# -- taking apart ------------------------------------------------------------------------------
def partitions(params, world, paddings=None, lean=True):
    """One optimizer group of stages 1 and 2: each rank's run of the flat tensor, which is padded
    to twice the number of ranks; `lean`: the last rank's padding is cut off again, by a view.
    """
    runs = []
    for at, tensor in enumerate(params):
        runs += [tensor.flatten(), torch.zeros(paddings[at] if paddings else 0)]
    flat = torch.cat(runs) if runs else torch.zeros(0)
    count = len(flat)
    flat = torch.cat([flat, torch.zeros(-count % (2 * world))])
    size = len(flat) // world
    parts = [flat[rank * size : (rank + 1) * size].clone() for rank in range(world)]
    if lean:
        parts = [part[: max(0, min(size, count - rank * size))] for rank, part in enumerate(parts)]
    return parts


def pieces(tensor, world):
    """One parameter of stage 3: every rank holds ceil(elements / ranks), the last ones zeros."""
    size = math.ceil(tensor.numel() / world)
    flat = torch.cat(
        [tensor.flatten(), torch.zeros(size * world - tensor.numel(), dtype=tensor.dtype)]
    )
    return [flat[rank * size : (rank + 1) * size].clone() for rank in range(world)]


def flat_groups(params, world, sizes=None):
    """Each rank's flat tensors of stage 3, cut at `sizes` (one tensor where not given)."""
    ranks = [torch.cat(rows) for rows in zip(*(pieces(t, world) for t in params), strict=True)]
    if sizes is None:
        return [[flat] for flat in ranks]
    return [list(flat.split([*sizes, len(flat) - sum(sizes)])) for flat in ranks]


# -- classes that pickles name -----------------------------------------------------------------
class _Stage(int, enum.Enum):
    optimizer_states, gradients, weights = 1, 2, 3


class _Scaler:
    def __init__(self):
        self.cur_scale = 1.0


@contextmanager
def deepspeed_classes():
    """Modules of DeepSpeed's names while something is pickled: (stage enum, loss scaler)."""
    rows = (("deepspeed.runtime.zero.config", "ZeroStageEnum", _Stage),
            ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", _Scaler))  # fmt: skip
    made, kept = [], dict(sys.modules)
    for module, name, base in rows:
        parts = module.split(".")
        for at in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:at])] = types.ModuleType(".".join(parts[:at]))
        if base is _Stage:
            found = enum.Enum(name, {row.name: row.value for row in base}, type=int, module=module)
        else:
            found = type(name, (base,), {"__module__": module})
        setattr(sys.modules[module], name, found)
        made.append(found)
    try:
        yield made
    finally:
        for module in [m for m in sys.modules if m.split(".")[0] == "deepspeed"]:
            del sys.modules[module]
        sys.modules.update({m: v for m, v in kept.items() if m.split(".")[0] == "deepspeed"})


# -- writing -----------------------------------------------------------------------------------
def model_file(stage, rank=0):
    return (
        f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        if stage == 3
        else "mp_rank_00_model_states.pt"
    )


def optim_file(rank, prefix=""):
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_states(made, stage, world, rank=0, half=torch.float16):
    """What rank `rank` saves of the module: 16-bit weights, of stage 3 without their elements."""
    params = {name: t for group in made.groups for name, t in group.items()}
    empty = {name: torch.zeros(0, dtype=half) for name in params}
    module = empty if stage == 3 else {name: t.to(half) for name, t in params.items()}
    fragments = made.frozen
    if stage == 3:
        fragments = {name: pieces(t, world)[rank] for name, t in made.frozen.items()}
    return {
        "module": OrderedDict({**module, **made.buffers}), "buffer_names": list(made.buffers),
        "optimizer": None, "lr_scheduler": None, "sparse_tensor_module_names": set(), "skipped_steps": 0,
        "param_shapes": [OrderedDict((n, t.shape) for n, t in group.items()) for group in made.groups],
        "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in made.frozen.items()) or None,
        "frozen_param_fragments": OrderedDict(fragments) or None, "shared_params": made.shared,
        "global_steps": 5, "dp_world_size": world, "mp_world_size": 1, "ds_config": {"train_batch_size": 8},
        "ds_version": "0.19.8",
    }  # fmt: skip


def optim_states(made, stage, world, paddings=None, lean=True, sizes=None, stage_of=int):
    """What each rank saves of the optimizer."""
    if stage == 3:
        params = [t for group in made.groups for t in group.values()]
        flat = flat_groups(params, world, sizes)
        name = "fp32_flat_groups"
    else:
        columns = [
            partitions(list(group.values()), world, paddings[at] if paddings else None, lean)
            for at, group in enumerate(made.groups)
        ]
        flat = [list(row) for row in zip(*columns, strict=True)]
        name = "single_partition_of_fp32_groups"
    return [
        {
            "zero_stage": stage_of(stage),
            "partition_count": world if stage == 3 else [world] * len(made.groups),
            name: rows,
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3), "step": 4}}},
            **({"param_alignment_paddings": paddings} if paddings else {}),
        }
        for rows in flat
    ]


def write(folder, made, stage, world, tag=TAG, prefix="", **options):
    """A whole checkpoint; returns `folder`."""
    inner = folder / tag
    inner.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    for rank in range(world if stage == 3 else 1):
        torch.save(model_states(made, stage, world, rank), inner / model_file(stage, rank))
    with deepspeed_classes() as (stages, scaler):
        states = optim_states(made, stage, world, stage_of=stages, **options)
        for rank, state in enumerate(states):
            whole = {"optimizer_state_dict": {"loss_scaler": scaler(), **state}, "ds_config": {}}
            torch.save(whole | {"ds_version": "0.19.8"}, inner / optim_file(rank, prefix))
    return folder
