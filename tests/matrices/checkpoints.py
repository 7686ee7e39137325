"""Runs of MatrixOwnerOptimizer that stop and continue through torch.distributed.checkpoint."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from functional_optim import TorchOptimizer, adamw
from sharding import MatrixOwnerOptimizer, ZeroRedundancyOptimizer
from tests.choices import case
from tests.distributed_checkpoint import runs
from tests.distributed_checkpoint.runs import save
from tests.dtensors import cut_like, gather
from tests.tensors import normal

from .models import LR, OPTIMIZERS, plain, shard, whole, world

BEFORE = 2
"""Number of steps before the first save."""


def owned(name: str, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """Return a sharded model and its optimizer; the weights differ from the saved ones."""
    model = plain()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    model = shard(model, mesh)
    return model, MatrixOwnerOptimizer(model.named_parameters(), OPTIMIZERS[name]())


def alone(name: str) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer for one process."""
    model = plain()
    return model, TorchOptimizer(model.named_parameters(), OPTIMIZERS[name]())


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Train with gradients that do not depend on the ranks; in step 1 some are missing."""
    for step in steps:
        for place, (name, param) in enumerate(model.named_parameters()):
            grad = cut_like(normal(*param.shape, seed=100 * step + place), param)
            param.grad = None if step == 1 and name.startswith("2.") else grad
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def _trained_alone(name: str, steps: int) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer after steps of an uninterrupted run of one process."""
    twin, other = alone(name)
    train(twin, other, range(steps))
    return twin, other


def check(model: nn.Module, optimizer: Any, name: str, steps: int) -> None:
    """Check that parameters, state and options match an uninterrupted run of one process."""
    twin, other = _trained_alone(name, steps)
    theirs = dict(twin.named_parameters())
    wholes = gather(model.parameters())
    for (path, param), one in zip(model.named_parameters(), wholes, strict=True):
        assert torch.equal(one, theirs[path]), path
        wanted = other.state[theirs[path]]
        found = optimizer.state[param]
        assert not found or found.keys() == wanted.keys(), path
        start = 0
        if isinstance(param, DTensor) and found and path not in _matrices(optimizer):
            shards = optimizer._owners.shards
            start = shards.rows(param.shape[0])[shards.rank][0]
        for key, value in found.items():
            expected = wanted[key]
            if value.shape != expected.shape:
                expected = expected[start : start + value.shape[0]]
            assert torch.equal(value, expected), (path, key)
    for group, wanted_group in zip(optimizer.param_groups, other.param_groups, strict=True):
        for key, value in wanted_group.items():
            assert key == "params" or group[key] == value, key


def _matrices(optimizer: Any) -> set[str]:
    found: set[str] = optimizer._owners.matrices()
    return found


def load(model: nn.Module, optimizer: Any, folder: str, group: Any = None) -> None:
    planner = DefaultLoadPlanner(allow_partial_load=has_names_in_groups(optimizer))
    runs.load(model, optimizer, folder, group, planner=planner)


def has_names_in_groups(optimizer: Any) -> bool:
    """Return True if groups have names, which sharded checkpoints lack."""
    return not isinstance(optimizer, MatrixOwnerOptimizer)


def saves(names: Sequence[str], folder: str) -> None:
    for name in names:
        with case(optimizer=name):
            model, optimizer = owned(name, world())
            model.load_state_dict(
                {
                    key: cut_like(value, model.get_parameter(key))
                    for key, value in plain().state_dict().items()
                }
            )
            train(model, optimizer, range(BEFORE))
            check(model, optimizer, name, BEFORE)
            save(model, optimizer, str(Path(folder, name)))


