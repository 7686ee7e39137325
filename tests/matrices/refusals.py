"""Refusals on ranks: errors name parameters and ranks, and change nothing."""

import copy
import os
import pickle
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from functional_optim import NoState, Rule, adamw, chain, clip_by_global_norm, muon, partition
from sharding import MatrixOwnerOptimizer
from sharding.matrices import totals
from sharding.matrices.exchange import RowExchange
from tests.choices import case
from tests.dtensors import gather
from tests.tensors import normal
from tests.zero.dying import wait_for_others

from .models import (
    LR,
    OPTIMIZERS,
    Collectives,
    Pair,
    kind,
    raised,
    whole,
    world,
)

MATRIX, BIAS = "2.weight", "2.bias"
LOST = 1
"""The rank that is lost in a total."""


def of_another_rank() -> None:
    """Check that a part of the state of another rank or plan is refused, and cannot be pickled."""
    pair = Pair(OPTIMIZERS["muon"](), world())
    pair.step(0)
    with Collectives() as seen:
        found = pair.ours.state_dict()
    assert seen.names == []
    rank = dist.get_rank()
    for wrong in (f"rank {rank + 1} of", f"rank {rank} of {dist.get_world_size() + 1} with plan"):
        other = copy.copy(found)
        other["state"] = {key: dict(entries) for key, entries in found["state"].items()}
        first = next(entries for entries in other["state"].values() if entries)
        first["step"] = first["step"].clone()
        first["step"].origin = wrong
        said = raised(pair.ours.load_state_dict, other)
        assert f"group rank {rank} (global rank {rank}) was given a part of the state of '" in said
        assert wrong in said
    assert "a part of a state dict cannot be pickled" in raised(pickle.dumps, found)
    assert "cannot be copied or pickled" in raised(copy.deepcopy, pair.ours)
    pair.ours.load_state_dict(found)
    pair.step(1)
    pair.check()


def refused() -> None:
    """Check that errors name the parameter and the rank, come on every rank, and change nothing."""
    pair = Pair(OPTIMIZERS["clipped"](), world())
    pair.step(0)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before = gather(pair.model.parameters())

    def check_unchanged() -> None:
        for old, now in zip(before, gather(pair.model.parameters()), strict=True):
            assert torch.equal(old, now)
        for param in pair.model.parameters():
            assert int(pair.ours.state.get(param, {}).get("step", 1)) == 1

    for name in (MATRIX, BIAS):
        pair.backward(1)
        if rank == last:
            pair.model.get_parameter(name).grad = None
        said = raised(pair.ours.step)
        assert f"ValueError: the parameter at {name!r} has no gradient on group rank {last}" in said
        check_unchanged()
    pair.backward(1)
    if rank == last:
        pair.ours.param_groups[0]["lr"] = -1.0
    said = raised(pair.ours.step)
    assert "lr must be" in said if rank == last else f"group rank {last} (global" in said
    check_unchanged()
    if rank == last:
        pair.ours.param_groups[0]["lr"] = LR
    pair.ours.step()
    pair.theirs.step()
    pair.check()


def failing_owner() -> None:
    """Check that a failing owner raises its error, and that the other ranks name the owner."""
    for name in ("muon", "lamb", "clipped"):
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), world())
            pair.step(0)
            pair.backward(1)
            place = next(spec.path for spec in pair.ours.plan.specs)
            (ranks, _, _), *_ = pair.ours.plan.owners(place)
            if dist.get_rank() == ranks[0]:
                entries = pair.ours.state[pair.model.get_parameter(place)]
                entries[next(key for key in entries if key != "step")] = torch.ones(1)
            said = raised(pair.ours.step)
            owns = dist.get_rank() == ranks[0]
            assert place in said if owns else f"group rank {ranks[0]} (global" in said


class StepHyper(NamedTuple):
    lr: float


