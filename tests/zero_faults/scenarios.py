"""Scenarios for each fault, which run torch's class or ours and return plain data.

The model has 12 parameters. The tests compare the number of moved parameters with 12.
"""

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from benchmarks import sockets
from sharding.transport import shared_slots
from tests.ddp import models, twins

from .sides import TORCH, Overlapped, every, make_hook, raised, zero_class

ITERATIONS = 6


def iterations(side: str, ddp: dict[str, Any]) -> dict[str, Any]:
    """Run some iterations under overlap, and return how many parameters each iteration moved."""
    run = Overlapped(side, ddp=ddp)
    return {"moved": [run.iterate() for _ in range(ITERATIONS)], "as plain": run.as_plain()}


def on_subgroup(side: str) -> dict[str, Any] | None:
    """Train on a subgroup, whose second rank has another number in the group than in the world."""
    group = dist.new_group([0, 2])
    if dist.get_rank() not in (0, 2):
        return None
    run = Overlapped(side, group=group)
    moved = [run.iterate() for _ in range(ITERATIONS)]
    return {"moved": moved, "as plain": run.as_plain()}


def learning_rates(side: str) -> dict[str, Any]:
    """Set the learning rate to 0 for two iterations, and then to another value."""
    run = Overlapped(side)
    for _ in range(3):
        run.iterate()
    stopped = [run.iterate(lr=0.0) for _ in range(2)]
    run.iterate(lr=0.3)
    return {"moved at 0": stopped, "as plain": run.as_plain()}


