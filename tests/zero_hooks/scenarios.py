"""Runs that are more than a comparison side by side; each returns what the tests look at."""

import copy
import gc
import random
import time
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw, chain, clip_by_global_norm, sgd
from hooks import hook_with_zero_step, hook_with_zero_step_interleaved, zero_step_hook
from sharding import ZeroRedundancyOptimizer
from sharding.transport import make_transport
from tests.ddp import compared, models, through_memory, twins

from .cases import CASES, UNUSED, Attention, Wide, run_case
from .runs import Alone, Case, Run, compare, different, pair


def on_subgroup(name: str) -> dict[str, Any]:
    """A comparison on two ranks of four, whose group ranks are not their global ranks."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return {"group rank": None}
    return {"group rank": dist.get_rank(group), **compare(CASES[name], group)}


def scheduled(kind: str) -> list[str]:
    """A scheduler of torch's, which knows nothing of hooks."""
    run, alone = pair(Case(kind=kind, optimizer=sgd(lr=0.1, momentum=0.9)))
    scheduler = torch.optim.lr_scheduler.StepLR(run.zero, 1, gamma=0.5)
    for number in range(4):
        run.iterate(number)
        alone.optimizer = alone.optimizer.replace(lr=0.1 * 0.5**number)
        alone.step(alone.gradients(number)[0], number)
        run.ddp.zero_grad()
        with mock.patch.object(run.zero.step, "_wrapped_by_lr_sched", new=True, create=True):
            scheduler._step_count = 2  # step() is not what steps here; torch would warn of it
            scheduler.step()
    run.hook.wait()
    return different(run, alone)


def not_finite(kind: str, where: str) -> dict[str, Any]:
    """A gradient of rank 1 is infinite or NaN in one iteration: no rank steps anything."""
    case = Case(kind=kind, optimizer=sgd(lr=0.1, momentum=0.9), hook={"skip_nonfinite": True})
    run, alone = pair(case)
    weight = run.ddp.module.layers[3].weight
    seen: dict[str, Any] = {"moved": []}
    for number in range(4):
        handle = None
        if number == 1 and dist.get_rank() == 1:
            handle = weight.register_hook(
                lambda grad: torch.where(torch.arange(64) == 7, float(where), grad)
            )
        before = compared.copied(run.ddp)
        run.iterate(number)
        if handle is not None:
            handle.remove()
        if number != 1:
            alone.step(alone.gradients(number)[0], number)
        run.ddp.zero_grad()
        run.hook.wait()
        seen["moved"].append(len(compared.moved(before, run.ddp)))
    return {**seen, "differences": different(run, alone), "skipped": run.hook.skipped}


