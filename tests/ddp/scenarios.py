"""Runs that go beyond a comparison side by side; each returns data for the tests."""

import copy
import gc
import io
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import State
from hooks import OptimizerState, group_lifetime
from hooks.step_hook import build_hook
from tests.choices import case as tried

from .cases import ADAMW, CASES, CLIPPED, SGD, SMALL, UNUSED
from .comparison import Pair, digest, finite, state_pairs, trainable
from .models import Branches, Tower
from .torch_side import Hook
from .twins import Case, Ours, backward, compare, made, pairs

ALL = {**CASES, **CLIPPED}


def each(scenario: str, names: Sequence[str]) -> dict[str, Any]:
    """Run one of the functions below for each case, one after the other."""
    found = {}
    for name in names:
        with tried(name=name):
            found[name] = globals()[scenario](name)
    return found


def run_on(ddp: DistributedDataParallel, iterations: range, step: Callable[[], object]) -> None:
    """Train; call ``step`` after each backward pass."""
    for iteration in iterations:
        backward(ddp, iteration)
        step()
        ddp.zero_grad()


def nothing() -> None:
    """Do nothing after a backward pass, because our hook has stepped."""


def resumed(name: str) -> dict[str, Any]:
    """Train two iterations, save, load, and train two more; compare with four in one run."""
    torch.manual_seed(0)
    case = ALL[name]
    first = Ours(case, case.model())
    run_on(first.ddp, range(2), nothing)
    file = io.BytesIO()
    torch.save({"model": first.ddp.module.state_dict(), "state": first.state.state}, file)
    run_on(first.ddp, range(2, 4), nothing)

    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert isinstance(saved["state"], State)
    module = case.model()
    module.load_state_dict(saved["model"])
    second = Ours(case, module, state=saved["state"])
    at_start = digest(second.tensors())
    run_on(second.ddp, range(2, 4), nothing)
    return {
        "differences": [
            number
            for number, both in enumerate(zip(first.tensors(), second.tensors(), strict=True))
            if not torch.equal(*both)
        ],
        "went on": digest(second.tensors()) != at_start,
        "steps": sorted({int(one.step) for one in second.leaves().values()}),
        "finite": finite(second.tensors()),
    }


Part = tuple[Case, dict[str, nn.Parameter]]


def split(ddp: DistributedDataParallel, word: str) -> list[Part]:
    """Assign parameters with the word in their name to SGD, and the others to AdamW."""
    named = trainable(ddp)
    first = {name: param for name, param in named.items() if word in name}
    rest = {name: param for name, param in named.items() if name not in first}
    return [(SGD, first), (ADAMW, rest)]


def by_torch(part: Part) -> torch.optim.Optimizer:
    case, params = part
    return case.twin(list(params.values()))


def parts(model: type[nn.Module], word: str, ours: int, **options: Any) -> dict[str, Any]:
    """Train with two optimizers, of which our hooks are one or both, and torch.optim the rest.

    The twin has both optimizers from torch. If there are two hooks, one is inside the other.
    """
    torch.manual_seed(0)
    module = model()
    twin = DistributedDataParallel(copy.deepcopy(module), **options)
    ddp = DistributedDataParallel(module, **options)
    theirs = [by_torch(part) for part in split(twin, word)]
    rest = [by_torch(part) for part in split(ddp, word)[ours:]]
    states = [
        OptimizerState(case.optimizer, ddp, params=params)
        for case, params in split(ddp, word)[:ours]
    ]
    hook: Hook = allreduce_hook
    for state in states:
        hook = build_hook(state, hook)
    ddp.register_comm_hook(None, hook)
    others = trainable(twin)
    steps = dict.fromkeys(others, 0)

    def step_twin() -> None:
        for name, param in others.items():
            steps[name] += param.grad is not None
        for optimizer in theirs:
            optimizer.step()

    differences: list[list[str]] = []
    for number in range(4):
        run_on(twin, range(number, number + 1), step_twin)
        run_on(ddp, range(number, number + 1), lambda: [one.step() for one in rest])
        found = [Pair(name, p.detach(), others[name]) for name, p in trainable(ddp).items()]
        for state, optimizer in zip(states, theirs, strict=False):
            for name, leaf in state.state.leaves.items():
                found += state_pairs(name, leaf, optimizer.state[others[name]], steps[name])
        differences.append([pair.name for pair in found if not pair.same])
    return {
        "differences": differences,
        "stepped": [sorted(state.params) for state in states],
        "digest": digest(ddp.module.parameters()),
    }


