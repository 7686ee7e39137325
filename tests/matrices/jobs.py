"""What the ranks do: sharded models stepped by owners, beside one process."""

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, ema, muon, sgd
from sharding import MatrixOwnerOptimizer
from sharding.matrices.state_dict import SHARD
from tests.choices import case
from tests.tensors import normal

from .models import LR, OPTIMIZERS, Collectives, Pair, parts, plain, shard, whole, world

STEPS = 4
MATRIX, BIAS = "2.weight", "2.bias"


def as_one_process(names: Sequence[str], dtype: str = "float32") -> None:
    """Parameters and state, step by step; in two steps gradients are missing."""
    for name in names:
        with case(optimizer=name, dtype=dtype):
            pair = Pair(OPTIMIZERS[name](), world(), lambda: plain(getattr(torch, dtype)))
            for step in range(STEPS):
                pair.step(step, (MATRIX, BIAS) if step in (1, 2) else ())
                pair.check()


def on_replicas(names: Sequence[str]) -> list[list[str]]:
    """Replicas of shards: owners are in the sharded dimension, and replicas are alike."""
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
    """Two ranks of four, whose group ranks are others."""
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


def raised(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def collectives() -> None:
    """Two for all matrices, one more for each total, none for what is stepped by rows."""
    there_and_back = ["alltoall_base_", "alltoall_base_"]
    wanted = {
        "muon": there_and_back,
        "lamb": there_and_back,
        "clipped": ["alltoall_base_", "allreduce_", "alltoall_base_"],
        "finite, clipped": ["alltoall_base_", "allreduce_", "allreduce_", "alltoall_base_"],
        "pointwise": [],
    }
    for name, found in wanted.items():
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), world())
            for step in range(3):
                pair.backward(step)
                with Collectives() as seen:
                    pair.ours.step()
                assert seen.names == found


class Experts(nn.Module):
    """A stack of matrices, one for each expert, and a router."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(normal(5, 6, 4, seed=1))
        self.router = nn.Linear(4, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router = self.router(x)
        return (torch.einsum("emn,bn->bem", self.up, x) * router[..., None]).sum(-1)


def experts() -> None:
    """Each rank steps its experts without communication, as one process steps all of them."""
    for optimizer, matrices in {
        muon(lr=LR, batch_axes=1, iteration_dtype="float32"): {"router.weight"},
        muon(lr=LR, batch_axes=1): {"router.weight"},
    }.items():
        pair = Pair(_by_dimensions(optimizer), world(), lambda: Experts().to(torch.float32))
        assert {spec.path for spec in pair.ours.plan.specs} == matrices
        for step in range(STEPS):
            pair.step(step)
            pair.check()


def _by_dimensions(stacked: Any) -> Any:
    from functional_optim import partition

    return partition(
        {"stacks": stacked, "matrices": muon(lr=LR)},
        lambda path, shape: "stacks" if len(shape) == 3 else "matrices",
    )


def experts_alone() -> None:
    """A model of stacks alone takes no collective at all."""
    stack = distribute_tensor(normal(5, 6, 4, seed=1), world(), [Shard(0)])
    param = nn.Parameter(stack)
    optimizer = MatrixOwnerOptimizer([("up", param)], muon(lr=LR, batch_axes=1))
    for _ in range(2):
        param.grad = 2.0 * param.detach()
        with Collectives() as seen:
            optimizer.step()
        assert seen.names == []


def frozen_and_tied() -> None:
    """A frozen matrix takes no memory, and is stepped from its first gradient on."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.middle = nn.Linear(5, 5)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x).tanh()).tanh())

    def freeze_middle(model: nn.Module) -> None:
        model.get_submodule("middle").requires_grad_(False)

    def make() -> nn.Module:
        return Tied()

    for name in ("muon", "clipped", "accumulated"):
        with case(optimizer=name):
            pair = _whole_model(OPTIMIZERS[name](), make, freeze_middle)
            assert {spec.path for spec in pair.ours.plan.specs} == {"first.weight", "middle.weight"}
            middle = pair.model.get_parameter("middle.weight")
            for step in range(6):
                if step == 2:
                    for model in (pair.model, pair.twin):
                        model.get_submodule("middle").requires_grad_(True)
                has_state = bool(pair.ours.state.get(middle))
                assert not has_state or step > 2
                pair.step(step)
                _check_params(pair)
            owner = "middle.weight" in pair.ours._owners.owned()
            assert bool(pair.ours.state.get(middle)) == owner