def scaled(kind: str) -> dict[str, Any]:
    """A GradScaler, as one uses it with any optimizer; a gradient of rank 1 overflows once."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    hook = {"grad_scaler": scaler, "max_norm": 0.05}
    sgd_ = sgd(lr=0.1, momentum=0.9)
    case = Case(kind=kind, optimizer=sgd_, oracle=chain(clip_by_global_norm(0.05), sgd_), hook=hook)
    run, alone = pair(case)
    weight = run.ddp.module.layers[3].weight
    seen: dict[str, Any] = {"moved": [], "scales": []}
    for number in range(5):
        handle = None
        if number == 2 and dist.get_rank() == 1:
            handle = weight.register_hook(lambda grad: grad * torch.inf)
        before = compared.copied(run.ddp)
        scaler.scale(twins.loss_of(run.ddp, dist.get_rank(), number)).backward()
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
        seen["moved"].append(len(compared.moved(before, run.ddp)))
        seen["scales"].append(scaler.get_scale())
    return {**seen, "differences": different(run, alone), "skipped": run.hook.skipped}


def uneven(kind: str, name: str, late: bool = False) -> dict[str, Any]:
    """Ranks run out of data one after the other, under ``ddp.join()``.

    A rank without data takes part with zeros, in the mean and in the stepping.
    """
    case = CASES[f"{name}, {kind}"]
    run, alone = pair(case)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if late and rank == ranks - 1:
        _slow(run, 0.1)
    with run.ddp.join():
        for number in range(2 + 2 * rank):
            run.iterate(number)
            run.ddp.zero_grad()
    at_once = compared.copied(run.ddp)
    time.sleep(0.2)  # what is still on its way would arrive now
    moved = compared.moved(at_once, run.ddp)
    for number in range(2 * ranks):
        _step_with_the_rest(alone, number)
    return {
        "differences": different(run, alone),
        "digest": compared.digest(run.ddp.module.parameters()),
        "moved later": moved,
    }


def _step_with_the_rest(alone: Alone, number: int) -> None:
    """One process, with the data of the ranks that still have some."""
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


def freed(kind: str, unused: bool) -> list[str]:
    """What is still in memory once a DDP module with a hook is out of use."""
    run = Run(Case(kind=kind, ddp=UNUSED if unused else {}), models.Tower())
    run.iterate(0)
    watched = {
        "ddp": weakref.ref(run.ddp),
        "module": weakref.ref(run.ddp.module),
        "parameter": weakref.ref(run.ddp.module.layers[0].weight),
    }
    del run
    for _ in range(100):  # the last frame of the hook's thread may still be going
        gc.collect()
        if all(reference() is None for reference in watched.values()):
            break
        time.sleep(0.02)
    return [name for name, reference in watched.items() if reference() is not None]


def bytes_sent(policy: str, cap: float) -> dict[str, Any]:
    """What one iteration sends, as transports count it, beside an all-reduce's bytes."""
    made = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        made.append(make_transport(*arguments, **options))
        return made[-1]

    with mock.patch("hooks.zero.step_hook.make_transport", recorded):
        run = Run(Case(policy=policy, ddp={"bucket_cap_mb": cap}), Wide())
    found = []
    for number in range(3):
        before = sum(one.bytes_sent for one in made)
        run.iterate(number)
        run.ddp.zero_grad()
        sent = torch.tensor(sum(one.bytes_sent for one in made) - before)
        dist.all_reduce(sent)
        found.append(sent.item())
    numel = sum(param.numel() for param in run.ddp.module.parameters())
    return {"sent": found, "all_reduce": 2 * (dist.get_world_size() - 1) * numel * 4}


def _slow(run: Run, seconds: float) -> None:
    """From now on, this rank's parameters leave late."""
    overlap = run.hook._overlap
    gather = overlap._gathers.all_gather

    def late(*arguments: Any) -> Any:
        time.sleep(seconds)
        return gather(*arguments)

    overlap._gathers.all_gather = late


def late_owner(attention: bool, how: str) -> dict[str, Any]:
    """Rank 1 sends its parameters late, when rank 0 has gone on into the next forward pass."""
    run, alone = pair(Case(kind="forward", model=Attention if attention else models.Tower))
    rank = dist.get_rank()
    if rank == 1:
        _slow(run, 0.05)
    seen: dict[str, Any] = {"losses": [], "left": []}
    for number in range(4):
        loss = run.iterate(number)
        gradients, losses = alone.gradients(number)
        seen["losses"].append(loss == losses[rank])
        alone.step(gradients, number)
        run.ddp.zero_grad()
        seen["left"].append(len(run.hook._overlap._pending))
    if how == "wait":
        run.hook.wait()
        found = dict(run.ddp.module.named_parameters())
    elif how == "state_dict":
        found = run.ddp.state_dict()
        found = {name.removeprefix("module."): tensor.clone() for name, tensor in found.items()}
    elif how == "load":
        wanted = copy.deepcopy(alone.module.state_dict())
        run.ddp.module.load_state_dict(wanted)
        time.sleep(0.5)  # what came later than the load would undo it
        found = dict(run.ddp.module.named_parameters())
    seen["differences"] = [
        name for name, wanted in alone.params.items() if not torch.equal(found[name], wanted)
    ]
    return seen


def jitter(kind: str) -> dict[str, Any]:
    """Ranks whose work takes different times, differently at each moment."""
    run, alone = pair(Case(kind=kind, ddp={"bucket_cap_mb": 1e-4}))
    chance = random.Random(dist.get_rank())
    for param in run.ddp.module.parameters():
        param.register_hook(lambda grad: time.sleep(0.01 * chance.random()))
    step = run.zero.step_owned

    def slow_step(*arguments: Any, **options: Any) -> None:
        time.sleep(0.01 * chance.random())
        step(*arguments, **options)

    with mock.patch.object(run.zero, "step_owned", slow_step):
        for number in range(8):
            run.iterate(number)
            alone.step(alone.gradients(number)[0], number)
            run.ddp.zero_grad()
        run.hook.wait()
    return {
        "differences": different(run, alone),
        "digest": compared.digest(run.ddp.module.parameters()),
    }


