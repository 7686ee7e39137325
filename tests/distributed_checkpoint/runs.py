"""Runs that stop and continue: by ZeRO, by torch.optim in one process, and by FSDP2."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from functional_optim import TorchOptimizer, adamw
from sharding import MatrixOwnerOptimizer, ZeroRedundancyOptimizer
from sharding.checkpoint.flat_ranges import FlatRanges
from tests.zero_local.compare import same

BEFORE, AFTER = 2, 2
"""Number of steps before a run stops, and after the load."""
LR = 0.1


class Net(nn.Module):
    """Model with layer sizes that no number of ranks divides, and one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.pictures = nn.Conv2d(2, 3, 3)
        self.frozen = nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(5, 3)


def net(seed: int) -> Net:
    """Return a model; the seed of a new run differs from that of the saved run."""
    torch.manual_seed(seed)
    return Net()


def gradients(params: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Return the gradients of one step, equal on all ranks, as after a reduction."""
    chance = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn(param.shape, generator=chance) * 10.0 ** (step % 3 - 1)
        for name, param in params.items()
    }


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Step with fixed gradients; a DTensor gets this rank's part of its gradient."""
    named = dict(model.named_parameters())
    for step in steps:
        for name, grad in gradients(named, step).items():
            param = named[name]
            if not param.requires_grad:
                continue
            if isinstance(param, DTensor):
                param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
            else:
                param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def by_zero(seed: int, lr: float, policy: str = "elements") -> tuple[nn.Module, Any]:
    model = net(seed)
    named = model.named_parameters()
    return model, ZeroRedundancyOptimizer(named, torch.optim.AdamW, policy=policy, lr=lr)


def by_torch(seed: int, lr: float) -> tuple[nn.Module, Any]:
    model = net(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


def by_ours(seed: int, lr: float) -> tuple[nn.Module, Any]:
    """Use only trained parameters: ours would have state for frozen ones, and torch saves none."""
    model = net(seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, TorchOptimizer(trained, adamw(lr=lr))


def by_fsdp2(seed: int, lr: float) -> tuple[nn.Module, Any]:
    model = net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


def by_owners(seed: int, lr: float) -> tuple[nn.Module, Any]:
    """Use AdamW, since its pointwise steps need only the state of a rank's own rows."""
    model = net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    trained = [param for param in model.named_parameters() if param[1].requires_grad]
    return model, MatrixOwnerOptimizer(trained, adamw(lr=lr))


KINDS = {
    "ZeRO": by_zero,
    "torch.optim": by_torch,
    "TorchOptimizer": by_ours,
    "FSDP2": by_fsdp2,
    "MatrixOwnerOptimizer": by_owners,
}
RANKS = {
    "ZeRO": (3, 2),
    "torch.optim": (1, 1),
    "TorchOptimizer": (1, 1),
    "FSDP2": (2, 3),
    "MatrixOwnerOptimizer": (3, 2),
}
"""Numbers of ranks that save, and that load."""


def never_stopped(steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return parameters and state of one process after this number of steps, by name."""
    model, optimizer = by_torch(0, LR)
    train(model, optimizer, range(steps))
    named = dict(model.named_parameters())
    states = {name: dict(optimizer.state[param]) for name, param in named.items()}
    return {name: param.detach() for name, param in named.items()}, states


def save(model: nn.Module, optimizer: Any, folder: str, group: Any = None) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, process_group=group)


def load(model: nn.Module, optimizer: Any, folder: str, group: Any = None, **options: Any) -> None:
    """Load in the way that torch's tutorial shows."""
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, process_group=group, **options)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def saves(kind: str, folder: str) -> None:
    model, optimizer = KINDS[kind](0, LR)
    train(model, optimizer, range(BEFORE))
    save(model, optimizer, folder)


def goes_on(kind: str, folder: str, *, partial: bool = False) -> None:
    """Load into a run with other weights and another rate, and compare it with the saved run.

    Args:
        kind: kind of the optimizer.
        folder: folder of the checkpoint.
        partial: True if the checkpoint lacks options.
    """
    model, optimizer = KINDS[kind](1, 7 * LR)
    load(model, optimizer, folder, planner=DefaultLoadPlanner(allow_partial_load=partial))
    assert optimizer.param_groups[0]["lr"] == LR
    check(model, optimizer, BEFORE)
    train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    check(model, optimizer, BEFORE + AFTER)


def passes_on(kind: str, folder: str, to: str, begins: int) -> None:
    """Load, make one step, check the result, and save to another folder."""
    model, optimizer = KINDS[kind](begins, 7 * LR)
    load(model, optimizer, folder)
    train(model, optimizer, range(begins, begins + 1))
    check(model, optimizer, begins + 1)
    save(model, optimizer, to)


def check(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Check parameters and state, bit for bit, against a run that never stopped."""
    params, states = never_stopped(steps)
    for name, param in model.named_parameters():
        assert same(whole(param), params[name]), (name, steps)
    saved = get_optimizer_state_dict(model, optimizer)["state"]
    seen = 0
    for name, entries in saved.items():
        for field, value in entries.items():
            wanted = states[name][field]
            seen += 1
            if isinstance(value, FlatRanges):
                assert value.shape == wanted.shape and value.dtype == wanted.dtype
                for start, one in value.ranges.items():
                    part = wanted.reshape(-1)[start : start + one.numel()]
                    assert same(one, part), (name, field)
            else:
                assert same(whole(value), wanted), (name, field)
    assert seen > 0


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def folder_of(base: Path, *names: object) -> str:
    return str(base / "-".join(map(str, names)))
