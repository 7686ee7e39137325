"""A process group whose ranks are threads of one process; see :mod:`sharding.transport.local`."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial, reduce
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sharding.transport.local_meeting import Act, Board, Meeting
from sharding.transport.protocol import TransportError

_SUMS: tuple[tuple[Any, Callable[[Tensor, Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
)


class LocalGroup(dist.ProcessGroup):
    """Side of a rank in a group of threads; made by :class:`~sharding.transport.local.LocalWorld`.

    It takes the collectives that DistributedDataParallel and sharded optimizers need, from torch's
    functions (``torch.distributed.all_reduce(tensor, group=group)``) and from DDP itself. Sums are
    made in the order of ranks.

    Args:
        board: where the ranks of the world meet.
        name: of the group, the same on all its ranks.
        ranks: the numbers in the world of its ranks, in their order.
        rank: the number in it of this one.
    """

    def __init__(self, board: Board, name: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # a group in Python has no store
        self.board = board
        self.ranks = tuple(ranks)
        """Numbers in the world, by those in the group."""
        self._name = name
        self._parts = itertools.count()
        self._channels = itertools.count()
        self._numbers: defaultdict[Hashable, itertools.count[int]] = defaultdict(itertools.count)

    def part(self, ranks: Sequence[int]) -> "LocalGroup":
        """This rank's side of a group of some of the ranks. Each rank makes its own, in turn.

        Args:
            ranks: their numbers in the world.
        """
        name = f"{self._name}, part {next(self._parts)} of ranks {list(ranks)}"
        return LocalGroup(self.board, name, ranks, ranks.index(self.ranks[self.rank()]))

    def channel(self) -> str:
        """The name of one more sequence of operations: the n-th on each rank is the same one."""
        return f"channel {next(self._channels)}"

    def meet(
        self,
        sequence: Hashable,
        what: str,
        given: Any,
        act: Act = lambda given: None,
        members: Iterable[int] | None = None,
    ) -> Meeting:
        """Come to the next operation of a sequence.

        Args:
            sequence: the n-th operations of one on all ranks are the same.
            what: the operation does, for errors; the same on all ranks.
            given: by this rank, for the others.
            act: done once, when the last has come.
            members: those that take part; by default all.
        """
        number = next(self._numbers[sequence])
        members = range(self.size()) if members is None else members
        meeting = Meeting(what, self.ranks, tuple(members))
        key = (self._name, sequence, number)
        return self.board.come(key, self.rank(), given, meeting, act)

    def _collective(self, what: str, given: Any, act: Act, result: Any) -> dist.Work:
        return _LocalWork(self.meet("collectives", what, given, act), result)

    # ------------------------------------------------------------- as torch's functions call them

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """The name of the backend."""
        return "local"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Sums, or what else was asked for, in the order of ranks."""
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        name, combine = next((str(op), way) for op, way in _SUMS if asked == op)

        def act(given: Mapping[int, list[Tensor]]) -> None:
            for terms in zip(*given.values(), strict=True):
                _copied(reduce(combine, (term.detach() for term in terms)), terms)

        return self._collective(f"all_reduce ({name}) of {_shown(tensors)}", tensors, act, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Send the tensors of one rank to all."""
        root = opts.rootRank

        def act(given: Mapping[int, list[Tensor]]) -> None:
            for places in zip(*given.values(), strict=True):
                _copied(places[root].detach().clone(), places)

        what = f"broadcast from group rank {root} of {_shown(tensors)}"
        return self._collective(what, tensors, act, tensors)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Every rank's tensors to all."""

        def act(given: Mapping[int, Any]) -> None:
            for number, sources in enumerate(zip(*(own for _, own in given.values()), strict=True)):
                for outputs, _ in given.values():
                    for place, source in zip(outputs[number], sources, strict=True):
                        _copied(source, [place])

        what = f"all_gather of {_shown(input_tensors)}"
        return self._collective(what, (output_tensors, input_tensors), act, output_tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Nothing but that all have come."""
        return self._collective("barrier", None, lambda given: None, [])

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:  # noqa: N803
        """To one other rank, which receives it under the same tag."""
        return self._passed(self.rank(), dstRank, tag, tensors)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:  # noqa: N803
        """From one other rank."""
        return self._passed(srcRank, self.rank(), tag, tensors)

    def _passed(self, source: int, target: int, tag: int, tensors: list[Tensor]) -> dist.Work:
        def act(given: Mapping[int, list[Tensor]]) -> None:
            for sent, place in zip(given[source], given[target], strict=True):
                _copied(sent, [place])

        what = f"message from group rank {source} to {target} of {_shown(tensors)}"
        sequence = ("messages", source, target, tag)
        meeting = self.meet(sequence, what, tensors, act, (source, target))
        if meeting.error is not None:
            raise TransportError(meeting.error)  # as torch's groups do, of a rank that is gone
        return _LocalWork(meeting, tensors)


def _copied(value: Tensor, places: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for place in places:
            place.detach().copy_(value.detach())


def _shown(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{one.numel()} x {str(one.dtype).removeprefix('torch.')}" for one in tensors)


class _LocalWork(dist.Work):
    """Work object for torch and DDP: its result is there when the meeting has ended well."""

    def __init__(self, meeting: Meeting, result: Any) -> None:
        super().__init__()
        self._meeting = meeting
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when all ranks have come; 0 seconds are for ever, as torch has it.

        Raises:
            RuntimeError: they have not, in time.
            TransportError: one of them does not come.
        """
        self._meeting.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> Future[Any]:
        """A future of the result."""
        ended: Future[None] = Future()

        def finish(_: Future[None]) -> Any:
            self._meeting.wait()
            return self._result

        # A callback, and not set_exception: C++ would take an exception that was set for the value.
        done = ended.then(finish)
        if self._meeting.ended:
            ended.set_result(None)
        else:
            # What follows may wait for other ranks: not in the thread of whoever comes last.
            complete = partial(Thread, target=ended.set_result, args=(None,), daemon=True)
            self._meeting.then(lambda: complete().start())
        return done
