"""Making parameters whole again: what each rank owns, to all others, in as few messages as may be.

In flat buffers a rank's share is a range of each, and goes as it lies. Otherwise a large parameter
goes by itself, and small ones are coalesced.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sharding.shard_plan import ShardPlan
from sharding.transport import Transport, Work
from sharding.transport.works import Queued
from sharding.zero import coalescing
from sharding.zero.coalescing import Coalesced, Coalescing, Owned, OwnedSpan, copy
from sharding.zero.parameter_memory import ParameterMemory

IN_FLIGHT = 4
"""How many coalesced messages may be under way: so much memory is used for them at most."""


def messages_of(
    memory: ParameterMemory, plan: ShardPlan, paths: Iterable[str], size: int | None = None
) -> Coalescing:
    """Return the messages that make these parameters whole on every rank.

    Args:
        memory: where that is.
        plan: who owns them.
        paths: of the parameters.
        size: of the group; by default it is that of one replica.
    """
    in_buffers: dict[int, list[OwnedSpan]] = {}
    flats = []
    small: list[Owned] = []
    for path in paths:
        location = memory.locations[path]
        spans = [OwnedSpan(one.start, one.stop, one.ranks[0]) for one in plan.owners(path)]
        if location.buffer is not None:
            shifted = [
                OwnedSpan(location.offset + a, location.offset + b, rank) for a, b, rank in spans
            ]
            in_buffers.setdefault(location.buffer, []).extend(shifted)
        elif location.flat is None:
            small += [Owned(location.seen, span.rank) for span in spans]  # one: it is whole
        elif location.flat.numel() >= coalescing.DIRECT:
            flats.append((location.flat, spans))
        else:
            small += [Owned(location.flat[a:b], rank) for a, b, rank in spans]
    flats += [(memory.buffers[number], spans) for number, spans in sorted(in_buffers.items())]
    return coalescing.planned(flats, small, plan.shard_ranks if size is None else size)


class GatherWork:
    """Parameters on their way. They are whole after :meth:`wait`.

    Coalesced messages leave one after the other, so each rank has to wait, and in the same order as
    the others, unless all may be under way at once.

    Args:
        memory: where the parameters are.
        messages: how they travel.
        paths: of the parameters, for autograd to be told of when they are whole.
        transports: over one group, by device.
        in_flight: how many coalesced messages may be under way; None for all.
    """

    def __init__(
        self,
        memory: ParameterMemory,
        messages: Coalescing,
        paths: Sequence[str],
        transports: Mapping[torch.device, Transport],
        in_flight: int | None = IN_FLIGHT,
    ) -> None:
        self._memory = memory
        self._paths = paths
        self._transports = transports
        self._works: list[Work] = [
            transports[one.flat.device].all_gather(one.flat, one.ranges) for one in messages.direct
        ]
        self._left = list(messages.coalesced)
        self._in_flight = len(self._left) if in_flight is None else in_flight
        self._under_way: list[tuple[Coalesced, list[Tensor], Work]] = []
        self._lock = threading.Lock()
        self._done: list[Queued] | None = None
        self._launch()

    def _launch(self) -> None:
        """Send as many messages as may be under way."""
        while self._left and len(self._under_way) < self._in_flight:
            one = self._left.pop(0)
            transport = self._transports[one.device]
            (buffer, parts), own = one.staging(), one.places[transport.rank]
            copy(parts[own], one.views[own])
            self._under_way.append((one, parts, transport.all_gather(buffer, one.ranges)))

    def wait(self) -> None:
        """Return when every parameter is whole. Any thread may call it, any number of times.

        On an accelerator: when that is queued before whatever the caller's stream does next.

        Raises:
            TransportError: names the ranks that did not come.
        """
        with self._lock:
            if self._done is not None:
                for queued in self._done:  # the first waiter's copies, in the first waiter's stream
                    queued.wait()
                return
            while self._under_way:
                one, parts, work = self._under_way[0]
                work.wait()
                own = one.places[self._transports[one.device].rank]
                for others in (slice(own.start), slice(own.stop, None)):
                    copy(one.views[others], parts[others])
                del self._under_way[0]
                self._launch()
            for work in self._works:
                work.wait()
            self._works = []
            self._memory.mark_changed(self._paths)
            self._done = list(map(Queued, self._transports))
