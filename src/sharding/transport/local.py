"""World of ranks in one process, for tests: threads, sums in rank order, and no network.

Code for process groups runs unchanged on a :class:`LocalWorld`: sharded optimizers, their
checkpoints, DistributedDataParallel and its communication hooks. Ranks are threads, so a world of
16 starts as fast as a world of 2. Results do not depend on thread timing: their bits are equal in
every run. If a rank does not come to an operation, the other ranks raise an error that names the
rank and the reason. Writing to the buffer of a pending operation is an error too.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim._torch.distributed import ACTIVE_DDP_MODULE
from sharding.transport.buffers import as_bytes, as_real, check_buffer, prepare_average
from sharding.transport.local_group import LocalGroup
from sharding.transport.local_rendezvous import WorldState
from sharding.transport.ordered_sum import add_in_rank_order
from sharding.transport.protocol import Range, Work
from sharding.transport.work import PendingWork

T = TypeVar("T")

_STUCK = -1
"""The key of the error of ranks that hang."""


class LocalWorld:
    """Ranks of one process group, each a thread of this process: ``LocalWorld(4).run(function)``.

    Pass a rank's group to functions that take a process group: torch has no default group here
    (``torch.distributed.is_initialized()`` is false). All ranks share torch's random number
    generator, so give each rank its own generator.

    Args:
        size: number of ranks.
        seconds: timeout. If no rank comes to an operation for so long, all pending operations fail.

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
        self._state = WorldState(seconds)
        ranks = range(size)
        self.groups = tuple(LocalGroup(self._state, "world", ranks, rank) for rank in ranks)
        self._errors: dict[int, BaseException] = {}

    def run(self, function: Callable[[LocalGroup], T]) -> list[T]:
        """Call a function with the group of each rank, each in its own thread.

        It can be called again, with other functions. The groups keep their state.

        Returns:
            The results, in rank order.

        Raises:
            BaseException: the error of the first rank that failed; its notes name other errors.
            RuntimeError: an earlier call has failed, so ranks may be out of step; or threads hang.
        """
        if self._errors:
            raise RuntimeError(
                "ranks of this world have failed, and may be out of step; create a new LocalWorld"
            )
        self._state.left.clear()
        results: dict[int, T] = {}
        threads = [
            threading.Thread(
                target=self._run_rank,
                args=(function, group, results),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank, group in enumerate(self.groups)
        ]
        with _restore_active_ddp_module():
            for thread in threads:
                thread.start()
            self._wait_for_threads(threads)
        if _STUCK not in self._errors:
            for thread in threads:  # a thread that still runs when the program ends aborts it
                thread.join()
        if self._errors:
            raise self._first_error()
        return [results[rank] for rank in range(len(self.groups))]

    def _run_rank(
        self, function: Callable[[LocalGroup], T], group: LocalGroup, results: dict[int, T]
    ) -> None:
        rank = group.rank()
        try:
            results[rank] = function(group)
        except BaseException as error:  # noqa: BLE001  raised again by run
            self._errors[rank] = error
            self._state.leave(rank, f"raised {type(error).__name__}: {error}")
        else:
            self._state.leave(rank, "had returned before it came")

    def _wait_for_threads(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for all ranks. After a timeout without progress, fail the pending operations."""
        state, has_failed = self._state, False
        with state.changed:
            while len(state.left) < len(threads):
                if state.wait_for_progress():
                    continue
                if has_failed:
                    self._errors[_STUCK] = RuntimeError(f"ranks hang:\n{_stacks(threads)}")
                    return
                has_failed = True
                state.fail_pending()

    def _first_error(self) -> BaseException:
        (rank, first), *others = self._errors.items()
        first.add_note(f"raised on rank {rank} of {len(self.groups)}")
        for other, error in others:
            first.add_note(f"rank {other} then raised {type(error).__name__}: {error}")
        return first


@contextmanager
def _restore_active_ddp_module() -> Iterator[None]:
    """Restore DDP's class attribute with the module in its forward pass.

    Each thread saves and restores the attribute, and may restore the module of another thread.
    torch.compile would then treat later code as a part of that module.
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


class LocalTransport:
    """Transport between ranks of one process; see :class:`~sharding.transport.Transport`.

    The values at the launch are sent. Received values are written to the buffer in ``wait()``, not
    before, so a missing wait shows in every run. The sent parts must not be changed before
    ``wait()``; this is checked.

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
        self._sequence = group.new_sequence()

    def reduce_scatter(
        self, flat: Tensor, ranges: Sequence[Range], *, average: bool = False
    ) -> Work:
        """Sum in rank order: see :meth:`sharding.transport.Transport.reduce_scatter`."""
        check_buffer(flat, ranges, self.size)
        real, cuts = as_real(flat, ranges)
        divisor = prepare_average(flat, ranges) if average else 1
        parts = [real[start:stop] for start, stop in cuts]
        self._count(part for rank, part in enumerate(parts) if rank != self.rank)

        def add(sent: Mapping[int, Sequence[Tensor]]) -> None:
            others = [sent[rank][self.rank] for rank in range(self.size) if rank != self.rank]
            others = [one.clone() for one in others]  # the sum overwrites its terms
            add_in_rank_order(parts[self.rank], self.rank, others, divisor)

        return self._launch(f"reduce_scatter, average={average},", flat, ranges, parts, add)

    def all_gather(self, flat: Tensor, ranges: Sequence[Range]) -> Work:
        """Gather ranges: see :meth:`sharding.transport.Transport.all_gather`."""
        check_buffer(flat, ranges, self.size)
        raw, cuts = as_bytes(flat, ranges)
        parts = [raw[start:stop] for start, stop in cuts]
        own = parts[self.rank]
        self._count(own for _ in range(self.size - 1))

        def copy(sent: Mapping[int, Sequence[Tensor]]) -> None:
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    part.copy_(sent[rank][0])

        return self._launch("all_gather", flat, ranges, [own], copy)

    def _launch(
        self,
        operation: str,
        flat: Tensor,
        ranges: Sequence[Range],
        parts: Sequence[Tensor],
        write: Callable[[Mapping[int, Sequence[Tensor]]], None],
    ) -> Work:
        """Send copies of parts; ``write`` writes the copies of all ranks to the buffer."""
        text = (
            f"{operation} of {flat.numel()} x {flat.dtype}, ranges {[tuple(one) for one in ranges]}"
        )
        copies = [part.clone() for part in parts]
        rendezvous = self._local.join(self._sequence, text, copies)

        def finish() -> None:
            sent = rendezvous.wait()
            for part, copy in zip(parts, copies, strict=True):
                if not torch.equal(part.view(torch.uint8), copy.view(torch.uint8)):
                    raise RuntimeError(
                        f"{text}: the buffer was written to before the operation was waited for; "
                        "until then it must be left alone"
                    )
            with torch.no_grad():
                write(sent)

        return PendingWork(finish)

    def _count(self, parts: Iterable[Tensor]) -> None:
        self.bytes_sent += sum(part.numel() * part.element_size() for part in parts)
