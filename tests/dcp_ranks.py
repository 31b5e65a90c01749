"""Writes a DCP folder as four ranks do: torchrun --nproc-per-node 4 dcp_ranks.py OUT KIND

KIND is `mixed` (every way to cut a tensor), `fsdp` (fully_shard and an optimizer), `apart` (as mixed,
with use_collectives=False and things that each rank has of its own) or `last` (channels_last). The
committed folders of tests/fixtures/dcp/ were made by it, with torch 2.13.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

PLACES = {
    "rows.weight": ((8, 3), "float32", "line", (0,)),
    "rows.uneven": ((6, 5), "float64", "line", (0,)),  # 2, 2, 2 and none
    "cols.uneven": ((4, 7), "bfloat16", "line", (1,)),
    "grid.weight": ((5, 6), "float32", "grid", (0, 1)),
    "grid.copied": ((3, 5, 2), "float32", "grid", (None, 1)),
    "last.dim": ((2, 3, 9), "int16", "line", (2,)),
    "first.one": ((1, 8), "complex64", "line", (1,)),  # one row: its columns are runs
    "copies": ((3, 3), "uint8", "line", (None,)),
}
"""name: (shape, dtype, mesh, the dimension that each axis of the mesh cuts; None: a copy)."""


def numbers(shape, dtype):
    """What the tensor of this shape holds."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251).reshape(shape).to(getattr(torch, dtype))


def whole_state():
    """The same as one process would have it."""
    model = {name: numbers(row[0], row[1]) for name, row in PLACES.items()}
    model["scalar"] = torch.tensor(7)
    state = {0: {"step": torch.tensor(1.0), "exp_avg": numbers((3, 8), "float32")}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]
    optimizer = {"state": state, "param_groups": groups}
    return {"model": model, "optimizer": optimizer, "epoch": 3, "note": "x"}


def sharded(tensor, mesh, axes):
    local, places = tensor, []
    for axis, dim in enumerate(axes):
        places.append(Replicate() if dim is None else Shard(dim))
        if dim is not None:
            parts = torch.chunk(local, mesh.size(axis), dim=dim)
            me = mesh.get_local_rank(axis)
            local = parts[me] if me < len(parts) else local.narrow(dim, 0, 0)
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(
        local.contiguous(), mesh, places, run_check=False, shape=shape, stride=stride
    )


def mixed_state():
    meshes = {
        "line": init_device_mesh("cpu", (4,)),
        "grid": init_device_mesh("cpu", (2, 2)),
    }
    state = whole_state()
    for name, (_, _, mesh, axes) in PLACES.items():
        state["model"][name] = sharded(state["model"][name], meshes[mesh], axes)
    first = state["optimizer"]["state"][0]
    first["exp_avg"] = sharded(first["exp_avg"], meshes["line"], (1,))
    return state


def fsdp_state():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.ReLU())
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optim": state, "step": 7}


def apart_state():
    rank = dist.get_rank()
    return {**mixed_state(), "rank": rank, "buffer": torch.full((3,), float(rank))}


IMAGE = numbers((8, 6, 3, 2), "float32")
LAST = {"rows": (0,), "columns": (1,)}
"""name: the dimension that the mesh of four cuts."""


def last_state():
    mesh = init_device_mesh("cpu", (4,))
    return {name: _last(sharded(IMAGE, mesh, axes)) for name, axes in LAST.items()}


def _last(tensor):
    local = tensor.to_local().contiguous(memory_format=torch.channels_last)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=IMAGE.shape,
        stride=IMAGE.contiguous(memory_format=torch.channels_last).stride(),
    )  # fmt: skip


STATES = {"mixed": mixed_state, "fsdp": fsdp_state, "apart": apart_state, "last": last_state}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    kind = sys.argv[2]
    dcp.save(STATES[kind](), checkpoint_id=sys.argv[1], use_collectives=kind != "apart")
    dist.destroy_process_group()
