"""A world of ranks in one process, for tests: threads, sums in rank order, and no network.

What is written for a process group runs on a :class:`LocalWorld` as it is: sharded optimizers,
their checkpoints, DistributedDataParallel and its communication hooks. Ranks are threads, so a
world of 16 costs no more to start than one of 2; and whatever the threads' timing, results are the
same, bit for bit, in every run. An operation that a rank does not come to is an error on the others
that says which rank, and why; and a buffer that is written to while it is under way is one, too.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim._torch import ACTIVE_DDP_MODULE
from sharding.transport.buffers import as_bytes, as_real, check_buffer, divisor_of
from sharding.transport.local_group import LocalGroup
from sharding.transport.local_meeting import Board, Meeting
from sharding.transport.ordered_sum import add_in_rank_order
from sharding.transport.protocol import Range, Work
from sharding.transport.works import Launched

T = TypeVar("T")


class LocalWorld:
    """Ranks of one process group, each a thread of this process: ``LocalWorld(4).run(function)``.

    A rank's group is given to whatever takes a process group: there is no world of torch's here
    (``torch.distributed.is_initialized()`` is false). torch's random numbers are those of the
    process, which all ranks draw from: give each a generator of its own.

    Args:
        size: how many ranks.
        seconds: after which all operations that are waited for fail, if no rank has come to any.

    Attributes:
        groups: the group of each rank.

    Raises:
        ValueError: ``size`` is less than 1, or ``seconds`` not above 0.

    Example::

        >>> from sharding import ZeroRedundancyOptimizer
        >>> def trained(group):
        ...     model = torch.nn.Linear(2, 2)
        ...     with torch.no_grad():
        ...         [param.fill_(1.0) for param in model.parameters()]
        ...     zero = ZeroRedundancyOptimizer(
        ...         model.parameters(), torch.optim.SGD, group, policy="elements", lr=0.5)
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     zero.step()
        ...     return len(zero.owned), model.bias.tolist()
        >>> LocalWorld(3).run(trained)
        [(1, [0.5, 0.5]), (1, [0.5, 0.5]), (1, [0.5, 0.5])]
    """

    def __init__(self, size: int, *, seconds: float = 120.0) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if not seconds > 0:
            raise ValueError(f"seconds must be a number above 0, got {seconds!r}")
        self._board = Board(seconds)
        ranks = range(size)
        self.groups = tuple(LocalGroup(self._board, "world", ranks, rank) for rank in ranks)
        self._errors: dict[int, BaseException] = {}

    def run(self, function: Callable[[LocalGroup], T]) -> list[T]:
        """Call a function with each rank's group, each in a thread of its own.

        It may be called again, with other functions: what ranks keep goes on.

        Returns:
            What it returned on each rank, in their order.

        Raises:
            BaseException: what the first rank to fail has raised; notes on it tell of the others.
            RuntimeError: a call before has failed, so that ranks may be out of step; or threads
                wait for something that no rank will do.
        """
        if self._errors:
            raise RuntimeError("ranks of this world have failed, and may be out of step; make anew")
        self._board.gone.clear()
        found: dict[int, T] = {}
        threads = [
            threading.Thread(
                target=self._called, args=(function, group, found), name=f"rank {rank}", daemon=True
            )
            for rank, group in enumerate(self.groups)
        ]
        with _forward_passes_apart():
            for thread in threads:
                thread.start()
            self._watch(threads)
        if self._errors:
            raise self._first_error()
        return [found[rank] for rank in range(len(self.groups))]

    def _called(
        self, function: Callable[[LocalGroup], T], group: LocalGroup, found: dict[int, T]
    ) -> None:
        rank = group.rank()
        try:
            found[rank] = function(group)
        except BaseException as error:  # noqa: BLE001  raised again by who called run
            self._errors[rank] = error
            self._board.leave(rank, f"raised {type(error).__name__}: {error}")
        else:
            self._board.leave(rank, "had returned before it came")

    def _watch(self, threads: Sequence[threading.Thread]) -> None:
        """Return when all ranks are done; where none goes on, fail what they wait for."""
        board, gave_up = self._board, False
        with board.news:
            while len(board.gone) < len(threads):
                if board.goes_on():
                    continue
                if gave_up:
                    self._errors[-1] = RuntimeError(f"ranks hang:\n{_stacks(threads)}")
                    return
                gave_up = True
                board.give_up()

    def _first_error(self) -> BaseException:
        (rank, first), *others = self._errors.items()
        first.add_note(f"raised on rank {rank} of {len(self.groups)}")
        for other, error in others:
            first.add_note(f"rank {other} then raised {type(error).__name__}: {error}")
        return first


@contextmanager
def _forward_passes_apart() -> Iterator[None]:
    """Keep DDP's notes of the module in its forward pass apart for each thread.

    It is one note for all threads, which each puts back as it found it: that of another thread. And
    torch.compile takes whatever it compiles for a part of that module.
    """
    before = getattr(DistributedDataParallel, ACTIVE_DDP_MODULE, None)
    try:
        yield
    finally:
        setattr(DistributedDataParallel, ACTIVE_DDP_MODULE, before)


def _stacks(threads: Sequence[threading.Thread]) -> str:
    """Return the stacks of threads that have not ended."""
    frames = sys._current_frames()  # noqa: SLF001  Python has no public name
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


class _Sent:
    """Message from a rank to another: its memory, and its content at the launch."""

    def __init__(self, place: Tensor) -> None:
        self.place = place
        self.kept = place.clone()

    @property
    def is_left_alone(self) -> bool:
        """Return True if the same is there still, bit for bit."""
        return torch.equal(self.place.view(torch.uint8), self.kept.view(torch.uint8))


class LocalTransport:
    """The transport between ranks of one process; see :class:`~sharding.transport.Transport`.

    What a rank sends is as it was when the operation was launched; what it receives is in its
    buffer when it has waited, and not before: who forgets to wait finds it out in every run. What a
    rank gives for others must be left alone until then, which is checked.

    All ranks must make their transports over a group in the same order.

    Args:
        group: of a :class:`LocalWorld`.

    Example::

        >>> world = LocalWorld(2)
        >>> def mean(group):
        ...     flat = torch.tensor([1.0, 2.0]) * (1 + group.rank())
        ...     LocalTransport(group).reduce_scatter(flat, [(0, 1), (1, 2)], average=True).wait()
        ...     return flat[group.rank()].item()
        >>> world.run(mean)
        [1.5, 3.0]
    """

    rank_ordered = True

    def __init__(self, group: LocalGroup) -> None:
        self.group: dist.ProcessGroup = group
        self._local = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.bytes_sent = 0
        self._channel = group.channel()

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum in rank order: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        real, cuts = as_real(flat, ranges)
        divisor = divisor_of(flat, ranges) if average else 1
        sent = {rank: _Sent(real[start:stop]) for rank, (start, stop) in enumerate(cuts)}
        self._count(part.place for rank, part in sent.items() if rank != self.rank)
        meeting = self._launched(f"reduce_scatter, average={average},", flat, ranges, sent)

        def take(given: Mapping[int, Any]) -> None:
            others = [given[rank][self.rank].kept for rank in range(self.size) if rank != self.rank]
            others = [one.clone() for one in others]  # which the sum uses as scratch
            add_in_rank_order(sent[self.rank].place, self.rank, others, divisor)

        return self._work(meeting, sent.values(), take)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Hand ranges to all: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        raw, cuts = as_bytes(flat, ranges)
        places = [raw[start:stop] for start, stop in cuts]
        own = _Sent(places[self.rank])
        self._count(own.place for _ in range(self.size - 1))
        meeting = self._launched("all_gather", flat, ranges, own)

        def take(given: Mapping[int, Any]) -> None:
            for rank, place in enumerate(places):
                if rank != self.rank:
                    place.copy_(given[rank].kept)

        return self._work(meeting, [own], take)

    def _launched(self, what: str, flat: Tensor, ranges: Sequence[Range], sent: Any) -> Meeting:
        shown = f"{what} of {flat.numel()} x {flat.dtype}, ranges {[tuple(one) for one in ranges]}"
        return self._local.meet(self._channel, shown, sent)

    def _work(
        self,
        meeting: Meeting,
        sent: Iterable[_Sent],
        take: Callable[[Mapping[int, Any]], None],
    ) -> Work:
        """This rank's side of an operation; ``take`` writes what comes into the buffer."""

        def finish() -> None:
            given = meeting.wait()
            if not all(one.is_left_alone for one in sent):
                raise RuntimeError(
                    f"{meeting.what}: the buffer was written to before the operation was waited "
                    "for; until then it must be left alone"
                )
            with torch.no_grad():
                take(given)

        return Launched(finish)

    def _count(self, parts: Iterable[Tensor]) -> None:
        self.bytes_sent += sum(part.numel() * part.element_size() for part in parts)
