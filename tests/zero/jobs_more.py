"""What the ranks do: state dicts, groups that are added, uneven inputs, scalers, sub-groups."""

import copy
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from sharding import ZeroRedundancyOptimizer

from .jobs import CLASSES, difference, differing, digest, groups_of
from .models import Tower, data, gradients, made


def give(zero: ZeroRedundancyOptimizer, step: int) -> None:
    """The same gradients on every rank, as after a reduction."""
    grads = gradients(zero.params, step)
    for name, param in zero.params.items():
        param.grad = grads[name] if param.requires_grad else None


def tower(name: str, policy: str = "greedy", views: bool = False, **more: Any) -> Any:
    """A sharded optimizer over a new model, and the model."""
    cls, options = CLASSES[name]
    module = made(Tower)
    zero = ZeroRedundancyOptimizer(
        groups_of(module), cls, policy=policy, parameters_as_bucket_view=views, **options, **more
    )
    return module, zero


def plain(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """torch's own optimizer over the same groups."""
    cls, options = CLASSES[name]
    return cls(groups_of(module), foreach=False, **options)


def both(zero: Any, other: torch.optim.Optimizer, module: nn.Module, steps: range) -> list[str]:
    """Step a sharded and a plain optimizer alike; the parameters that then differ."""
    theirs = dict(module.named_parameters())
    for step in steps:
        give(zero, step)
        for name, param in theirs.items():
            grad = zero.params[name].grad
            param.grad = None if grad is None else grad.clone()
        zero.step()
        other.step()
    return differing(zero.params, theirs)


def state_dicts(name: str, policy: str, views: bool) -> dict[str, Any]:
    """Sharded to plain, plain to sharded, sharded to another policy; each then goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to = size - 1
    _, zero = tower(name, policy, views)
    reference = made(Tower)
    other = plain(name, reference)
    seen: dict[str, Any] = {"before": both(zero, other, reference, range(3))}
    seen["refused"] = "consolidate_state_dict" in raised(zero.state_dict)
    zero.consolidate_state_dict(to=to)
    if rank == to:
        found = zero.state_dict()
        seen["same"] = difference(found, other.state_dict())
        again = plain(name, made(Tower))
        again.load_state_dict(copy.deepcopy(found))
        seen["loaded"] = difference(again.state_dict(), other.state_dict())
    else:
        seen["elsewhere"] = "consolidate_state_dict" in raised(zero.state_dict)
    # From the plain optimizer into a new sharded one, of another policy.
    given = other.state_dict()
    given["param_groups"][0]["lr"] = other.param_groups[0]["lr"] = 0.5
    kept = copy.deepcopy(given)
    module, second = tower(name, "elements" if policy == "greedy" else "greedy", not views)
    module.load_state_dict(reference.state_dict())
    second.load_state_dict(given)
    seen["untouched"] = difference(given, kept)
    seen["lr"] = second.param_groups[0]["lr"], second.optim.param_groups[0]["lr"]
    seen["after"] = both(second, other, reference, range(3, 6))
    seen["digest"] = digest(second.params)
    return seen


def raised(function: Any, *arguments: Any, **named: Any) -> str:
    """What a call raises: ``Type: text``."""
    try:
        function(*arguments, **named)
    except Exception as error:  # noqa: BLE001  the test says which it should be
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Halving(torch.optim.Optimizer):
    """A class that nobody knows, with a state that is not only tensors."""

    def __init__(self, params: Any, lr: float = 0.1, tricks: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(params, {"lr": lr, "tricks": tricks})

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["mean"] = 0.5 * state.get("mean", 0) + param.grad
                    state["log"] = [*state.get("log", []), {"scale": scale, "step": None}]
                    with torch.no_grad():
                        param.sub_(state["mean"], alpha=group["lr"] * scale)
        return loss


def foreign(views: bool) -> dict[str, Any]:
    """A class without a functional equivalent."""
    module, reference = made(Tower), made(Tower)
    zero = ZeroRedundancyOptimizer(
        groups_of(module), Halving, parameters_as_bucket_view=views, lr=0.2
    )
    other = Halving(groups_of(reference), lr=0.2)
    theirs = dict(reference.named_parameters())
    losses = []
    for step in range(3):
        give(zero, step)
        for name, param in theirs.items():
            param.grad = zero.params[name].grad
        losses.append(zero.step(lambda: 7.0, scale=2.0))
        other.step(scale=2.0)
    zero.param_groups[0]["lr"] = 0.4
    other.param_groups[0]["lr"] = 0.4
    give(zero, 9)
    for name, param in theirs.items():
        param.grad = zero.params[name].grad
    zero.step()
    other.step()
    zero.consolidate_state_dict(to=0)
    seen = {
        "wrong": differing(zero.params, theirs),
        "losses": losses,
        "added": [group.get("seen") for group in zero.param_groups],
        "ranges": raised(zero.step_owned, {}),
        "save": raised(zero.save, "/nowhere"),
    }
    if dist.get_rank() == 0:
        found = zero.state_dict()
        seen["state"] = difference(found, other.state_dict())
        third = Halving(groups_of(made(Tower)))
        third.load_state_dict(found)
    fourth = ZeroRedundancyOptimizer(groups_of(made(Tower)), Halving)
    fourth.load_state_dict(other.state_dict())
    fourth.consolidate_state_dict()
    if dist.get_rank() == 0:
        seen["again"] = difference(fourth.state_dict(), other.state_dict())
    return seen


def added(name: str, policy: str, views: bool) -> dict[str, Any]:
    """A group that is added later; what was owned stays where it was."""
    cls, options = CLASSES[name]
    module, reference = made(Tower), made(Tower)
    first, second = groups_of(module)
    zero = ZeroRedundancyOptimizer(
        [first], cls, policy=policy, parameters_as_bucket_view=views, **options
    )
    one, two = groups_of(reference)
    other = cls([one], foreach=False, **options)
    theirs = dict(reference.named_parameters())
    wrong = []
    before = zero.owned
    for step in range(4):
        if step == 2:
            seen = raised(zero.add_param_group, dict(second, lr=-1.0))
            same = zero.owned == before and len(zero.param_groups) == 1
            zero.add_param_group(dict(second, params=iter(second["params"])))
            other.add_param_group(two)
        give(zero, step)
        for path, param in zero.params.items():
            theirs[path].grad = None if param.grad is None else param.grad.clone()
        zero.step()
        other.step()
        wrong += differing(zero.params, theirs)
    zero.consolidate_state_dict(to=0)
    state = difference(zero.state_dict(), other.state_dict()) if dist.get_rank() == 0 else []
    return {
        "wrong": wrong,
        "kept": zero.owned[: len(before)] == before,
        "groups": len(zero.optim.param_groups),
        "refused": seen,
        "unchanged": same,
        "state": state,
    }


def thawed(name: str, policy: str, views: bool) -> dict[str, Any]:
    """Parameters that are frozen and thawed while training goes on."""
    _, zero = tower(name, policy, views)
    reference = made(Tower)
    other = plain(name, reference)
    theirs = dict(reference.named_parameters())
    wrong = []
    for step in range(6):
        for number, (path, param) in enumerate(zero.params.items()):
            trainable = (step // 2 + number) % 3 != 0
            param.requires_grad_(trainable)
            theirs[path].requires_grad_(trainable)
        wrong += both(zero, other, reference, range(step, step + 1))
    return {"wrong": wrong, "digest": digest(zero.params)}


def scheduled(views: bool) -> dict[str, Any]:
    """A scheduler that changes lr and momentum at every step, and accumulated gradients."""
    ddp, twin = (DistributedDataParallel(made(Tower), find_unused_parameters=True) for _ in "ab")
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, lr=0.01
    )
    other = torch.optim.AdamW(twin.parameters(), lr=0.01, foreach=False)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=6) for one in (zero, other)
    ]
    wrong: list[str] = []
    rates = []
    for step in range(5):
        for net, optimizer, scheduler in zip((ddp, twin), (zero, other), schedulers, strict=True):
            with net.no_sync():
                net(data(Tower, dist.get_rank(), 50 + step)).square().sum().backward()
            net(data(Tower, dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        rates.append(zero.param_groups[0]["lr"])
        wrong += differing(dict(ddp.named_parameters()), dict(twin.named_parameters()))
    return {"wrong": wrong, "rates": rates, "digest": digest(zero.params)}


def clipped(policy: str, norm_type: float) -> dict[str, Any]:
    """Clipped by this class, and by torch."""
    _, zero = tower("sgd", policy)
    reference = dict(made(Tower).named_parameters())
    give(zero, 1)
    for name, param in reference.items():
        grad = zero.params[name].grad
        param.grad = None if grad is None else grad.double()[...].to(param.dtype).clone()
    norm = zero.clip_grad_norm_(0.3, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(reference.values(), 0.3, norm_type, foreach=False)
    errors = [
        float((zero.params[n].grad - p.grad).abs().max() / p.grad.abs().max().clamp_min(1e-30))
        for n, p in reference.items()
        if p.grad is not None and p.grad.numel()
    ]
    low = zero.clip_grad_norm_(1e9, norm_type)
    for param in zero.params.values():
        if param.grad is not None:
            param.grad[...] = math.nan
            break
    return {
        "norm": [float(norm), float(wanted)],
        "errors": max(errors),
        "low": float(low),
        "nan": str(float(zero.clip_grad_norm_(1.0, norm_type))),
        "raises": raised(zero.clip_grad_norm_, 1.0, norm_type, error_if_nonfinite=True),
        "bad": raised(zero.clip_grad_norm_, 1.0, 0.0),
    }


def scaled(where: int, unscaled_first: bool) -> dict[str, Any]:
    """GradScaler, with an infinite gradient on one rank only at one step."""
    _, zero = tower("adam")
    reference = made(Tower)
    other = plain("adam", reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    theirs = dict(reference.named_parameters())
    scaler.scale(torch.ones(()))  # the first call makes the scale
    wrong: list[str] = []
    for step in range(4):
        give(zero, step)
        for name, param in zero.params.items():
            theirs[name].grad = None if param.grad is None else param.grad.clone()
            if param.grad is not None:
                param.grad.mul_(16.0)
        if step == 2 and dist.get_rank() == where:
            next(p for p in zero.params.values() if p.grad is not None).grad[...] = math.inf
        if unscaled_first:
            scaler.unscale_(zero)
        scaler.step(zero)
        scaler.update(16.0)
        if step != 2:
            other.step()
        wrong += [f"{step} {name}" for name in differing(zero.params, theirs)]
    return {"wrong": wrong, "digest": digest(zero.params)}


def on_subgroup(name: str) -> dict[str, Any] | None:
    """Two ranks of four, whose group ranks are others; the rest never calls anything."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    cls, options = CLASSES[name]
    ddp = DistributedDataParallel(made(Tower), process_group=group, find_unused_parameters=True)
    twin = DistributedDataParallel(made(Tower), process_group=group, find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, group, **options)
    other = cls(twin.parameters(), foreach=False, **options)
    for step in range(3):
        for net, optimizer in ((ddp, zero), (twin, other)):
            net(data(Tower, dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    zero.consolidate_state_dict(to=1)
    return {
        "ranks": [zero.rank, zero.global_rank, zero.world_size],
        "wrong": differing(dict(ddp.named_parameters()), dict(twin.named_parameters())),
        "state": difference(zero.state_dict(), other.state_dict()) if zero.rank == 1 else [],
        "to": raised(zero.consolidate_state_dict, 3),
    }


def on_mesh() -> dict[str, Any]:
    """One dimension of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    _, zero = tower("adamw", "elements", process_group=mesh["inner"])
    reference = made(Tower)
    refused = raised(tower, "adamw", process_group=mesh)
    return {
        "wrong": both(zero, plain("adamw", reference), reference, range(3)),
        "size": zero.world_size,
        "refused": refused,
    }


def few_params(policy: str, views: bool) -> dict[str, Any]:
    """More ranks than parameters."""
    weight = nn.Parameter(torch.arange(3.0))
    other = nn.Parameter(torch.ones(2))
    zero = ZeroRedundancyOptimizer(
        [("weight", weight), ("other", other)],
        torch.optim.Adam,
        parameters_as_bucket_view=views,
        policy=policy,
        lr=0.1,
    )
    twin = [nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.ones(2))]
    plain_one = torch.optim.Adam(twin, lr=0.1, foreach=False)
    for _ in range(2):
        for param in (weight, other, *twin):
            param.grad = torch.ones_like(param)
        zero.step()
        plain_one.step()
    zero.consolidate_state_dict(to=3)
    return {
        "owned": len(zero.owned),
        "groups": [len(group["params"]) for group in zero.optim.param_groups],
        "wrong": differing(zero.params, {"weight": twin[0], "other": twin[1]}),
    }


def disagreeing(what: str) -> str:
    """A rank that has other parameters than the others."""
    rank = dist.get_rank()
    odd = rank == dist.get_world_size() - 1
    sizes = {"a": (4, 3), "b": (5,)}
    arguments: dict[str, Any] = {}
    if odd and what == "shape":
        sizes["b"] = (6,)
    if odd and what == "name":
        sizes = {"a": (4, 3), "c": (5,)}
    if odd and what == "more":
        sizes["c"] = (1,)
    if odd and what == "policy":
        arguments["policy"] = "elements"
    if odd and what == "bad":
        arguments["policy"] = "unheard of"
    params = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in sizes.items()]
    if odd and what == "frozen":
        params[0][1].requires_grad_(False)
    return raised(ZeroRedundancyOptimizer, params, torch.optim.SGD, **arguments)


def uneven(name: str, policy: str, schedule: bool) -> dict[str, Any]:
    """Ranks run out of data one after the other; beside the plain optimizer of a rank that never
    does, under the same DDP."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cls, options = CLASSES[name]
    ddp, twin = (DistributedDataParallel(made(Tower), find_unused_parameters=True) for _ in "ab")
    zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, policy=policy, **options)
    other = cls(twin.parameters(), foreach=False, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (zero, other)]
    steps = range(2 + 2 * rank)
    for net, optimizer, scheduler, joined in (
        (ddp, zero, schedulers[0], [ddp, zero]),
        (twin, other, schedulers[1], [twin]),
    ):
        with warnings.catch_warnings(), Join(joined):
            for step in steps:
                net(data(Tower, rank, step)).square().sum().backward()
                if optimizer is zero:
                    zero.clip_grad_norm_(1e6)
                optimizer.step()
                optimizer.zero_grad()
                if schedule:
                    scheduler.step()
    last = rank == size - 1
    theirs = dict(twin.named_parameters())
    return {
        "wrong": differing(dict(ddp.named_parameters()), theirs) if last else [],
        "digest": digest(zero.params),
    }


def saves(folder: str, name: str, policy: str, views: bool) -> dict[str, Any]:
    """Train, save twice to one folder, and train on; the others go on from there."""
    _, zero = tower(name, policy, views)
    reference = made(Tower)
    other = plain(name, reference)
    wrong = both(zero, other, reference, range(2))
    zero.save(folder)
    zero.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.25
    wrong += both(zero, other, reference, range(2, 3))
    zero.save(folder)
    if dist.get_rank() == 0:
        torch.save(reference.state_dict(), Path(folder, "model.pt"))
        torch.save(other.state_dict(), Path(folder, "plain.pt"))
    wrong += both(zero, other, reference, range(3, 5))
    dist.barrier()
    return {
        "wrong": wrong,
        "digest": digest(zero.params),
        "files": sorted(path.suffix for path in Path(folder).iterdir()),
        "pickles": [
            path.name
            for path in Path(folder).glob("*.bin")
            if b"ctorch" in path.read_bytes() or path.read_bytes()[:2] == b"PK"
        ],
    }


def goes_on(folder: str, name: str, policy: str, views: bool) -> dict[str, Any]:
    """From a checkpoint of other ranks, by another policy."""
    from unittest import mock

    module, zero = tower(name, policy, views)
    with torch.no_grad():
        for key, value in torch.load(Path(folder, "model.pt"), weights_only=True).items():
            module.state_dict()[key].copy_(value)
    stored = torch.load(Path(folder, "plain.pt"), weights_only=True)
    give(zero, 77)
    with mock.patch("pickle.loads", None), mock.patch("pickle.load", None):
        zero.load(folder)
    reference = made(Tower)
    reference.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True))
    from sharding import read_state_dict

    other = plain(name, reference)
    other.load_state_dict(read_state_dict(folder))
    zero.consolidate_state_dict(to=0)
    return {
        "lr": zero.param_groups[0]["lr"],
        "same": difference(zero.state_dict(), stored) if zero.rank == 0 else [],
        "plain": difference(other.state_dict(), stored),
        "wrong": both(zero, other, reference, range(3, 5)),
        "digest": digest(zero.params),
    }