def _whole_model(optimizer: Any, make: Any, prepare: Any) -> Pair:
    from torch.distributed.fsdp import fully_shard

    class OneUnit(Pair):
        pass

    from . import models

    before = models.shard

    def together(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(model, mesh=mesh)
        return model

    models.shard = together
    try:
        return OneUnit(optimizer, world(), make, prepare)
    finally:
        models.shard = before


def _check_params(pair: Pair) -> None:
    theirs = dict(pair.twin.named_parameters())
    for name, param in pair.model.named_parameters():
        assert torch.equal(whole(param), theirs[name].detach()), name


def scheduled() -> None:
    """Options of groups and torch's schedulers act at every step; weights may be written to."""
    from torch.optim.lr_scheduler import LambdaLR

    model, twin = shard(plain(), world()), plain()
    made = []
    for kind, one in ((MatrixOwnerOptimizer, model), (TorchOptimizer, twin)):
        named = list(one.named_parameters())
        matrices = [pair for pair in named if pair[1].dim() == 2]
        rest = [pair for pair in named if pair[1].dim() != 2]
        groups = [{"params": matrices, "lr": 0.02}, {"params": rest, "muon.lr": 0.5}][:1]
        optimizer = kind(groups, muon(lr=LR))
        made.append((one, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)))
        assert len(rest) == 4
    for step in range(3):
        for one, optimizer, scheduler in made:
            if step == 1:
                optimizer.param_groups[0]["momentum"] = 0.5
                with torch.no_grad():
                    one.get_parameter(MATRIX).mul_(2.0)
            for place, param in enumerate(optimizer.param_groups[0]["params"]):
                full = normal(*param.shape, seed=10 * step + place)
                is_cut = isinstance(param, DTensor)
                param.grad = (
                    distribute_tensor(full, param.device_mesh, param.placements) if is_cut else full
                )
            optimizer.step()
            scheduler.step()
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(a), b.detach()), name
    assert made[0][1].param_groups[0]["lr"] == 0.02 * 0.125


def added_group() -> None:
    """A later group gets owners of its own; a group that is refused changes nothing."""
    optimizer = OPTIMIZERS["lamb"]()
    model, twin = shard(plain(), world()), plain()
    ours = MatrixOwnerOptimizer([model.get_parameter(MATRIX)], optimizer)
    theirs = TorchOptimizer([twin.get_parameter(MATRIX)], optimizer)
    before = dict.fromkeys(ours._owners.owned())
    bad = nn.Parameter(distribute_tensor(normal(4, 4, seed=1), world(), [Shard(1)]))
    said = raised(ours.add_param_group, {"params": [bad], "lr": 0.1})
    assert "'0' is sharded over mesh" in said and "Shard(0) along one dimension" in said
    assert len(ours.param_groups) == 1
    for one, made in ((model, ours), (twin, theirs)):
        rest = [param for name, param in one.named_parameters() if name != MATRIX]
        made.add_param_group({"params": iter(rest), "lr": 0.5})
    assert before.keys() <= dict.fromkeys(ours._owners.owned()).keys()
    for step in range(2):
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        for place, (a, b) in enumerate(pairs):
            b.grad = normal(*b.shape, seed=10 * step + place)
            a.grad = distribute_tensor(b.grad, a.device_mesh, a.placements)
        ours.step()
        theirs.step()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(a), b.detach())


def saved(names: Sequence[str]) -> None:
    """Saved and loaded on each rank in the middle of a run, it is as if it never stopped."""
    for name in names:
        with case(optimizer=name):
            pair = Pair(OPTIMIZERS[name](), world())
            for step in range(3):
                pair.step(step)
            kept = io.BytesIO()
            torch.save(pair.ours.state_dict(), kept)
            kept.seek(0)
            found = torch.load(kept)
            other = MatrixOwnerOptimizer(pair.model.named_parameters(), OPTIMIZERS[name]())
            other.load_state_dict(found)
            whole_state = pair.theirs.state_dict()
            pair.ours = other
            for step in range(3, 6):
                pair.step(step)
                pair.check()
            _from_one_process(name, whole_state)


