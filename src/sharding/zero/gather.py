"""Making parameters whole again: what each rank owns, to all others, in as few messages as may be.

In flat buffers a rank's share is a range of each, and goes as it lies. Otherwise a large parameter
goes by itself, and small ones are packed: a message costs about as much as copying some hundred
kilobytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sharding.shard_plan import ShardPlan
from sharding.transport import Range, Transport, Work
from sharding.zero.memory import Home, Memory

DIRECT = 1 << 16
"""Elements from which a parameter is worth messages of its own."""
PACK = 1 << 20
"""Most elements that are packed together."""
IN_FLIGHT = 4
"""How many packs may be under way: so much memory is used for them at most."""


class Span(NamedTuple):
    """Elements of a flat tensor, and who has them."""

    start: int
    stop: int
    rank: int


class Direct(NamedTuple):
    """Ranges that go as they lie."""

    flat: Tensor
    ranges: tuple[Range, ...]


class Part(NamedTuple):
    """Elements [start, stop) of a parameter that go in a pack, at an offset of it."""

    home: Home
    start: int
    stop: int
    offset: int
    rank: int

    def view(self) -> Tensor:
        """The parameter's own memory."""
        if self.home.flat is None:
            return self.home.seen
        return self.home.flat[self.start : self.stop]

    def packed(self, pack: Tensor) -> Tensor:
        """The same elements in the pack."""
        piece = pack[self.offset : self.offset + self.stop - self.start]
        return piece.view(self.home.seen.shape) if self.home.flat is None else piece


class Pack(NamedTuple):
    """Small parameters that go together."""

    length: int
    like: Tensor
    parts: tuple[Part, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Route:
    """How some parameters travel: made once, used at every step."""

    direct: tuple[Direct, ...]
    packs: tuple[Pack, ...]


def route_of(memory: Memory, plan: ShardPlan, paths: Iterable[str]) -> Route:
    """How these parameters become whole on every rank, from where they lie now."""
    size = plan.shard_ranks  # the group of a gather is that of one replica
    buffers: dict[int, list[Span]] = {}
    direct: list[Direct] = []
    small: dict[tuple[torch.dtype, torch.device], list[tuple[Home, Span]]] = {}
    for path in paths:
        home = memory.homes[path]
        spans = [Span(one.start, one.stop, one.ranks[0]) for one in plan.owners(path)]
        if home.param.numel() == 0:
            continue
        if home.buffer is not None:
            shifted = [Span(home.offset + a, home.offset + b, rank) for a, b, rank in spans]
            buffers.setdefault(home.buffer, []).extend(shifted)
        elif home.flat is not None and home.param.numel() >= DIRECT:
            direct += [Direct(home.flat, ranges) for ranges in _rounds(spans, size)]
        else:
            kind = (home.param.dtype, home.param.device)
            small.setdefault(kind, []).extend((home, span) for span in spans)
    for number, found in sorted(buffers.items()):
        direct += [Direct(memory.buffers[number], ranges) for ranges in _rounds(found, size)]
    packs = [pack for alike in small.values() for pack in _packs(alike, size)]
    return Route(tuple(direct), tuple(packs))


def _rounds(spans: Iterable[Span], size: int) -> list[tuple[Range, ...]]:
    """One range of each rank at a time; usually one round is all."""
    of_rank: list[list[Range]] = [[] for _ in range(size)]
    for start, stop, rank in sorted(spans):
        own = of_rank[rank]
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], stop)
        elif start < stop:
            own.append((start, stop))
    return [
        tuple(own[at] if at < len(own) else (0, 0) for own in of_rank)
        for at in range(max(map(len, of_rank)))
    ]


def _packs(alike: Sequence[tuple[Home, Span]], size: int) -> list[Pack]:
    """Spans in packs of a bounded size, each in the order of ranks."""
    runs: list[list[tuple[Home, Span]]] = []
    room = 0
    for home, span in alike:
        length = span.stop - span.start
        if not runs or length > room:
            runs.append([])
            room = PACK
        runs[-1].append((home, span))
        room -= length
    return [_pack(run, size) for run in runs]


def _pack(run: Sequence[tuple[Home, Span]], size: int) -> Pack:
    parts: list[Part] = []
    at = 0
    for home, (start, stop, rank) in sorted(run, key=lambda one: one[1].rank):
        parts.append(Part(home, start, stop, at, rank))
        at += stop - start
    ranges = _rounds(
        (Span(one.offset, one.offset + one.stop - one.start, one.rank) for one in parts), size
    )
    assert len(ranges) == 1, "in the order of ranks, each has one range"
    return Pack(at, run[0][0].param, tuple(parts), ranges[0])


@dataclass
class GatherWork:
    """Parameters on their way. They are whole after :meth:`wait`.

    Packs leave one after the other, so each rank has to wait.
    """

    memory: Memory
    paths: Sequence[str]
    works: list[Work]
    packs: list[Pack]
    transports: Mapping[torch.device, Transport]
    under_way: list[tuple[Pack, Tensor, Work]] = field(default_factory=list)

    def launch(self) -> None:
        """Send as many packs as may be under way."""
        while self.packs and len(self.under_way) < IN_FLIGHT:
            pack = self.packs.pop(0)
            transport = self.transports[pack.like.device]
            held = pack.like.detach().new_empty(pack.length)
            own = [one for one in pack.parts if one.rank == transport.rank]
            _copy([one.packed(held) for one in own], [one.view() for one in own])
            work = transport.all_gather(held, pack.ranges)
            self.under_way.append((pack, held, work))

    def wait(self) -> None:
        """Return when every parameter is whole.

        Raises:
            TransportError: names the ranks that did not come.
        """
        while self.under_way:
            pack, held, work = self.under_way.pop(0)
            work.wait()
            rank = self.transports[pack.like.device].rank
            others = [one for one in pack.parts if one.rank != rank]
            _copy([one.view() for one in others], [one.packed(held) for one in others])
            self.launch()
        for work in self.works:
            work.wait()
        self.works = []
        self.memory.mark_changed(self.paths)
        self.paths = ()


def gather(
    memory: Memory, route: Route, paths: Sequence[str], transports: Mapping[torch.device, Transport]
) -> GatherWork:
    """Launch a gather by a route."""
    works = [transports[one.flat.device].all_gather(one.flat, one.ranges) for one in route.direct]
    work = GatherWork(memory, paths, works, list(route.packs), transports)
    work.launch()
    return work


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
