"""Runs with more than a plain comparison; each returns the data that tests check."""

import copy
import gc
import random
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw, chain, clip_by_global_norm, ema, sgd
from hooks import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step_hook
from sharding import ZeroRedundancyOptimizer
from tests.ddp import comparison, models, through_memory, twins

from .cases import CASES, UNUSED
from .runs import Alone, Case, Run, backward, compare, different, fresh, pair

Group = dist.ProcessGroup
T = TypeVar("T")


def on_processes(
    name: str, kind: str, policy: str, memory: bool, members: tuple[int, ...] | None
) -> dict[str, Any] | None:
    """Compare on all ranks, or on a subgroup whose group ranks differ from the global ranks."""
    group = None if members is None else dist.new_group(list(members))
    if members is not None and dist.get_rank() not in members:
        return None
    case = CASES[name]._replace(kind=kind, policy=policy, iterations=3)
    if not memory:
        return compare(case, group)
    return in_memory(lambda: compare(case, group))


def not_finite(group: Group, kind: str, where: str) -> dict[str, Any]:
    """Let a gradient of rank 1 be infinite or NaN in one iteration, which no rank may step."""
    case = Case(kind=kind, optimizer=sgd(lr=0.1, momentum=0.9), hook={"skip_nonfinite": True})
    run, alone = pair(case, group)
    weight = run.ddp.module.layers[3].weight
    seen: dict[str, Any] = {"moved": []}
    for number in range(4):
        handle = None
        if number == 1 and group.rank() == 1:
            handle = weight.register_hook(
                lambda grad: torch.where(torch.arange(64) == 7, float(where), grad)
            )
        before = comparison.copied(run.ddp)
        run.iterate(number)
        if handle is not None:
            handle.remove()
        if number != 1:
            alone.step(alone.gradients(number)[0], number)
        run.ddp.zero_grad()
        run.hook.wait()
        seen["moved"].append(len(comparison.moved(before, run.ddp)))
    return {**seen, "differences": different(run, alone), "skipped": run.hook.skipped}


def scaled(group: Group, kind: str) -> dict[str, Any]:
    """Train with a GradScaler; a gradient of rank 1 overflows in one iteration."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    hook = {"grad_scaler": scaler, "max_norm": 0.05}
    sgd_ = sgd(lr=0.1, momentum=0.9)
    case = Case(kind=kind, optimizer=sgd_, oracle=chain(clip_by_global_norm(0.05), sgd_), hook=hook)
    run, alone = pair(case, group)
    weight = run.ddp.module.layers[3].weight
    seen: dict[str, Any] = {"moved": [], "scales": []}
    for number in range(5):
        handle = None
        if number == 2 and group.rank() == 1:
            handle = weight.register_hook(lambda grad: grad * torch.inf)
        before = comparison.copied(run.ddp)
        scaler.scale(twins.loss_of(run.ddp, group.rank(), number)).backward()
        if handle is not None:
            handle.remove()
        else:
            assert run.hook.norm is not None
        scaler.step(run.zero)
        scaler.update()
        if number != 2:
            alone.step(alone.gradients(number)[0], number)
        run.ddp.zero_grad()
        run.hook.wait()
        seen["moved"].append(len(comparison.moved(before, run.ddp)))
        seen["scales"].append(scaler.get_scale())
    return {**seen, "differences": different(run, alone), "skipped": run.hook.skipped}


def uneven(kind: str, name: str, memory: bool, late: bool = False) -> dict[str, Any]:
    """Let ranks run out of data one after the other, under ``ddp.join()``.

    A rank without data contributes zeros to the mean, and still steps what it owns.
    """
    if memory:
        return in_memory(lambda: uneven(kind, name, memory=False))
    run, alone = pair(CASES[name]._replace(kind=kind))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if late and rank == ranks - 1:
        _hold(run, lambda: time.sleep(0.05))
    with run.ddp.join():
        for number in range(2 + 2 * rank):
            run.iterate(number)
            run.ddp.zero_grad()
    at_once = comparison.copied(run.ddp)
    run.hook.wait()
    moved = comparison.moved(at_once, run.ddp)
    for number in range(2 * ranks):
        _step_with_the_rest(alone, number)
    return {
        "differences": different(run, alone),
        "digest": comparison.digest(run.ddp.module.parameters()),
        "moved later": moved,
    }


def uneven_scaled(kind: str) -> dict[str, Any]:
    """Run out of data under GradScalers, whose scales grow while some ranks have no data."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = sgd(lr=0.1, momentum=0.9)
    run, alone = pair(Case(kind=kind, optimizer=optimizer, hook={"grad_scaler": scaler}))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with run.ddp.join():
        for number in range(2 + 2 * rank):
            scaler.scale(twins.loss_of(run.ddp, rank, number)).backward()
            scaler.step(run.zero)
            scaler.update()
            run.ddp.zero_grad()
    run.hook.wait()
    for number in range(2 * ranks):
        _step_with_the_rest(alone, number)
    return {
        "differences": different(run, alone),
        "digest": comparison.digest(run.ddp.module.parameters()),
        "scale": scaler.get_scale(),
    }