def subset() -> dict[str, Any]:
    """Step half of the parameters by ``params=``; the caller steps the others."""
    return parts(Tower, "weight", ours=1, **SMALL)


def small_subset() -> dict[str, Any]:
    """Step so few parameters by ``params=`` that some buckets contain none of them."""
    return parts(Branches, "head", ours=1, **UNUSED)


def nested() -> dict[str, Any]:
    """Step by two hooks, one of which is the inner hook of the other."""
    return parts(Branches, "weight", ours=2, **UNUSED)


def uneven(name: str) -> dict[str, Any]:
    """Let ranks run out of data one after the other, under ``ddp.join()``."""
    ours, twin = made(CASES[name])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = range(2 + 2 * rank)
    with twin.ddp.join():
        run_on(twin.ddp, mine, twin.step)
    with ours.ddp.join():
        run_on(ours.ddp, mine, nothing)
    return {
        # torch steps only while a rank has data, so only the last rank can compare its state.
        "differences": [
            pair.name
            for pair in pairs(ours, twin)
            if not pair.same and (rank == ranks - 1 or ":" not in pair.name)
        ],
        "digest": digest(ours.tensors()),
        "steps": {name: int(one.step) for name, one in ours.leaves().items()},
    }


def on_subgroup(name: str) -> dict[str, Any]:
    """Compare on two ranks of four; the other ranks leave before the comparison begins."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return {"group rank": None, "iterations": []}
    return {"group rank": dist.get_rank(group), "iterations": compare(CASES[name], group)}


def freed(unused: bool) -> list[str]:
    """Return the names of the objects that outlive a dropped DDP module with our hook.

    A thread of gloo can still hold the last bucket, so the function waits for it. Meanwhile the
    process group stays alive, and must not hold any part of the module.
    """
    held = mock.patch.object(group_lifetime, "SECONDS", 1000.0)
    ours = Ours(SGD._replace(ddp=UNUSED if unused else SMALL), Tower())
    backward(ours.ddp, 0)
    watched = {
        "ddp": weakref.ref(ours.ddp),
        "module": weakref.ref(ours.ddp.module),
        "parameter": weakref.ref(ours.ddp.module.layers[0].weight),
    }
    until = time.monotonic() + 120
    with held:
        del ours
        while True:
            gc.collect()
            left = [name for name, reference in watched.items() if reference() is not None]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.01)


def one_fails(rank_that_fails: int, leaves: bool) -> dict[str, str]:
    """Fail on one rank during backward; this rank then ends, or waits for the other's end."""
    store = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    ours = Ours(ADAMW._replace(ddp=UNUSED), Tower())
    backward(ours.ddp, 0)
    ours.ddp.zero_grad()

    def fail(gradient: Tensor) -> None:
        raise OSError("the disk is full")

    fails = dist.get_rank() == rank_that_fails
    if fails:
        ours.ddp.module.layers[2].weight.register_hook(fail)
    try:
        backward(ours.ddp, 1)
    except (RuntimeError, OSError) as error:
        if fails and leaves:
            os._exit(3)
        if fails:
            store.wait(["the other has ended"], timedelta(seconds=120))
        store.set("the other has ended", "")
        return {"type": type(error).__name__, "text": str(error)}
    return {}
