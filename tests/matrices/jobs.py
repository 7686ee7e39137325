"""Jobs of the ranks: sharded models stepped by owners, compared with one process."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, ema, muon, partition
from sharding import MatrixBlocks, MatrixOwnerOptimizer, ParameterSpec, ShardPlan, plan
from sharding.matrices.exchange import RowExchange
from tests.choices import case
from tests.dtensors import cut_like, gather
from tests.tensors import normal

from .models import (
    LR,
    OPTIMIZERS,
    Collectives,
    Experts,
    Pair,
    Tied,
    parts,
    plain,
    raised,
    shard,
    shard_as_one,
    whole,
    world,
)

STEPS = 4
MATRIX, BIAS = "2.weight", "2.bias"
OF_A_SUM = ("send", "recv_", "broadcast_")
"""Operations of a sum over ranks."""


def as_one_process(names: Sequence[str], dtype: str = "float32") -> None:
    """Compare parameters and state after every step; in two steps gradients are missing."""
    for name in names:
        with case(optimizer=name, dtype=dtype):
            pair = Pair(OPTIMIZERS[name](), world(), lambda: plain(getattr(torch, dtype)))
            for step in range(STEPS):
                pair.step(step, (MATRIX, BIAS) if step in (1, 2) else ())
                pair.check()


def on_replicas(names: Sequence[str]) -> list[list[str]]:
    """Train replicas of shards; owners are in the sharded dimension, and replicas are equal."""
    size = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, size), mesh_dim_names=("replicate", "shard"))
    for name in names:
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), mesh)
            assert pair.ours.plan.world_size == size
            for step in range(STEPS):
                pair.step(step)
                pair.check()
    return pair.ours._owners.owned()


def on_subgroup(names: Sequence[str]) -> int | None:
    """Train two ranks of four, whose group ranks differ from their global ranks."""
    mesh = DeviceMesh("cpu", [1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    for name in names:
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), mesh)
            for step in range(STEPS):
                pair.step(step, (MATRIX,) if step == 1 else ())
                pair.check()
    pair.backward(STEPS)
    if dist.get_rank() == 3:
        pair.model.get_parameter(MATRIX).grad = None
    said = raised(pair.ours.step)
    assert f"{MATRIX!r} has no gradient on group rank 1 (global rank 3)" in said
    assert "has one on group rank 0 (global rank 1)" in said
    return int(pair.ours._owners.shards.rank)


def collectives() -> None:
    """Check that a step takes two collectives for all matrices, besides sums for totals.

    Parameters that are stepped by rows take none.
    """
    there_and_back = ["alltoall_base_", "alltoall_base_"]
    wanted = {
        "muon": there_and_back,
        "lamb": there_and_back,
        "clipped": there_and_back,
        "finite, clipped": there_and_back,
        "pointwise": [],
    }
    for name, found in wanted.items():
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), world())
            for step in range(3):
                pair.backward(step)
                with Collectives() as seen:
                    pair.ours.step()
                if "clipped" in name:  # it has totals
                    seen.names = [one for one in seen.names if one not in OF_A_SUM]
                assert seen.names == found


def overlapped() -> None:
    """Check that matrices are sent back before the other parameters are stepped."""
    for name in ("muon", "clipped"):
        pair = Pair(OPTIMIZERS[name](), world())
        for step in range(3):  # the first step has no plan yet
            pair.backward(step)
            rest = [one.tensor for one in pair.ours._stand_ins.by_tensor.values()]
            rest = [one for one in rest if not pair.ours._is_matrix(one)]
            before, seen = [one.clone() for one in rest], list[list[bool]]()
            scatter = RowExchange.scatter

            def noted(self: Any, *given: Any) -> Any:
                pairs = zip(rest, before, strict=True)  # noqa: B023  called in this turn
                seen.append([torch.equal(*pair) for pair in pairs])  # noqa: B023
                return scatter(self, *given)  # noqa: B023

            with case(optimizer=name, step=step):
                with mock.patch.object(RowExchange, "scatter", noted):
                    pair.ours.step()
                pair.theirs.step()
                pair.check()
                assert seen == [[True] * len(rest)]
                assert not any(map(torch.equal, rest, before))


def planned() -> str:
    """Return the digest of a plan of blocks that each rank makes, and that other ranks can read."""
    specs = [
        ParameterSpec("qkv", (24, 8), kind="per_matrix", blocks=MatrixBlocks(row_blocks=6)),
        ParameterSpec("up", (32, 8), kind="per_matrix"),
        ParameterSpec("embedding", (50, 8)),
    ]

    def rule(spec: ParameterSpec) -> Any:
        return muon() if spec.kind == "per_matrix" else adamw()

    made = plan(specs, dist.get_world_size(), "two_resource", rule)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, made.to_json())
    assert {ShardPlan.from_json(text).digest for text in texts} == {made.digest}
    return made.digest


def experts() -> None:
    """Check that each rank steps its experts itself, with the result of one process."""
    for optimizer in (
        muon(lr=LR, batch_axes=1, iteration_dtype="float32"),
        muon(lr=LR, batch_axes=1),
    ):
        pair = Pair(_by_dimensions(optimizer), world(), Experts)
        assert [spec.path for spec in pair.ours.plan.specs] == ["router.weight"]
        for step in range(STEPS):
            pair.step(step)
            pair.check()


def _by_dimensions(stacked: Any) -> Any:
    return partition(
        {"stacks": stacked, "matrices": muon(lr=LR)},
        lambda path, shape: "stacks" if len(shape) == 3 else "matrices",
    )


def experts_alone() -> None:
    """Check that a model of stacks alone takes no collective."""
    stack = distribute_tensor(normal(5, 6, 4, seed=1), world(), [Shard(0)])
    param = nn.Parameter(stack)
    optimizer = MatrixOwnerOptimizer([("up", param)], muon(lr=LR, batch_axes=1))
    for _ in range(2):
        param.grad = 2.0 * param.detach()
        with Collectives() as seen:
            optimizer.step()
        assert seen.names == []


def frozen_and_tied() -> None:
    """Check that a frozen matrix has no state, and is stepped from its first gradient on."""

    def train_middle(model: nn.Module, trained: bool = False) -> None:
        model.get_submodule("middle").requires_grad_(trained)

    for name in ("muon", "clipped", "accumulated"):
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), world(), Tied, train_middle, shard_as_one)
            assert {spec.path for spec in pair.ours.plan.specs} == {"first.weight", "middle.weight"}
            middle = pair.model.get_parameter("middle.weight")
            for step in range(6):
                if step == 2:
                    for model in (pair.model, pair.twin):
                        train_middle(model, trained=True)
                assert step > 2 or not pair.ours.state.get(middle)
                if step == 1:  # the state of a frozen matrix belongs to no rank
                    pair.ours.load_state_dict(pair.theirs.state_dict())
                pair.step(step)
                pair.check_params()
            owner = "middle.weight" in pair.ours._owners.owned()
            assert bool(pair.ours.state.get(middle)) == owner


def scheduled() -> None:
    """Check that group options, schedulers and writes to weights act at each step."""
    model, twin = shard(plain(), world()), plain()
    made = []
    for kind, one in ((MatrixOwnerOptimizer, model), (TorchOptimizer, twin)):
        matrices = [pair for pair in one.named_parameters() if pair[1].dim() == 2]
        groups = [{"params": matrices[:2], "lr": 0.02}, {"params": matrices[2:]}]
        optimizer = kind(groups, muon(lr=LR))
        made.append((one, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)))
    for step in range(3):
        for one, optimizer, scheduler in made:
            if step == 1:
                optimizer.param_groups[0]["momentum"] = 0.5
                with torch.no_grad():
                    one.get_parameter(MATRIX).mul_(2.0)
            every = [param for group in optimizer.param_groups for param in group["params"]]
            for place, param in enumerate(every):
                param.grad = cut_like(normal(*param.shape, seed=10 * step + place), param)
            optimizer.step()
            scheduler.step()
        for a, b in zip(gather(model.parameters()), twin.parameters(), strict=True):
            assert torch.equal(a, b)
    assert made[0][1].param_groups[0]["lr"] == 0.02 * 0.125


def added_group() -> None:
    """Check that a later group gets owners, and that a refused group changes nothing."""
    optimizer = OPTIMIZERS["lamb"]()
    model, twin = shard(plain(), world()), plain()
    ours = MatrixOwnerOptimizer([model.get_parameter(MATRIX)], optimizer)
    theirs = TorchOptimizer([twin.get_parameter(MATRIX)], optimizer)
    before = dict.fromkeys(ours._owners.owned())
    bad = nn.Parameter(distribute_tensor(normal(4, 4, seed=1), world(), [Shard(1)]))
    said = raised(ours.add_param_group, {"params": [bad], "lr": 0.1})
    assert "'0' is sharded over mesh" in said and "Shard(0) along one dimension" in said
    other = [param for name, param in model.named_parameters() if name != MATRIX]
    uneven = other[: 1 + dist.get_rank()]
    assert "ValueError: the ranks have different" in raised(
        ours.add_param_group, {"params": uneven}
    )
    assert len(ours.param_groups) == 1
    for one, made in ((model, ours), (twin, theirs)):
        rest = [param for name, param in one.named_parameters() if name != MATRIX]
        made.add_param_group({"params": iter(rest), "lr": 0.5})
    assert before.keys() <= dict.fromkeys(ours._owners.owned()).keys()
    for step in range(2):
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        for place, (a, b) in enumerate(pairs):
            b.grad = normal(*b.shape, seed=10 * step + place)
            a.grad = cut_like(b.grad, a)
        ours.step()
        theirs.step()
        for a, b in zip(gather(model.parameters()), twin.parameters(), strict=True):
            assert torch.equal(a, b)


def saved(names: Sequence[str]) -> None:
    """Check that a new optimizer continues from a state dict on the same ranks."""
    for name in names:
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), world())
            for step in range(3):
                pair.step(step)
            other = MatrixOwnerOptimizer(pair.model.named_parameters(), OPTIMIZERS[name]())
            other.load_state_dict(pair.ours.state_dict())
            whole_state = pair.theirs.state_dict()
            pair.ours = other
            for step in range(3, 6):
                pair.step(step)
                pair.check()
            _from_one_process(name, whole_state)


def _from_one_process(name: str, whole_state: dict[str, Any]) -> None:
    """Check that each rank takes its part of the state of one process."""
    pair = Pair(OPTIMIZERS[name](), world())
    pair.ours.load_state_dict(whole_state)
    pair.theirs.load_state_dict(whole_state)
    for step in range(3, 6):
        pair.step(step)
        pair.check()


def from_dtensors() -> None:
    """Check that the state of a TorchOptimizer over DTensors can be loaded."""
    pair = Pair(OPTIMIZERS["lamb"](), world())
    before = TorchOptimizer(pair.model.named_parameters(), OPTIMIZERS["lamb"]())
    pair.backward(0)
    before.step()
    pair.theirs.step()
    for name, param in pair.model.named_parameters():  # norms over ranks round differently
        with torch.no_grad():
            twin = pair.twin.get_parameter(name).detach()
            param.copy_(distribute_tensor(twin, param.device_mesh, param.placements))
    pair.ours.load_state_dict(before.state_dict())
    for step in range(1, 3):
        pair.step(step)
        pair.check()


def evaluated() -> None:
    """Check the averages for evaluation; each rank gets its rows from the owners."""
    pair = Pair(chain(parts(muon(lr=LR)), ema(0.5)), world())
    for step in range(3):
        pair.step(step)
    ours, theirs = pair.ours.view(), pair.theirs.view()
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert torch.equal(whole(one), theirs[name]), name
    before = [whole(one).clone() for one in pair.model.parameters()]
    with pair.ours.averaged(pair.model):
        for name, param in pair.model.named_parameters():
            assert torch.equal(whole(param), theirs[name]), name
    for old, now in zip(before, pair.model.parameters(), strict=True):
        assert torch.equal(old, whole(now))


def not_finite() -> None:
    """Check that all ranks skip a step if one shard of a gradient holds NaN."""
    pair = Pair(OPTIMIZERS["finite, clipped"](), world())
    for step in range(4):
        pair.backward(step)
        if step == 1:
            for model in (pair.model, pair.twin):
                grad = model.get_parameter(MATRIX).grad
                if not isinstance(grad, DTensor):
                    grad[:1] = float("nan")
                elif dist.get_rank() == 0:
                    grad.to_local()[:1] = float("nan")
        pair.ours.step()
        pair.theirs.step()
        pair.check()
    assert pair.ours.shared == pair.theirs.shared


def beside_plain() -> None:
    """Check that plain parameters are stepped on every rank, and count once in totals."""
    matrix, bias = normal(6, 4, seed=1), normal(4, seed=2)
    ours = {
        "w": nn.Parameter(distribute_tensor(matrix.clone(), world(), [Shard(0)])),
        "b": nn.Parameter(bias.clone()),
    }
    theirs = {"w": nn.Parameter(matrix.clone()), "b": nn.Parameter(bias.clone())}
    optimizer = chain(clip_by_global_norm(0.1), OPTIMIZERS["muon"]())
    a = MatrixOwnerOptimizer(ours.items(), optimizer)
    b = TorchOptimizer(theirs.items(), optimizer)
    for step in range(3):
        for name, param in theirs.items():
            param.grad = normal(*param.shape, seed=10 * step + param.dim())
            own = param.grad.clone()
            cut = name == "w"
            ours[name].grad = distribute_tensor(own, world(), [Shard(0)]) if cut else own
        a.step()
        b.step()
        for name, param in theirs.items():
            assert torch.equal(whole(ours[name]), param.detach()), name


def moved() -> None:
    """Check that a parameter is still stepped after its memory is replaced."""
    pair = Pair(adamw(lr=LR), world())
    pair.step(0)
    for param in pair.model.parameters():
        local = param.detach().to_local()
        param._local_tensor = local.clone()
    pair.step(1)
    pair.check()
