"""Jobs of the ranks that compare training with torch's own class and with one process."""

import copy
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from functional_optim import TorchOptimizer, if_any
from sharding import POLICIES, ZeroRedundancyOptimizer
from tests.zero_local.compare import difference, differing, digest

from .towers import (
    CHAINS,
    CLASSES,
    KINDS,
    Halving,
    Tower,
    both,
    data,
    groups_of,
    made,
    plain,
    raised,
    tower,
)


def beside_core(chain_name: str, policy: str, views: bool, kind: str) -> str:
    """Train under DDP and compare the parameters of every step with one process."""
    model, optimizer = KINDS[kind], CHAINS[chain_name]
    ddp = DistributedDataParallel(made(model), find_unused_parameters=True, bucket_cap_mb=0.02)
    taken: Any = policy
    # Schedule-Free's averaging weights are shared by all parameters, and depend on lr.
    option = "weight_decay" if chain_name.startswith("schedule-free") else "lr"
    if policy == "hierarchical":
        taken = functools.partial(POLICIES[policy], node_size=2, within="elements")
    zero = ZeroRedundancyOptimizer(
        groups_of(ddp.module, option), optimizer, parameters_as_bucket_view=views, policy=taken
    )
    stepper = optimizer
    own: dict[str, Any] = {option: 0.03}
    for name, param in zero.params.items():
        if param.dim() <= 1:
            stepper = stepper.override(if_any((name,)), **own)  # a frozen parameter matches nothing
    params = {n: p.detach().clone() for n, p in zero.params.items() if p.requires_grad}
    state = stepper.init(params)
    before = digest(zero.params.values())
    for step in range(3):
        ddp(data(model, dist.get_rank(), step)).square().sum().backward()
        grads = {name: zero.params[name].grad for name in params}
        grads = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        zero.step()
        params, state = stepper.update(params, grads, state)
        assert differing({name: zero.params[name] for name in params}, params) == [], step
        zero.zero_grad()
        assert all(param.grad is None for param in zero.params.values())
    after = digest(zero.params.values())
    assert after != before
    return after


def beside_torch(name: str, views: bool, groups: bool) -> None:
    """Check that partition, parameters, state dict and options are those of torch's class."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    cls, options = CLASSES[name]
    ours, theirs = (DistributedDataParallel(made(), find_unused_parameters=True) for _ in range(2))

    def parameters(module: nn.Module) -> Any:
        if not groups:
            return list(module.parameters())
        return [{**g, "params": [p for _, p in g["params"]]} for g in groups_of(module)]

    zero = ZeroRedundancyOptimizer(
        parameters(ours.module), cls, parameters_as_bucket_view=views, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch's own class takes only one group with bucket views.
        other = TorchZero(
            parameters(theirs.module),
            cls,
            parameters_as_bucket_view=views,
            foreach=False,
            **options,
        )
    rank = dist.get_rank()
    for step in range(3):
        for ddp, optimizer in ((ours, zero), (theirs, other)):
            ddp(data(Tower, rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    mine, their = (dict(one.module.named_parameters()) for one in (ours, theirs))
    assert differing(mine, their) == []
    names = {id(param): name for named in (mine, their) for name, param in named.items()}
    partition = [
        sorted(names[id(param)] for group in part for param in group["params"])
        for part in other._partition_parameters()
    ]
    owned = [
        sorted(names[id(zero.params[one.path])] for one in zero.plan.owned(place))
        for place in range(dist.get_world_size())
    ]
    assert owned == partition
    sizes = [[len(g["params"]) for g in one.optim.param_groups] for one in (zero, other)]
    assert sizes[0] == sizes[1]
    for one in (zero, other):
        one.consolidate_state_dict(to=0)
    assert rank or difference(zero.state_dict(), other.state_dict()) == []


def uneven(name: str, policy: str, schedule: bool) -> str:
    """Compare ranks that run out of data one after the other with a plain optimizer.

    The plain optimizer is compared on the last rank, which runs out of data last.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp, twin = (DistributedDataParallel(made(), find_unused_parameters=True) for _ in "ab")
    if name in CHAINS:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), CHAINS[name], policy=policy)
        other: Any = TorchOptimizer(twin.parameters(), CHAINS[name])
    else:
        cls, options = CLASSES[name]
        zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, policy=policy, **options)
        other = cls(twin.parameters(), foreach=False, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (zero, other)]
    for net, optimizer, scheduler, joined in (
        (ddp, zero, schedulers[0], [ddp, zero]),
        (twin, other, schedulers[1], [twin]),
    ):
        with warnings.catch_warnings(), Join(joined):
            for step in range(2 + 2 * rank):
                net(data(Tower, rank, step)).square().sum().backward()
                frozen = net.module.frozen.bias  # frozen during training, with a gradient left
                frozen.grad = torch.full_like(frozen, 0.5)
                if optimizer is zero:
                    zero.clip_grad_norm_(1e6)
                optimizer.step()
                optimizer.zero_grad()
                if schedule:
                    scheduler.step()
    if rank == size - 1:
        assert differing(dict(ddp.named_parameters()), dict(twin.named_parameters())) == []
    return digest(zero.params.values())