def _from_one_process(name: str, whole_state: dict[str, Any]) -> None:
    """The whole state of one process is taken part by part."""
    pair = Pair(OPTIMIZERS[name](), world())
    pair.ours.load_state_dict(whole_state)
    pair.theirs.load_state_dict(whole_state)
    for step in range(3, 6):
        pair.step(step)
        pair.check()


def from_dtensors() -> None:
    """State that a TorchOptimizer kept in DTensors is gone on from."""
    pair = Pair(OPTIMIZERS["lamb"](), world())
    before = TorchOptimizer(pair.model.named_parameters(), OPTIMIZERS["lamb"]())
    pair.backward(0)
    before.step()
    pair.theirs.step()
    for name, param in pair.model.named_parameters():  # norms over ranks round otherwise
        with torch.no_grad():
            twin = pair.twin.get_parameter(name).detach()
            param.copy_(distribute_tensor(twin, param.device_mesh, param.placements))
    pair.ours.load_state_dict(before.state_dict())
    for step in range(1, 3):
        pair.step(step)
        pair.check()


def of_another_rank() -> None:
    """State of another rank is refused, and so is what would save one rank's for all."""
    import copy

    pair = Pair(OPTIMIZERS["muon"](), world())
    pair.step(0)
    found = pair.ours.state_dict()
    entry = found["state"][SHARD]
    assert entry["owned"] == pair.ours._owners.owned()
    rank, size = dist.get_rank(), dist.get_world_size()
    for wrong in ({"rank": (rank + 1) % size}, {"ranks": size + 1}, {"owned": ["x"]}):
        other = {**found, "state": {**found["state"], SHARD: {**entry, **wrong}}}
        assert "each rank loads what the same rank" in raised(pair.ours.load_state_dict, other)
    with Collectives() as seen:
        said = raised(get_optimizer_state_dict, pair.model, pair.ours)
    assert "KeyError" in said and "torch.distributed.checkpoint cannot read" in said
    assert seen.names == []
    assert "cannot be copied or pickled" in raised(copy.deepcopy, pair.ours)
    pair.step(1)
    pair.check()


def evaluated() -> None:
    """Averages of matrices are at their owners; each rank has its rows of them."""
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


def refused() -> None:
    """Errors name the parameter and the rank, come on every rank, and change nothing."""
    pair = Pair(OPTIMIZERS["clipped"](), world())
    pair.step(0)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before = [whole(one).clone() for one in pair.model.parameters()]

    def check_unchanged() -> None:
        for old, now in zip(before, pair.model.parameters(), strict=True):
            assert torch.equal(old, whole(now))
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
    """What an owner fails by is raised there; the other ranks name it, and none of them waits."""
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


def not_finite() -> None:
    """All ranks leave a step out if one shard of a gradient holds NaN."""
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


def refused_meshes() -> None:
    """Tensor parallelism and other meshes are refused by name before anything is changed."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    flat = world()
    on_rows = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), flat, [Shard(0)]))
    on_columns = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), flat, [Shard(1)]))
    both = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), mesh, [Shard(0), Shard(1)]))
    elsewhere = nn.Parameter(distribute_tensor(normal(8, 4, seed=1), mesh["dp"], [Shard(0)]))
    layer = nn.Linear(4, 8, bias=False)
    from torch.distributed.fsdp import fully_shard

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


def beside_plain() -> None:
    """Plain parameters are stepped on every rank, and count once in totals."""
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
    """A parameter whose memory is replaced is followed."""
    pair = Pair(adamw(lr=LR), world())
    pair.step(0)
    for param in pair.model.parameters():
        local = param.detach().to_local()
        param._local_tensor = local.clone()
    pair.step(1)
    pair.check()
    assert sgd(lr=LR)