def refused_on_gloo(side: str) -> str:
    """Return the error of a hook that is made for a process group of gloo."""
    ddp = DistributedDataParallel(models.Tower())
    zero = zero_class(side)(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    return raised(lambda: make_hook(side, ddp, zero, on_gloo=False))


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return two groups; the second has the biases and its own learning rate."""
    named = dict(module.named_parameters())
    return [
        {"params": [one for name, one in named.items() if "weight" in name]},
        {"params": [one for name, one in named.items() if "bias" in name], "lr": 0.3},
    ]


def several_groups(side: str) -> dict[str, Any]:
    """Train two groups under overlap; return the error and the number of the failed iteration."""
    run = Overlapped(side, groups=two_groups)
    moved: list[int] = []
    error = raised(lambda: moved.extend(_moving(run)))
    return {
        "failed": len(run.rates) + 1 if error else None,
        "error": error,
        "as plain": not error and run.as_plain(),
    }


def _moving(run: Overlapped) -> Iterator[int]:
    for _ in range(ITERATIONS):
        yield run.iterate()


def mixed() -> nn.Module:
    """Return a model with layers in float32, float64 and bfloat16."""
    return models.Tower([torch.float32, torch.float64, torch.bfloat16] * 2)


def mixed_dtypes(side: str) -> dict[str, Any]:
    """Train parameters of three dtypes; return the constructor's error, or if training is right."""
    error = raised(lambda: zero_class(side)(mixed().parameters(), torch.optim.SGD, lr=0.1))
    if error:
        return {"error": error, "as plain": False}
    run = Overlapped(side, model=mixed)
    for _ in range(ITERATIONS):
        run.iterate()
    return {"error": error, "as plain": run.as_plain()}


# -- checkpoints --------------------------------------------------------------------------------


def _state_of_torch(run: Overlapped) -> dict[str, Any]:
    """Return the state dict of torch.optim.SGD after a step of the same model."""
    module = copy.deepcopy(run.start)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
    twins.loss_of(module, 0, 0).backward()  # the gradients are the same on all ranks
    optimizer.step()
    return optimizer.state_dict()


def saved_under_overlap(side: str) -> dict[str, Any]:
    """Return the errors of collecting state at first and later, and the number of entries."""
    run = Overlapped(side, momentum=0.9)
    before, _ = _saved(run.zero)
    for _ in range(4):
        run.iterate()
    after, entries = _saved(run.zero)
    return {"at first": before, "later": after, "entries": entries}


def _saved(zero: Any) -> tuple[str, int]:
    """Collect the state on each rank in turn; return the error, and the number of entries."""
    entries = 0
    for to in range(dist.get_world_size()):
        error = raised(partial(zero.consolidate_state_dict, to))
        if error:
            return error, entries  # otherwise ranks would wait for data that never comes
        if to == dist.get_rank():
            entries = len(zero.state_dict()["state"])
    return "", entries


def loaded_under_overlap(side: str) -> dict[str, Any]:
    """Load a checkpoint before the first iteration, as a resumed program does, and later again.

    Return the errors, and if the next iteration is equal to DDP with torch.optim.
    """
    run = Overlapped(side, momentum=0.9)
    state = _state_of_torch(run)

    def load() -> tuple[str, bool]:
        start = copy.deepcopy(run.ddp.module)
        error = raised(lambda: run.zero.load_state_dict(copy.deepcopy(state)))
        ddp = DistributedDataParallel(start, **run.arguments)
        optimizer = torch.optim.SGD(start.parameters(), lr=0.1, momentum=0.9, foreach=False)
        optimizer.load_state_dict(state)
        twins.backward(ddp, len(run.rates))
        optimizer.step()
        run.iterate()
        pairs = zip(start.parameters(), run.ddp.parameters(), strict=True)
        return error, all(torch.equal(one, other) for one, other in pairs)

    first = load()
    for _ in range(3):
        run.iterate()
    return {"at first": first, "later": load()}


def _stepped(side: str) -> Any:
    """Return an optimizer without overlap that has state on every rank."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(models.Tower())
    zero = zero_class(side)(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    twins.backward(ddp, 0)
    zero.step()
    return zero


def _is_whole(given: Any, kept: Any) -> bool:
    if isinstance(kept, Tensor):
        return isinstance(given, Tensor) and torch.equal(given, kept)
    return bool(given == kept)


def callers_dict(side: str) -> dict[str, Any]:
    """Load a dict without overlap, and count the states that the dict holds before and after."""
    zero = _stepped(side)
    given: dict[str, Any] = {}
    for to in range(dist.get_world_size()):
        zero.consolidate_state_dict(to)
        if to == dist.get_rank():
            given = zero.state_dict()
    kept = copy.deepcopy(given["state"])
    zero.load_state_dict(given)
    whole = [
        index
        for index, entry in kept.items()
        if given["state"].get(index) is not None
        and all(_is_whole(given["state"][index].get(key), value) for key, value in entry.items())
    ]
    return {"before": len(kept), "after": len(whole)}


def pickles(side: str) -> dict[str, Any]:
    """Collect state on rank 0 without overlap, and count the pickles of this rank."""
    zero = _stepped(side)
    with _counting() as other:
        dist.all_gather_object([None] * dist.get_world_size(), "something")
    assert other["written"] and other["read"], "pickles are not counted"
    with _counting() as counts:
        zero.consolidate_state_dict(0)
    entries = len(zero.state_dict()["state"]) if dist.get_rank() == 0 else None
    return {**counts, "entries": entries}


WRITERS = ((pickle, "Pickler"), (pickle, "dump"), (pickle, "dumps"), (c10d, "_pickler"))
READERS = ((pickle, "Unpickler"), (pickle, "load"), (pickle, "loads"), (c10d, "_unpickler"))


@contextmanager
def _counting() -> Iterator[dict[str, int]]:
    """Count all pickles that this process writes and reads."""
    counts = {"written": 0, "read": 0}
    with ExitStack() as stack:
        for what, places in (("written", WRITERS), ("read", READERS)):
            for module, name in places:
                counted = _counted(getattr(module, name), counts, what)
                stack.enter_context(mock.patch.object(module, name, counted))
        yield counts


def _counted(original: Any, counts: dict[str, int], what: str) -> Any:
    if not isinstance(original, type):

        def function(*arguments: Any, **options: Any) -> Any:
            counts[what] += 1
            return original(*arguments, **options)

        return function

    class Counted(original):  # torch derives its own class from it
        def __init__(self, *arguments: Any, **options: Any) -> None:
            counts[what] += 1
            super().__init__(*arguments, **options)

    return Counted


# -- what is sent -------------------------------------------------------------------------------


class Broad(nn.Module):
    """Model of 3 MB, so that messages about its parameters are comparatively small."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [models.WIDTH, 576, 576, 576, models.WIDTH]
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


WARM_UP, COUNTED = 3, 1  # by then, DDP's buckets are final, and torch's overlap runs
PLAIN = "DDP"
STEP = "step()"
"""Side of torch's class without overlap."""


def sent_bytes(kind: str, policy: str = "greedy", memory: bool = False) -> dict[str, Any]:
    """Return the bytes that this rank sends in an iteration, as counted by the kernel.

    Args:
        kind: a side, ``PLAIN`` for DDP alone, or ``STEP``.
        policy: the policy of our class.
        memory: True if our class exchanges data through shared memory, as by default.
    """
    with mock.patch.dict(os.environ, {shared_slots.SWITCH: str(int(memory))}):
        return _sent_bytes(kind, policy)


def _sent_bytes(kind: str, policy: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Broad()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.7)
    zero: Any = None
    if kind == STEP:
        zero = zero_class(TORCH)(every(module), torch.optim.SGD, lr=0.1)
    elif kind != PLAIN:
        options = {} if kind == TORCH else {"policy": policy}
        zero = zero_class(kind)(
            every(module), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, **options
        )
        ddp.register_comm_hook(ddp.process_group, make_hook(kind, ddp, zero))
    for number in range(WARM_UP + COUNTED):
        if number == WARM_UP:
            dist.barrier()
            before = sockets.sent()
        twins.backward(ddp, number)
        if kind == STEP:
            zero.step()
        ddp.zero_grad()
    # A rank at this barrier has received everything, so the sockets of the senders have sent it.
    dist.barrier()
    numel = sum(param.numel() for param in module.parameters())
    return {"sent": sockets.since(before) / COUNTED, "numel": numel}


@mock.patch.dict(os.environ, {shared_slots.SWITCH: "0"})
def broadcasts(kind: str) -> int:
    """Count the broadcasts of 12 parameters in one bucket in an iteration without shared memory."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(models.Tower())
    overlap = kind != STEP
    side = TORCH if kind == STEP else kind
    zero = zero_class(side)(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=overlap)
    if overlap:
        ddp.register_comm_hook(ddp.process_group, make_hook(side, ddp, zero))
    for number in range(WARM_UP):
        twins.backward(ddp, number)
        ddp.zero_grad()
    with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as counted:
        twins.backward(ddp, WARM_UP)
        if not overlap:
            zero.step()
    return counted.call_count