def nested() -> dict[str, Any]:
    """Two optimizers on one module, the hook of one inside that of the other."""
    torch.manual_seed(0)
    module = models.Tower()
    alone = copy.deepcopy(module)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.03)
    makers = {"weight": sgd(lr=0.1, momentum=0.9), "bias": adamw(lr=0.01)}
    zeros = {
        word: ZeroRedundancyOptimizer(
            [(name, one) for name, one in module.named_parameters() if word in name],
            maker,
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
        twins.backward(ddp, number)
        grads = {name: one.grad.clone() for name, one in module.named_parameters()}
        ddp.zero_grad()
        for word, maker in makers.items():
            chosen = {name: one.detach() for name, one in params.items() if word in name}
            maker.update_(chosen, {name: grads[name] for name in chosen}, states[word])
    return {
        "differences": [
            name for name, one in module.named_parameters() if not torch.equal(one, params[name])
        ],
        "digest": compared.digest(module.parameters()),
    }


def saved_under_overlap() -> dict[str, Any]:
    """Three iterations, saved and loaded, three more in new objects; beside six in one go."""
    run, _ = pair(Case())
    for number in range(3):
        run.iterate(number)
        run.ddp.zero_grad()
    rank = dist.get_rank()
    states = []
    for to in range(dist.get_world_size()):  # every rank is given all of it once
        run.zero.consolidate_state_dict(to)
        if to == rank:
            states.append(copy.deepcopy(run.zero.state_dict()))
    weights = copy.deepcopy(run.ddp.module.state_dict())
    for number in range(3, 6):
        run.iterate(number)
        run.ddp.zero_grad()

    module = models.Tower()
    module.load_state_dict(weights)
    again = Run(Case(), module)
    given = states[0]
    kept = copy.deepcopy(given)
    again.zero.load_state_dict(given)
    at_start = compared.digest(module.parameters())
    for number in range(3, 6):
        again.iterate(number)
        again.ddp.zero_grad()
    return {
        "differences": [
            name
            for name, one in run.ddp.module.named_parameters()
            if not torch.equal(one, again.ddp.module.get_parameter(name))
        ],
        "went on": compared.digest(module.parameters()) != at_start,
        "untouched": _same(given, kept),
        "entries": len(given["state"]),
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def step_is_refused() -> dict[str, Any]:
    """``zero.step()`` under overlap steps nothing: the hook did it already."""
    run, alone = pair(Case())
    run.iterate(0)
    returned = run.zero.step()
    alone.step(alone.gradients(0)[0], 0)
    return {"differences": different(run, alone), "returned": returned}


class Lonely(nn.Module):
    """One parameter, and more ranks than that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(models.WIDTH, models.WIDTH) / 8)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return x @ self.weight


def lonely(kind: str, policy: str) -> dict[str, Any]:
    """More ranks than parameters."""
    return compare(Case(kind=kind, model=Lonely, policy=policy))


def plain(module: nn.Module) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """A module under DDP, and its optimizer."""
    ddp = DistributedDataParallel(module)
    return ddp, ZeroRedundancyOptimizer(
        module.named_parameters(), sgd(lr=0.1), overlap_with_ddp=True
    )


def pending_is_waited_for() -> dict[str, Any]:
    """A module that is in no forward pass of an iteration is whole before the next step."""
    torch.manual_seed(0)
    ddp, zero = plain(models.Tower())
    hook = zero_step_hook(ddp, zero, into_forward=True)
    ddp.register_comm_hook(None, hook)
    left = []
    for number in range(3):
        twins.backward(ddp, number)
        left.append(len(hook._overlap._pending))
        ddp.zero_grad()
    hook.wait()
    return {"left": left, "then": len(hook._overlap._pending)}


def in_memory(job: str, **arguments: Any) -> Any:
    """Another job, with everything handed over through the host's shared memory."""
    jobs: dict[str, Any] = {
        "run_case": run_case,
        "on_subgroup": on_subgroup,
        "uneven": uneven,
        "jitter": jitter,
        "freed": freed,
    }
    with through_memory.through_memory() as seen:
        found = jobs[job](**arguments)
    outside = job == "on_subgroup" and found["group rank"] is None
    assert seen.operations or outside, "nothing went through memory"
    return found