def goes_on_after_uneven() -> None:
    """Check that a rank without data does not keep the gradients of other ranks."""
    rank, lr = dist.get_rank(), {"lr": 0.05}
    ddp, twin = (DistributedDataParallel(made(), find_unused_parameters=True) for _ in "ab")
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, policy="elements", **lr)
    other = torch.optim.SGD(twin.parameters(), foreach=False, **lr)
    for net, optimizer, joined in ((ddp, zero, [ddp, zero]), (twin, other, [twin])):
        for steps in (range(1 + rank), range(3, 5)):
            with warnings.catch_warnings(), Join(joined):
                for step in steps:
                    net(data(Tower, rank, step)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert differing(dict(ddp.named_parameters()), dict(twin.named_parameters())) == []


def on_subgroup(name: str) -> list[int] | None:
    """Train two of four ranks, whose group ranks differ from their global ranks."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    _, zero = tower(name, group)
    reference = made()
    other = plain(name, reference)
    both(zero, other, reference, range(2))
    zero.consolidate_state_dict(to=1)
    if zero.rank == 1:
        assert difference(zero.state_dict(), other.state_dict()) == []
    assert "0 to 1, got 3" in raised(zero.consolidate_state_dict, 3)
    return [zero.rank, zero.global_rank, zero.world_size]


def on_mesh() -> int:
    """Train over one dimension of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    _, zero = tower("adamw", mesh["inner"], "elements")
    reference = made()
    both(zero, plain("adamw", reference), reference, range(2))
    assert "the mesh has 2" in raised(tower, "adamw", mesh)
    return zero.world_size


def _sharded(name: str, policy: str) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    ddp = DistributedDataParallel(made(), find_unused_parameters=True)
    kind, options = CLASSES.get(name, (CHAINS.get(name, Halving), {}))
    params = [(at, param) for at, param in ddp.named_parameters() if param.requires_grad]
    return ddp, ZeroRedundancyOptimizer(params, kind, policy=policy, **options)


def _trained(ddp: nn.Module, zero: ZeroRedundancyOptimizer, steps: range) -> None:
    for step in steps:
        ddp(data(Tower, dist.get_rank(), step)).square().sum().backward()
        zero.step()
        zero.zero_grad()


def asked_for_its_state(name: str, policy: str, steps: int) -> str:
    """Check that torch.distributed.checkpoint gets the state without a step."""
    rank = dist.get_rank()
    ddp, zero = _sharded(name, policy)
    _trained(ddp, zero, range(steps))

    def seen() -> list[Any]:
        options = [{k: v for k, v in one.items() if k != "params"} for one in zero.param_groups]
        states = [dict(zero.state[param]) for param in zero.params.values()]
        grads = [param.grad is None for param in zero.params.values()]
        return copy.deepcopy([list(zero.params.values()), options, states, grads])

    before = seen()
    if name == "foreign":
        assert "call consolidate_state_dict" in raised(get_optimizer_state_dict, ddp, zero)
    else:
        assert get_optimizer_state_dict(ddp, zero)["state"].keys() == {
            at.removeprefix("module.") for at in zero.params
        }
    assert difference(seen(), before) == []
    zero.consolidate_state_dict(to=1)
    shared: list[Any] = [None]
    if rank == 1:
        shared = [get_optimizer_state_dict(ddp, zero)]
        assert steps == 0 or bool(shared[0]["state"]) == (name != "sgd")
    else:
        assert "consolidate_state_dict(to=0)" in raised(get_optimizer_state_dict, ddp, zero)
    assert difference(seen(), before) == []
    dist.broadcast_object_list(shared, 1)

    other, loaded = _sharded(name, policy)
    other.load_state_dict(ddp.state_dict())
    # Unused parameters have no momentum, and torch accepts such a state only if not strict.
    set_optimizer_state_dict(other, loaded, shared[0], options=StateDictOptions(strict=False))
    for one in ((ddp, zero), (other, loaded)):
        _trained(*one, range(steps, steps + 3))
    assert differing(dict(ddp.named_parameters()), dict(other.named_parameters())) == []
    return digest(zero.params.values())