def _step_with_the_rest(alone: Alone, number: int) -> None:
    """Step one process by the data of the ranks that still have some."""
    total: dict[str, Tensor] = {}
    for rank in range(alone.ranks):
        for param in alone.params.values():
            param.grad = None
        if number < 2 + 2 * rank:
            twins.loss_of(alone.module, rank, number).backward()
        for name, param in alone.params.items():
            grad = torch.zeros_like(param) if param.grad is None else param.grad / alone.ranks
            total[name] = grad if name not in total else total[name] + grad
    alone.step(total, number)


def freed(kind: str, unused: bool, memory: bool) -> list[str]:
    """Return the names of the objects that a DDP module with a hook leaves alive."""
    if memory:
        return in_memory(lambda: freed(kind, unused, memory=False))
    run = Run(Case(kind=kind, ddp=UNUSED if unused else {}), models.Tower())
    run.iterate(0)
    watched = {
        "ddp": weakref.ref(run.ddp),
        "module": weakref.ref(run.ddp.module),
        "parameter": weakref.ref(run.ddp.module.layers[0].weight),
    }
    del run
    for _ in range(6000):  # the hook's thread may still hold its last frame
        gc.collect()
        if all(reference() is None for reference in watched.values()):
            break
        time.sleep(0.02)
    return [name for name, reference in watched.items() if reference() is not None]


def _hold(run: Run, before: Callable[[], object]) -> None:
    """Call a function before each gather of this rank."""
    gathers = run.hook._gathers
    gather = gathers.all_gather

    def late(*arguments: Any) -> Any:
        before()
        return gather(*arguments)

    gathers.all_gather = late


def frozen_later(kind: str) -> dict[str, Any]:
    """Freeze a layer that backward still passes through; return the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(model.named_parameters(), sgd(lr=0.1), overlap_with_ddp=True)
    hook: Any = zero_step_hook(ddp, zero)
    if kind == "interleaved":
        hook = hook_with_zero_step_interleaved(allreduce_hook, ddp, zero)
    ddp.register_comm_hook(None, hook)
    for number in range(4):
        if number == 2:
            model[1].weight.requires_grad_(requires_grad=False)
        ddp(torch.full((2, 8), 1.0 + dist.get_rank())).square().mean().backward()
        ddp.zero_grad()
    hook.wait()
    return {"differences": [], "digest": comparison.digest(model.parameters())}


def views_in_training(how: str) -> dict[str, Any]:
    """Ask for views between iterations; return the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(2)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = chain(sgd(lr=0.1), ema(0.5))
    zero = ZeroRedundancyOptimizer(model.named_parameters(), optimizer, overlap_with_ddp=True)
    ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
    for _ in range(6):
        ddp(torch.full((2, 600), 1.0 + dist.get_rank())).square().mean().backward()
        zero.zero_grad()
        if how == "view":
            zero.view()
        else:
            with zero.averaged(model):
                pass
    return {"differences": [], "digest": comparison.digest(model.parameters())}


def jitter(kind: str, memory: bool) -> dict[str, Any]:
    """Train with random delays on each rank."""
    if memory:
        return in_memory(lambda: jitter(kind, memory=False))
    run, alone = pair(Case(kind=kind, ddp={"bucket_cap_mb": 1e-4}))
    chance = random.Random(dist.get_rank())
    for param in run.ddp.module.parameters():
        param.register_hook(lambda grad: time.sleep(0.01 * chance.random()))
    step = run.zero.step_owned

    def slow_step(*arguments: Any, **options: Any) -> None:
        time.sleep(0.01 * chance.random())
        step(*arguments, **options)

    with mock.patch.object(run.zero, "step_owned", slow_step):
        for number in range(4):
            run.iterate(number)
            alone.step(alone.gradients(number)[0], number)
            run.ddp.zero_grad()
        run.hook.wait()
    return {
        "differences": different(run, alone),
        "digest": comparison.digest(run.ddp.module.parameters()),
    }


def nested(group: Group) -> dict[str, Any]:
    """Train one module with two optimizers, whose hooks are nested."""
    module = fresh(models.Tower)
    alone = copy.deepcopy(module)
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.03)
    makers = {"weight": sgd(lr=0.1, momentum=0.9), "bias": adamw(lr=0.01)}
    zeros = {
        word: ZeroRedundancyOptimizer(
            [(name, one) for name, one in module.named_parameters() if word in name],
            maker,
            process_group=group,
            overlap_with_ddp=True,
        )
        for word, maker in makers.items()
    }
    inner = hook_with_zero_step(allreduce_hook, ddp, zeros["weight"])
    ddp.register_comm_hook(
        ddp.process_group, hook_with_zero_step_interleaved(inner, ddp, zeros["bias"])
    )
    params = dict(alone.named_parameters())
    states = {
        word: maker.init({name: one for name, one in params.items() if word in name})
        for word, maker in makers.items()
    }
    for number in range(3):
        backward(ddp, number)
        grads = {name: one.grad.clone() for name, one in module.named_parameters()}
        ddp.zero_grad()
        for word, maker in makers.items():
            chosen = {name: one.detach() for name, one in params.items() if word in name}
            maker.update_(chosen, {name: grads[name] for name in chosen}, states[word])
    return {
        "differences": [
            name for name, one in module.named_parameters() if not torch.equal(one, params[name])
        ],
        "digest": comparison.digest(module.parameters()),
    }


def in_memory(job: Callable[[], T]) -> T:
    """Run a job in which ranks exchange all data through shared memory."""
    with through_memory.through_memory() as seen:
        found = job()
    assert seen.operations, "nothing went through memory"
    return found