def passes_on(names: Sequence[str], folder: str, to: str, begins: int, copies: int = 1) -> None:
    """Load on other ranks, check, make a step, check, and save."""
    size = dist.get_world_size()
    names_of_mesh = {"mesh_dim_names": ("replicate", "shard")}
    grid = (copies, size // copies)
    mesh = init_device_mesh("cpu", grid, **names_of_mesh) if copies > 1 else world()
    for name in names:
        with case(optimizer=name):
            model, optimizer = owned(name, mesh)
            load(model, optimizer, str(Path(folder, name)))
            check(model, optimizer, name, begins)
            train(model, optimizer, range(begins, begins + 1))
            check(model, optimizer, name, begins + 1)
            save(model, optimizer, str(Path(to, name)))


def passes_on_alone(names: Sequence[str], folder: str, to: str, begins: int) -> None:
    """Load in one process with a TorchOptimizer, check, make a step, check, and save."""
    for name in names:
        with case(optimizer=name):
            model, optimizer = alone(name)
            load(model, optimizer, str(Path(folder, name)))
            check(model, optimizer, name, begins)
            train(model, optimizer, range(begins, begins + 1))
            check(model, optimizer, name, begins + 1)
            save(model, optimizer, str(Path(to, name)))


def loads_values_alone(folder: str) -> None:
    """Load 8-bit state of owners into optimizers without storages, which get float32 values."""
    twin, kept = alone("8 bits")
    train(twin, kept, range(BEFORE))
    wanted = get_optimizer_state_dict(twin, kept)["state"]
    readers: dict[str, Any] = {
        "torch": lambda params: torch.optim.AdamW(params, lr=LR),
        "ours": lambda params: TorchOptimizer(params, adamw(lr=LR)),
        "ZeRO": lambda params: ZeroRedundancyOptimizer(params, adamw(lr=LR)),
    }
    for kind, reader in readers.items():
        with case(reader=kind):
            model = plain()
            optimizer = reader(model.parameters())
            load(model, optimizer, str(Path(folder, "8 bits")))
            for name, param in model.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(optimizer.state[param][key], wanted[name][key]), name
                    assert wanted[name][key].dtype == torch.float32


def on_subgroup(names: Sequence[str], folder: str, begins: int) -> None:
    """Load a checkpoint on two ranks of four, whose group ranks differ from the global ranks."""
    mesh = DeviceMesh("cpu", [1, 3])
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    for name in names:
        with case(optimizer=name):
            model, optimizer = owned(name, mesh)
            load(model, optimizer, str(Path(folder, name)), group)
            check(model, optimizer, name, begins)
            train(model, optimizer, range(begins, begins + 1))
            check(model, optimizer, name, begins + 1)


THAWED = "2.weight"
"""The matrix that is frozen at first."""


def set_frozen(models: Sequence[nn.Module], *, frozen: bool) -> None:
    for model in models:
        model.get_parameter(THAWED).requires_grad_(not frozen)


def step_trainable(pairs: Sequence[tuple[nn.Module, Any]], steps: range) -> None:
    """Train models and their optimizers, without gradients of frozen parameters."""
    for model, optimizer in pairs:
        for step in steps:
            for place, param in enumerate(model.parameters()):
                if param.requires_grad:
                    param.grad = cut_like(normal(*param.shape, seed=100 * step + place), param)
            optimizer.step()
            optimizer.zero_grad()


def thaws(folder: str) -> None:
    """Load state of a matrix into an optimizer that was made while the matrix was frozen."""
    for how in ("checkpoint", "checkpoint without a step", "part", "whole", "frozen again"):
        with case(how=how):
            made: list[tuple[nn.Module, Any]] = []
            for kind in (MatrixOwnerOptimizer, MatrixOwnerOptimizer, TorchOptimizer):
                model = plain()
                set_frozen([model], frozen=True)
                model = model if kind is TorchOptimizer else shard(model, world())
                made.append((model, kind(model.named_parameters(), OPTIMIZERS["muon"]())))
            (model, optimizer), (other, again), (twin, alone_) = made
            stop = _train_thawed(how, [made[0], made[2]])
            if how.startswith("checkpoint"):
                set_frozen([other], frozen=False)
                save(model, optimizer, str(Path(folder, how)))
                load(other, again, str(Path(folder, how)))
            else:
                saved = alone_ if how == "whole" else optimizer
                again.load_state_dict(saved.state_dict())
            with torch.no_grad():
                for param, value in zip(other.parameters(), model.parameters(), strict=True):
                    param.copy_(value)
            set_frozen([other, twin], frozen=False)
            step_trainable(made[1:], range(stop, stop + 2))
            for param, wanted in zip(gather(other.parameters()), twin.parameters(), strict=True):
                assert torch.equal(param, wanted)


def _train_thawed(how: str, pairs: Sequence[tuple[nn.Module, Any]]) -> int:
    """Thaw the matrix after a step, and train it, except without a step. Return the step count."""
    models = [model for model, _ in pairs]
    step_trainable(pairs, range(1))
    set_frozen(models, frozen=False)
    if how == "checkpoint without a step":
        return 1
    step_trainable(pairs, range(1, 3))
    if how != "frozen again":
        return 3
    set_frozen(models, frozen=True)
    step_trainable(pairs, range(3, 4))
    return 4


def in_the_background(folder: str) -> None:
    """Check that ``async_save`` saves the state at its call while training continues."""
    model, optimizer = owned("soap", world())
    train(model, optimizer, range(BEFORE))
    wanted = {name: whole(param).clone() for name, param in model.named_parameters()}
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    done = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    train(model, optimizer, range(BEFORE, BEFORE + 2))
    done.result()
    other, again = owned("soap", world())
    with torch.no_grad():
        for name, param in other.named_parameters():
            param.copy_(distribute_tensor(wanted[name], param.device_mesh, param.placements))
    state = {"optim": get_optimizer_state_dict(other, again)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other, again, state["optim"])
    train(other, again, range(BEFORE, BEFORE + 2))
    for (name, param), one in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(param), whole(one)), name
