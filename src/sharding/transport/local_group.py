"""Process group whose ranks are threads of one process; see :mod:`sharding.transport.local`."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from sharding.transport.local_rendezvous import Action, Rendezvous, WorldState
from sharding.transport.protocol import TransportError

_REDUCTIONS: tuple[tuple[Any, Callable[[Tensor, Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
)


class LocalGroup(dist.ProcessGroup):
    """Rank of a group of threads; made by :class:`~sharding.transport.local.LocalWorld`.

    The group has the collectives that DistributedDataParallel and sharded optimizers need, for
    torch's functions (``torch.distributed.all_reduce(tensor, group=group)``) and for DDP itself.
    Sums are in rank order. The name of a group is the same on all of its ranks.
    """

    def __init__(self, world: WorldState, name: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # a group in Python has no store
        self.world = world
        self.ranks = tuple(ranks)
        """Global ranks, in the order of group ranks."""
        self._name = name
        self._parts = itertools.count()
        self._channels = itertools.count()
        self._numbers: defaultdict[Hashable, itertools.count[int]] = defaultdict(itertools.count)

    def split(self, ranks: Sequence[int]) -> "LocalGroup":
        """Return a new group of global ranks. All members must make their groups in one order."""
        name = f"{self._name}, part {next(self._parts)} of ranks {list(ranks)}"
        return LocalGroup(self.world, name, ranks, ranks.index(self.ranks[self.rank()]))

    def new_sequence(self) -> str:
        """Return the name of a new sequence of operations: all ranks get the same n-th name."""
        return f"channel {next(self._channels)}"

    def join(
        self,
        sequence: Hashable,
        operation: str,
        value: Any,
        action: Action = lambda inputs: None,
        members: Iterable[int] | None = None,
    ) -> Rendezvous:
        """Join the next operation of a sequence.

        Args:
            sequence: the n-th operation of a sequence is the same operation on all ranks.
            operation: its name, for errors; the same on all ranks.
            value: the value of this rank.
            action: called once, when the last rank has joined.
            members: group ranks that take part; by default all.
        """
        number = next(self._numbers[sequence])
        members = range(self.size()) if members is None else members
        new = Rendezvous(operation, self.ranks, tuple(members))
        return self.world.join((self._name, sequence, number), self.rank(), value, new, action)

    def _collective(self, operation: str, value: Any, action: Action, result: Any) -> dist.Work:
        return _LocalWork(self.join("collectives", operation, value, action), result)

    # ------------------------------------------------------------ the interface of a process group

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """Return the name of the backend."""
        return "local"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce tensors over all ranks, in rank order."""
        wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        name, combine = next((str(op), combine) for op, combine in _REDUCTIONS if wanted == op)

        def action(inputs: Mapping[int, list[Tensor]]) -> None:
            for terms in zip(*inputs.values(), strict=True):
                _copy_to(terms, reduce(combine, (term.detach() for term in terms)))

        operation = f"all_reduce ({name}) of {_format_tensors(tensors)}"
        return self._collective(operation, tensors, action, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Copy the tensors of one rank to all ranks."""
        root = opts.rootRank

        def action(inputs: Mapping[int, list[Tensor]]) -> None:
            for targets in zip(*inputs.values(), strict=True):
                _copy_to(targets, targets[root].detach().clone())

        operation = f"broadcast from group rank {root} of {_format_tensors(tensors)}"
        return self._collective(operation, tensors, action, tensors)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy the tensors of every rank to all ranks."""

        def action(inputs: Mapping[int, Any]) -> None:
            for number, sources in enumerate(
                zip(*(own for _, own in inputs.values()), strict=True)
            ):
                for outputs, _ in inputs.values():
                    for target, source in zip(outputs[number], sources, strict=True):
                        _copy_to([target], source)

        operation = f"all_gather of {_format_tensors(input_tensors)}"
        return self._collective(operation, (output_tensors, input_tensors), action, output_tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._collective("barrier", None, lambda inputs: None, [])

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:  # noqa: N803
        """Send tensors to a rank, which receives them under the same tag."""
        return self._transfer(self.rank(), dstRank, tag, tensors)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:  # noqa: N803
        """Receive tensors from a rank."""
        return self._transfer(srcRank, self.rank(), tag, tensors)

    def _transfer(self, source: int, target: int, tag: int, tensors: list[Tensor]) -> dist.Work:
        def action(inputs: Mapping[int, list[Tensor]]) -> None:
            for sent, received in zip(inputs[source], inputs[target], strict=True):
                _copy_to([received], sent)

        operation = f"message from group rank {source} to {target} of {_format_tensors(tensors)}"
        sequence = ("messages", source, target, tag)
        rendezvous = self.join(sequence, operation, tensors, action, (source, target))
        if rendezvous.error is not None:
            raise TransportError(rendezvous.error)  # torch's groups also raise at the launch
        return _LocalWork(rendezvous, tensors)


def _copy_to(targets: Iterable[Tensor], value: Tensor) -> None:
    with torch.no_grad():
        for target in targets:
            target.detach().copy_(value.detach())


def _format_tensors(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{one.numel()} x {str(one.dtype).removeprefix('torch.')}" for one in tensors)


class _LocalWork(dist.Work):
    """Handle of an operation, for torch and DDP."""

    def __init__(self, rendezvous: Rendezvous, result: Any) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until all ranks have come; as in torch, 0 seconds mean no timeout.

        Raises:
            RuntimeError: the timeout has expired.
            TransportError: a rank does not come.
        """
        self._rendezvous.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> Future[Any]:
        """Return a future of the result."""
        ended: Future[None] = Future()

        def finish(_: Future[None]) -> Any:
            self._rendezvous.wait()
            return self._result

        def complete() -> None:
            self._rendezvous.ended.wait()
            ended.set_result(None)

        # With set_exception instead of this callback, C++ would use the exception as the value.
        done = ended.then(finish)
        if self._rendezvous.ended.is_set():
            complete()
        else:
            # Callbacks of the future may wait for other ranks, so they get a thread of their own:
            # the thread of the rank that comes last must not wait.
            Thread(target=complete, daemon=True).start()
        return done