def refuses(folder: str) -> dict[str, Any]:
    """Checkpoints that do not fit; nothing is changed."""
    seen: dict[str, Any] = {}
    _, zero = tower("adam")
    give(zero, 0)
    zero.step()
    zero.consolidate_state_dict(to=0)
    before = copy.deepcopy(zero.state_dict()) if zero.rank == 0 else None
    seen["none"] = raised(zero.load, folder + "/nothing")
    zero.save(folder)
    named = list(made(Tower).named_parameters())
    cls, _ = CLASSES["adam"]

    def made_of(params: Any, cls: Any = cls, **options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(params, cls, **options)

    seen["missing"] = raised(made_of([*named, ("new", nn.Parameter(torch.ones(2)))]).load, folder)
    seen["extra"] = raised(made_of(named[:-1]).load, folder)
    seen["groups"] = raised(made_of(named).load, folder)
    seen["class"] = raised(tower("adagrad")[1].load, folder)
    seen["options"] = raised(tower("adamw")[1].load, folder)
    dist.barrier()
    if zero.rank == 0:
        largest = max(Path(folder).glob("*.bin"), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 4)
    dist.barrier()
    seen["damaged"] = raised(zero.load, folder)
    blocked = Path(folder, "file")
    if zero.rank == 0:
        blocked.write_text("")
    dist.barrier()
    seen["blocked"] = raised(zero.save, blocked / "folder")
    zero.consolidate_state_dict(to=0)
    seen["unchanged"] = difference(zero.state_dict(), before) if zero.rank == 0 else []
    return seen
