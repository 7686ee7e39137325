"""What the ranks do: stepping by ranges, as communication hooks do."""

import random
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding import OwnedRange, ZeroRedundancyOptimizer

from .jobs import CHAINS, differing, digest, far, groups_of, params_of, twin_of
from .jobs_more import raised
from .models import Pictures, Tower, gradients, made

Ranges = dict[str, list[tuple[int, int, Tensor]]]


def cut(one: OwnedRange, grad: Tensor, chance: random.Random, parts: int) -> Ranges:
    """An owned range in some parts."""
    between = [chance.randint(one.start, one.stop) for _ in range(parts)]
    ends = sorted({one.start, one.stop, *between})
    flat = grad.reshape(-1)
    if one.start == one.stop:
        return {one.path: [(one.start, one.stop, flat)]}
    return {one.path: [(a, b, flat[a:b]) for a, b in pairwise(ends)]}


def by_ranges(chain_name: str, policy: str, views: bool, parts: int, kind: str) -> dict[str, Any]:
    """Owned ranges in any order and in parts, in several calls; beside one process."""
    model = {"Tower": Tower, "Pictures": Pictures}[kind]
    zero = ZeroRedundancyOptimizer(
        groups_of(made(model)),
        CHAINS[chain_name],
        policy=policy,
        parameters_as_bucket_view=views,
        overlap_with_ddp=True,
    )
    twin, stepper = twin_of(zero, CHAINS[chain_name])
    trained = {name: p for name, p in twin.items() if zero.params[name].requires_grad}
    state = stepper.init(trained)
    wrong: list[str] = []
    chance = random.Random(dist.get_rank())
    for step in range(4):
        grads: dict[str, Any] = gradients(trained, step)
        unused = [name for number, name in enumerate(grads) if (number + step) % 4 == 0]
        wanted = [
            cut(one, grads[one.path], chance, parts)
            for one in zero.owned
            if one.path in trained and one.path not in unused
        ]
        chance.shuffle(wanted)
        zero.begin_iteration()
        zero.skip(unused)
        measured = []
        if chain_name == "clipped":
            addends = [zero.measure(one) for one in wanted]
            none = torch.zeros(len(zero.plan.specs), dtype=torch.float64)
            measured = [zero.total(sum(addends, none))]
        for one in wanted:
            zero.step_owned(one, measured=measured)
        zero.end_iteration()
        zero.gather()
        given = {name: None if name in unused else grad for name, grad in grads.items()}
        trained, state = stepper.update(trained, given, state)
        wrong += [f"step {step}: {name}" for name in differing(params_of(zero, trained), trained)]
        zero.param_groups[0]["lr"] *= 0.5
        zero.param_groups[1]["lr"] *= 0.5
        stepper = halved(stepper, zero)
    return {
        "wrong": wrong,
        "far": far(params_of(zero, trained), trained),
        "digest": digest(zero.params),
        "step": raised(zero.step),
    }


def halved(stepper: Any, zero: ZeroRedundancyOptimizer) -> Any:
    """The optimizer with the learning rates of now."""
    first, second = zero.param_groups
    names = {id(param): name for name, param in zero.params.items()}
    own = {names[id(param)] for param in second["params"]}
    return stepper.replace(lr=first["lr"]).override(lambda path: path[0] in own, lr=second["lr"])


def accounts() -> dict[str, Any]:
    """What is refused; nothing is changed by it."""
    rank = dist.get_rank()
    weight, bias = (torch.nn.Parameter(torch.ones(size)) for size in (8, 2))
    zero = ZeroRedundancyOptimizer(
        [("weight", weight), ("bias", bias)], torch.optim.SGD, policy="elements", lr=0.5
    )
    weights = [one for one in zero.owned if one.path == "weight"]
    others = [one for one in zero.owned if one.path == "bias"]
    every = {
        one.path: [(one.start, one.stop, torch.ones(one.stop - one.start))] for one in zero.owned
    }
    foreign = (5, 8) if rank == 0 else (0, 3)
    one = weights[0]
    seen = {
        "owned": [list(part) for part in zero.owned],
        "not owned": raised(zero.step_owned, {"weight": [(*foreign, torch.ones(3))]}),
        "unknown": raised(zero.step_owned, {"nothing": [(0, 1, torch.ones(1))]}),
        "length": raised(zero.step_owned, {"weight": [(one.start, one.stop, torch.ones(1))]}),
        "dtype": raised(
            zero.step_owned,
            {"weight": [(one.start, one.stop, torch.ones(one.stop - one.start).double())]},
        ),
        "no total": raised(zero.measure, every),
        "end": raised(zero.end_iteration),
        "skip": raised(zero.skip, ["nothing"]),
    }
    zero.begin_iteration()
    zero.step_owned(every)
    seen["twice"] = raised(zero.step_owned, {"weight": every["weight"]})
    zero.end_iteration()
    zero.begin_iteration()
    seen["missing"] = raised(zero.end_iteration)
    zero.begin_iteration()
    seen["begun"] = raised(zero.begin_iteration)
    zero.begin_iteration()
    zero.skip(["weight"])
    seen["skipped"] = raised(zero.step_owned, {"weight": every["weight"]})
    zero.step_owned({name: found for name, found in every.items() if name == "bias"})
    zero.end_iteration()
    for name in ("weight", "bias"):
        param = zero.params[name]
        param.requires_grad_(False)
    zero.begin_iteration()
    zero.end_iteration()  # nothing is trainable
    for param in zero.params.values():
        param.requires_grad_(True)
    zero.gather()
    seen["weight"] = weight.tolist()
    seen["bias"] = bias.tolist()
    seen["owns bias"] = len(others)
    return seen
