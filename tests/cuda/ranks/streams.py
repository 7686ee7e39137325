"""Jobs of ranks with delays in streams: before collectives, gradients and steps."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hooks.averaging.rank_means import RankMeans
from sharding.transport import NcclTransport
from sharding.zero.coalescing import ElementMessage
from tests.zero_hooks.cases import CASES
from tests.zero_hooks.runs import Run, compare

from .over_nccl import group_on_devices, on_device

LONGEST = 400_000
"""Cycles of the longest delay: some tenths of a millisecond."""


def delay(chance: random.Random) -> None:
    """Keep the current stream busy for a random time; the host does not wait."""
    if chance.random() < 0.5:
        torch.cuda._sleep(chance.randrange(LONGEST))


def _late(chance: random.Random, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        delay(chance)
        result = function(*args, **kwargs)
        delay(chance)
        return result

    return called


@contextmanager
def late_streams(seed: int) -> Iterator[None]:
    """Delay the start and the end of work on a stream that another stream waits for."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        for owner, name in (
            (NcclTransport, "reduce_scatter"),
            (NcclTransport, "all_gather"),
            (ElementMessage, "allocate_buffer"),
        ):
            found = getattr(owner, name)
            late = _late(chance, found)
            stack.enter_context(
                mock.patch.object(owner, name, lambda self, *a, call=late, **k: call(self, *a, **k))
            )
        yield


def hook_when_late(
    name: str, kind: str, policy: str, iterations: int, side: bool
) -> dict[str, Any]:
    """Compare a ZeRO hook with one process under delays; ``side`` uses a stream of the caller."""
    group = group_on_devices()
    case = CASES[name]
    chance = random.Random(dist.get_rank())

    def model() -> torch.nn.Module:
        made = on_device(case.model)
        for param in made.parameters():
            param.register_hook(lambda _: delay(chance))
        return made

    made = case._replace(kind=kind, policy=policy, model=model, iterations=iterations)
    stream: Any = torch.cuda.stream(torch.cuda.Stream()) if side else nullcontext()
    with stream, late_streams(dist.get_rank()):
        seen = compare(made, group)
    return {"apart": max(seen["apart"]), "losses": all(seen["losses"]), "digest": seen["digest"]}


def background_means(iterations: int) -> dict[str, Any]:
    """Compute means on a background thread and stream while the caller's stream still writes."""
    group = group_on_devices()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chance = random.Random(rank)
    means = RankMeans(group, background=True)
    wrong = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(iterations):
            delay(chance)
            one = torch.full((4099,), float(number + rank), device="cuda")
            pending = means.launch([one])
            one.zero_()  # launch() has copied the tensor
            delay(chance)
            (got,) = pending()
            kept = got.clone()
            got.fill_(-1.0)  # overwrite the memory of the mean after its use
            want = number + (size - 1) / 2
            if not bool((kept == want).all()):
                wrong.append((number, float(kept.min()), float(kept.max())))
    return {"wrong": wrong}


def synchronisations(options: dict[str, Any], iterations: int) -> dict[str, Any]:
    """Return the number of times per iteration that the host waits, and the growth of memory."""
    group = group_on_devices()
    torch.manual_seed(0)
    case = CASES["tower"]
    run = Run(case._replace(hook=options), on_device(case.model), group)
    batch = torch.randn(8, next(run.ddp.parameters()).shape[1], device="cuda")

    def iterate() -> None:
        run.ddp.zero_grad()
        run.ddp(batch, dist.get_rank(group), 0).square().mean().backward()

    for _ in range(4):
        iterate()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(iterations):
            iterate()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - held
    waits = [str(one.message) for one in said if "called a synchronizing" in str(one.message)]
    return {"waits": len(waits) / iterations, "grown": grown}


def one_bad_rank(poison: float) -> dict[str, Any]:
    """Make the gradient of one rank infinite or NaN in one iteration; no rank may step in it."""
    group = group_on_devices()
    torch.manual_seed(0)
    case = CASES["tower"]
    run = Run(case._replace(hook={"skip_nonfinite": True}), on_device(case.model), group)
    width = next(run.ddp.parameters()).shape[1]
    moved = []
    for bad in (False, True, False):
        before = [one.detach().clone() for one in run.ddp.parameters()]
        run.ddp.zero_grad()
        factor = poison if bad and dist.get_rank(group) == 1 else 1.0
        batch = torch.ones(4, width, device="cuda") * (1 + dist.get_rank(group))
        loss = run.ddp(batch, dist.get_rank(group), 0).square().mean() * factor
        loss.backward()
        moved.append(any(map(_differ, before, run.ddp.parameters())))
    return {"moved": moved, "finite": all(bool(p.isfinite().all()) for p in run.ddp.parameters())}


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other.detach())
