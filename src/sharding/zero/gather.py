"""Gather of parameters: each rank sends what it owns to all other ranks, in few messages.

In flat buffers, each rank owns one range of each buffer, which is sent without a copy. Otherwise
large parameters are sent alone, and small ones are coalesced.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from functional_optim.engine.groups import LeafChain, StepLeaf
from functional_optim.engine.states import view_leaf
from sharding.ownership import Owner
from sharding.shard_plan import ShardPlan
from sharding.transport import Transport, Work
from sharding.transport.work import PendingWork
from sharding.zero import coalescing
from sharding.zero.coalescing import ElementMessage, OwnedTensor
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import Groups

IN_FLIGHT = 4
"""Maximum number of coalesced messages in flight, which limits the memory for them."""


def plan_gather(
    memory: ParameterMemory, plan: ShardPlan, paths: Iterable[str], size: int | None = None
) -> tuple[ElementMessage, ...]:
    """Return the messages that gather parameters, in a group of ``size``; by default, a replica."""
    in_buffers: dict[int, list[Owner]] = {}
    flats: list[tuple[Tensor, Sequence[Owner]]] = []
    small: list[OwnedTensor] = []
    for path in paths:
        location, owners = memory.locations[path], plan.owners(path)
        if location.buffer is not None:
            at = location.offset
            shifted = [Owner(ranks, at + start, at + stop) for ranks, start, stop in owners]
            in_buffers.setdefault(location.buffer, []).extend(shifted)
        elif location.flat is None:  # not cut
            small.append((location.known, owners[0].ranks[0]))
        elif location.flat.numel() >= coalescing.DIRECT:
            flats.append((location.flat, owners))
        else:
            small += [(location.flat[a:b], ranks[0]) for ranks, a, b in owners]
    flats += [(memory.buffers[number], owners) for number, owners in sorted(in_buffers.items())]
    return coalescing.plan_messages(flats, small, plan.shard_ranks if size is None else size)


def start_gather(
    memory: ParameterMemory,
    messages: Sequence[ElementMessage],
    paths: Sequence[str],
    transports: Mapping[torch.device, Transport],
    in_flight: int | None = IN_FLIGHT,
) -> Work:
    """Start to gather parameters. They are whole after ``wait()`` of the result.

    Unless all coalesced messages are in flight at once, they are sent one after another. Then every
    rank must wait, and all ranks in the same order.

    Args:
        memory: of the parameters.
        messages: that gather them.
        paths: of the parameters that are marked as changed for autograd.
        transports: over one group, by device.
        in_flight: maximum number of coalesced messages in flight; None for no limit.
    """
    direct: list[Callable[[], object]] = []
    """Functions that wait for direct messages."""
    under_way: deque[Callable[[], object]] = deque()
    """Functions that wait for coalesced messages."""
    left: deque[ElementMessage] = deque()
    for message in messages:
        if message.places:
            left.append(message)
        else:
            direct.append(message.gather(transports[message.device]))
    most = len(left) if in_flight is None else in_flight

    def send() -> None:
        while left and len(under_way) < most:
            one = left.popleft()
            under_way.append(one.gather(transports[one.device]))

    def finish() -> None:
        while under_way:
            under_way.popleft()()
            send()
        for wait in direct:
            wait()
        memory.mark_changed(paths)

    send()
    return PendingWork(finish, transports)


def gather_views(
    shards: LocalShards, groups: Groups, params: Iterable[Tensor], gather: Callable[[], object]
) -> list[Tensor]:
    """Return the evaluation value of each parameter, as new tensors. Collective.

    Each rank writes the views of its shards into the parameters, all parameters are gathered, and
    then swapped with their old values. So no memory is used besides the result. If a rank dies or
    does not come, the parameters keep their old values.
    """
    every = list(params)
    shards.complete(groups)
    with torch.no_grad():
        views = _views(shards, groups)
        found = [param.detach().clone() for param in every]
        try:
            for shard, view in views:
                shard.tensor.detach().copy_(view)
            gather()
        except BaseException:
            for param, before in zip(every, found, strict=True):
                param.detach().copy_(before)
            raise
        for param, before in zip(every, found, strict=True):
            view = param.detach().clone()
            param.detach().copy_(before)
            before.copy_(view)
    return found


def _views(shards: LocalShards, groups: Groups) -> list[tuple[LocalShard, Tensor]]:
    """Return each shard that has state, and its value to evaluate with."""
    every, found = list(shards.with_state()), []
    states = shards.states_of(every, groups, [True] * len(every))
    for shard, state in zip(every, states, strict=True):
        own = shards.chain_of(shard, groups)
        chain = LeafChain((), own.stages, own.hypers)
        leaf = StepLeaf(0, shard.tensor.detach(), state, chain, shard.path)
        found.append((shard, view_leaf(leaf)))
    return found
