"""Jobs of ranks over NCCL: sharded matrices, and checkpoints of sharded state."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, muon, partition
from sharding import MatrixOwnerOptimizer, ZeroRedundancyOptimizer

from .over_nccl import group_on_devices

SHAPES = {"first": (64, 48), "second": (33, 64), "third": (7, 5), "bias": (33,)}


def _whole(seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance).cuda() / 8 for name, shape in SHAPES.items()}


class Weights(nn.Module):
    """Module of parameters, without a forward pass, since the jobs set the gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in _whole(0).items():
            self.register_parameter(name, nn.Parameter(value))


def _apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def matrices(steps: int) -> dict[str, Any]:
    """Compare Muon under FSDP2 with one process that has whole tensors on the same device."""
    group = group_on_devices()
    optimizer = chain(
        clip_by_global_norm(1.0),
        partition(
            {"matrices": muon(lr=0.05), "rest": adamw(lr=0.05)},
            lambda path, shape: "matrices" if len(shape) == 2 else "rest",
        ),
    )
    model, alone = Weights(), Weights()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"))
    ours = MatrixOwnerOptimizer(model.named_parameters(), optimizer)
    theirs = TorchOptimizer(alone.named_parameters(), optimizer)
    for step in range(steps):
        grads = _whole(100 + step)
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            param.grad = distribute_tensor(grads[name], param.device_mesh, param.placements)
        for name, param in alone.named_parameters():
            param.grad = grads[name]
        ours.step()
        theirs.step()
    found = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    want = {name: param.detach() for name, param in alone.named_parameters()}
    return {"apart": max(_apart(found[name], want[name]) for name in want)}


def checkpoint(folder: str, steps: int) -> dict[str, Any]:
    """Save ZeRO's state with torch.distributed.checkpoint, and load it into another ZeRO."""
    group = group_on_devices(backend="cpu:gloo,cuda:nccl")
    module = Weights()
    first = ZeroRedundancyOptimizer(
        module.named_parameters(), adamw(lr=0.05), process_group=group, policy="elements"
    )

    def train(one: nn.Module, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            grads = _whole(200 + number)
            for name, param in one.named_parameters():
                param.grad = grads[name]
            optimizer.step()

    train(module, first, range(steps))
    saved = copy.deepcopy(module.state_dict())
    state = {"optim": first.state_dict()}
    dcp.save(state, checkpoint_id=folder, process_group=group)
    train(module, first, range(steps, 2 * steps))
    other = Weights()
    other.load_state_dict(saved)
    second = ZeroRedundancyOptimizer(
        other.named_parameters(), adamw(lr=0.05), process_group=group, policy="greedy"
    )
    state = {"optim": second.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    second.load_state_dict(state["optim"])
    train(other, second, range(steps, 2 * steps))
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    torch.cuda.synchronize()
    return {"equal": all(torch.equal(a, b) for a, b in pairs), "rank": dist.get_rank(group)}
