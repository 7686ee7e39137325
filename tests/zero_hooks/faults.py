"""Mistakes that must end in a clear error; each function returns the error."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw, sgd
from hooks import hook_with_zero_step, zero_step_hook
from sharding import ZeroRedundancyOptimizer
from sharding.transport import gather_group
from sharding.transport.local_group import LocalGroup
from tests.ddp import comparison, models
from tests.ddp.torch_side import done, fails_at_once, fails_later

from .cases import UNUSED
from .runs import INNER_KINDS, Case, Run, backward, fresh, pair

Group = dist.ProcessGroup
SMALL = {"bucket_cap_mb": 1e-4, **UNUSED}  # several buckets from the first iteration on


def raised(action: Callable[[], object]) -> list[str]:
    """Return type and text of the error of an action, or an empty list."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  the test says which it should be
        return [type(error).__name__, str(error)]
    return []


def made(
    group: Group, module: nn.Module | None = None, **options: Any
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """Return a module under DDP and its optimizer."""
    ddp = wrapped(group, models.Tower() if module is None else module)
    options = {"overlap_with_ddp": True, "process_group": group, **options}
    return ddp, ZeroRedundancyOptimizer(ddp.module.named_parameters(), sgd(lr=0.1), **options)


def wrapped(group: Group, module: nn.Module, **more: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=group, **SMALL, **more)


def make_hook(kind: str, ddp: Any, zero: Any, **options: Any) -> Any:
    if kind == "scatter":
        return zero_step_hook(ddp, zero, **options)
    return INNER_KINDS[kind](allreduce_hook, ddp, zero, **options)


def refused(group: LocalGroup) -> dict[str, list[str]]:
    """Return the errors of hooks that are made with wrong arguments."""
    ddp, zero = made(group)
    _, plain = made(group, overlap_with_ddp=False)
    other = wrapped(group, models.Tower())
    half = ZeroRedundancyOptimizer(
        list(ddp.module.named_parameters())[:3], sgd(), group, overlap_with_ddp=True
    )
    _, elsewhere = made(group, ddp.module, process_group=group.split([group.rank()]))
    theirs = torch.optim.SGD(ddp.parameters())
    found = {}
    for kind in ("scatter", *INNER_KINDS):
        make = partial(make_hook, kind)
        found |= {
            f"{kind}: no overlap": raised(partial(make, ddp, plain)),
            f"{kind}: no DDP": raised(partial(make, ddp.module, zero)),
            f"{kind}: torch.optim": raised(partial(make, ddp, theirs)),
            f"{kind}: another module": raised(partial(make, other, zero)),
            f"{kind}: other ranks": raised(partial(make, ddp, elsewhere)),
            f"{kind}: max_norm": raised(partial(make, ddp, zero, max_norm=-1.0)),
            f"{kind}: nan": raised(partial(make, ddp, zero, max_norm=float("nan"))),
        }
    found["scatter: half"] = raised(lambda: zero_step_hook(ddp, half))
    found["held: no hook"] = raised(lambda: hook_with_zero_step(None, ddp, zero))
    found["deterministic"] = raised(lambda: zero_step_hook(ddp, zero, deterministic=True))
    return found


# -- each parameter once ------------------------------------------------------------------------


def one_hook_on_two_modules(group: Group, kind: str) -> dict[str, Any]:
    """Register one hook on two DDP modules around the same parameters."""
    module = models.Tower()
    both = [wrapped(group, module) for _ in range(2)]
    _, zero = made(group, module)
    hook = make_hook(kind, both[0], zero)
    for ddp in both:
        ddp.register_comm_hook(both[0].process_group, hook)
    x = torch.ones(2, models.WIDTH)
    loss = sum(ddp(x, group.rank(), 0).sum() for ddp in both)
    found = raised(loss.backward)
    raised(hook.wait)  # its pending work needs the other ranks
    return {"raised": found, "names": sorted(zero.params)}


def thawed(group: Group, kind: str, when: str) -> list[str]:
    """Make a parameter trainable after DDP, or after the hook, was created."""
    module = models.Tower()
    weight = module.layers[1].weight
    weight.requires_grad_(False)
    ddp, zero = made(group, module)
    if when == "before the hook":
        weight.requires_grad_(True)
    hook = make_hook(kind, ddp, zero)
    ddp.register_comm_hook(None, hook)
    weight.requires_grad_(True)
    found = raised(lambda: backward(ddp, 0))
    raised(hook.wait)
    return found


def frozen_at_run_time(group: Group, kind: str) -> dict[str, Any]:
    """Freeze a parameter during training; later iterations must leave it unchanged."""
    run, alone = pair(Case(kind=kind, optimizer=adamw(lr=0.01), ddp=UNUSED), group)
    for number in range(4):
        if number == 2:
            for module in (run.ddp.module, alone.module):
                module.layers[1].weight.requires_grad_(False)
        run.iterate(number)
        alone.step(alone.gradients(number)[0], number)
        run.ddp.zero_grad()
    run.hook.wait()
    return {
        "differences": [
            name
            for name, wanted in alone.params.items()
            if not torch.equal(run.ddp.module.get_parameter(name), wanted)
        ]
    }


def added_later(group: Group, kind: str) -> dict[str, Any]:
    """Add a group under overlap, with parameters that DDP has reduced from the start."""
    ddp = wrapped(group, fresh(models.Tower))
    named = dict(ddp.module.named_parameters())
    first = [(name, one) for name, one in named.items() if "weight" in name]
    rest = [(name, one) for name, one in named.items() if "weight" not in name]
    zero = ZeroRedundancyOptimizer(first, sgd(lr=0.1), group, overlap_with_ddp=True)
    ddp.register_comm_hook(ddp.process_group, make_hook(kind, ddp, zero))
    moved = []
    for number in range(3):
        if number == 1:
            zero.add_param_group({"params": rest, "lr": 0.2})
        before = comparison.copied(ddp)
        backward(ddp, number)
        right = [
            torch.equal(before[name].sub(one.grad, alpha=0.2 if "bias" in name else 0.1), one)
            for name, one in named.items()
            if name in comparison.moved(before, ddp)
        ]
        moved.append([len(right), all(right)])
        ddp.zero_grad()
    return {"moved": moved, "digest": comparison.digest(named.values())}


def added_strange(group: Group) -> list[str]:
    """Add a group of parameters that DDP does not have."""
    ddp, zero = made(group)
    ddp.register_comm_hook(ddp.process_group, make_hook("interleaved", ddp, zero))
    backward(ddp, 0)
    ddp.zero_grad()
    zero.add_param_group({"params": [("stranger", nn.Parameter(torch.ones(3)))]})
    return raised(lambda: backward(ddp, 1))


class HalfUsed(nn.Module):
    """Model with one layer that does not contribute to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(models.WIDTH, models.WIDTH)
        self.used = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.used(x)


def skipped_by_ddp(group: Group) -> dict[str, Any]:
    """Let DDP skip the buckets that no rank uses."""
    ddp = wrapped(group, HalfUsed(), skip_all_reduce_unused_params=True)
    zero = ZeroRedundancyOptimizer(
        ddp.module.named_parameters(), sgd(lr=0.1), group, overlap_with_ddp=True
    )
    ddp.register_comm_hook(None, zero_step_hook(ddp, zero))

    def train() -> None:
        for iteration in range(2):
            backward(ddp, iteration)
            ddp.zero_grad()

    before = comparison.copied(ddp)
    return {"raised": raised(train), "moved": comparison.moved(before, ddp)}


def sparse(group: Group) -> list[str]:
    """Return the error for a sparse gradient, which cannot be divided into ranges."""
    ddp, zero = made(group, models.Sparse())
    ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
    return raised(lambda: backward(ddp, 0))


def version_counters(group: Group, kind: str) -> list[str]:
    """Return the error if a step changes a parameter that the backward pass still needs."""

    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(models.WIDTH, models.WIDTH)
            self.last = nn.LayerNorm(models.WIDTH)

        def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
            # The second use has no gradient, and needs the weight later in backward.
            return self.first(x) * self.last.weight.detach() + self.last(x)

    ddp, zero = made(group, Reused())
    hook = make_hook(kind, ddp, zero)
    ddp.register_comm_hook(ddp.process_group, hook)
    found = raised(lambda: backward(ddp, 0))
    raised(hook.wait)
    return found


# -- inner hooks --------------------------------------------------------------------------------


INNER: dict[str, Any] = {
    "too small": lambda group, bucket: done(bucket.buffer()[:3]),
    "no tensor": lambda group, bucket: done("gradients"),
    "fails later": fails_later,
    "fails at once": fails_at_once,
}


def inner_hook(group: Group, kind: str, name: str) -> dict[str, list[str]]:
    """Return the errors of an inner hook that breaks its contract, also in later iterations."""
    ddp, zero = made(group)
    hook = INNER_KINDS[kind](INNER[name], ddp, zero)
    ddp.register_comm_hook(ddp.process_group, hook)
    found = {"first": raised(lambda: backward(ddp, 0))}
    raised(hook.wait)
    if name == "fails at once":
        # Backward ended early, without the remaining buckets. DDP itself refuses to go on.
        for number, later in enumerate(("second", "third"), start=1):
            ddp.zero_grad()
            found[later] = raised(partial(backward, ddp, number))
    return found


# -- one rank in trouble, on processes ----------------------------------------------------------


def one_dies(kind: str, victim: int, where: str) -> list[str]:
    """Let one rank die in an iteration, and return the error of the other rank."""
    run = Run(Case(kind=kind, ddp={"bucket_cap_mb": 1e-4}), fresh(models.Tower))
    for number in range(2):  # until DDP has rebuilt its buckets, which takes collectives
        run.iterate(number)
        run.ddp.zero_grad()
    dist.barrier()
    if dist.get_rank() == victim:
        if where == "backward":
            run.ddp.module.layers[2].weight.register_hook(lambda grad: os._exit(0))
        else:
            dies_in_step(run.zero)
    return raised(lambda: run.iterate(2))


def dies_in_step(zero: ZeroRedundancyOptimizer) -> None:
    """Let this process exit when it begins the second call of step_owned."""
    step, calls = zero.step_owned, 0

    def dying(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            os._exit(0)
        step(*arguments, **options)

    zero.step_owned = dying  # type: ignore[method-assign]  # no other way in


def shorten(group: Group, seconds: float) -> None:
    """Shorten the timeout of a group, once all ranks are ready, since startup may take long."""
    for one in (group, gather_group(group)):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), one)


def one_is_absent(kind: str, absent: int) -> list[str]:
    """Let one rank skip a backward pass, and return the error of the other rank."""
    run = Run(Case(kind=kind, ddp=SMALL), fresh(models.Tower))
    run.iterate(0)
    run.ddp.zero_grad()
    dist.barrier()
    shorten(run.group, 1.0)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == absent:
        store.wait(["they have looked"], timedelta(seconds=120))
        return []
    found = raised(lambda: run.iterate(1))
    store.set("they have looked", "")
    return found