def failing_after_sending() -> None:
    """Let a rank fail after it has sent matrices.

    The rank raises its error at once, and the other ranks raise one in the next step.
    """
    victim, fails = dist.get_world_size() - 1, list[bool]()

    def rule(param: Tensor, grad: Tensor, state: NoState, c: StepHyper) -> tuple[Tensor, NoState]:
        if fails:
            raise RuntimeError("no memory is left")
        return param - c.lr * grad, state

    descent = chain(Rule(name="descent", hyper=StepHyper, rule=rule)(lr=LR))
    parts = {"matrices": muon(lr=LR), "rest": descent}
    pair = Pair(partition(parts, kind).using(executor="reference"), world())
    pair.step(0)
    pair.backward(1)
    scatter = RowExchange.scatter

    def then_fails(*given: Any) -> Any:
        found = scatter(*given)
        fails.extend([True] * (dist.get_rank() == victim))
        return found

    with mock.patch.object(RowExchange, "scatter", then_fails):
        if dist.get_rank() == victim:
            assert "no memory is left" in raised(pair.ours.step)
        else:
            pair.ours.step()
    fails.clear()
    pair.theirs.step()
    for name, param in pair.model.named_parameters():
        if name in {spec.path for spec in pair.ours.plan.specs}:
            assert torch.equal(whole(param), pair.twin.get_parameter(name).detach())
    pair.backward(2)
    said = raised(pair.ours.step)
    is_victim = dist.get_rank() == victim
    assert "no memory is left" in said if is_victim else f"group rank {victim} (global" in said


def mended() -> None:
    """Check that training continues after a failed step that sends no matrix."""
    pair = Pair(OPTIMIZERS["pointwise"](), world())
    pair.step(0)
    pair.backward(1)
    pair.ours.param_groups[0]["lr"] = -1.0
    assert "lr must be" in raised(pair.ours.step)
    pair.ours.param_groups[0]["lr"] = LR
    pair.ours.step()
    pair.theirs.step()
    pair.check()


def refused_meshes() -> None:
    """Check that tensor parallelism and other meshes are refused by name before any change."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    flat = world()
    on_rows = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), flat, [Shard(0)]))
    on_columns = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), flat, [Shard(1)]))
    both = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), mesh, [Shard(0), Shard(1)]))
    elsewhere = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), mesh["dp"], [Shard(0)]))
    layer = nn.Linear(4, 8, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["dp"])

    def make(**params: nn.Parameter) -> str:
        return raised(MatrixOwnerOptimizer, params.items(), muon(lr=LR))

    taken = "takes Shard(0) along one dimension of a mesh"
    for wrong in (on_columns, both, layer.weight):
        said = make(good=on_rows, wrong=wrong)
        assert "ValueError: the parameter at 'wrong' is sharded over mesh" in said
        assert taken in said and "tensor parallelism" in said
    said = make(good=on_rows, other=elsewhere)
    assert "'other' is sharded over mesh" in said and "'good' over mesh" in said
    said = make(alone=nn.Parameter(normal(4, 4, seed=1)))
    assert "none of 1 parameters is a sharded DTensor" in said and "fully_shard" in said
    said = raised(MatrixOwnerOptimizer, [("w", on_rows)], muon(lr=LR), policy="elements")
    assert "ValueError" in said
    part = normal(2 if dist.get_rank() else 1, 4, seed=1)
    other = DTensor.from_local(part, flat, [Shard(0)], shape=(8, 4), stride=(4, 1))
    said = make(w=nn.Parameter(other))
    assert "group rank 0" in said and "rows 0 to 2 are expected" in said


def lost_in_a_total(*, dies: bool) -> str:
    """Let a rank die before a total, or not come, and return the error of the other ranks.

    The chain is pointwise, so the total is the first collective of the step.
    """
    pair = Pair(chain(clip_by_global_norm(0.1), adamw(lr=LR)), world())
    pair.step(0)
    pair.backward(1)

    def leaves(*_: Any) -> None:
        if dies:
            os._exit(0)
        raise KeyboardInterrupt

    if dist.get_rank() == LOST:
        mock.patch.object(totals, "_local_addends", leaves).start()
    error = raised(pair.ours.step)
    wait_for_others(LOST)
    return error
