"""Tensors to and from all ranks of a group, packed for one message to each rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim._torch.operators import foreach_copy_
from sharding.transport.groups import has_messages
from sharding.transport.messages import Direction, launch_messages, wait_messages
from sharding.transport.protocol import TransportError

HEADER = 16
"""Number of bytes that each rank sends to each other rank before its tensors, in an all_to_all."""
TAG = 1 << 29
"""Tag of the messages of exchanges, different from the tags of all other messages."""
ALIGN = 16
"""Tensors start at multiples of this number of bytes, as views of every dtype require."""

Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""


class PackedTensors:
    """Tensors to or from each rank, as views of one buffer of bytes.

    Args:
        forms: for each rank, the forms of its tensors.
        device: of the buffer.
        header: the number of bytes before the tensors of each rank.
    """

    def __init__(
        self, forms: Sequence[Sequence[Form]], device: torch.device, header: int = HEADER
    ) -> None:
        self.sizes: list[int] = []
        """The number of bytes of each rank."""
        placed: list[list[tuple[int, int]]] = []
        start = 0
        for own in forms:
            at, places = start + header, []
            for shape, dtype in own:
                size = torch.Size(shape).numel() * dtype.itemsize
                places.append((at, size))
                at += -(-size // ALIGN) * ALIGN
            placed.append(places)
            self.sizes.append(at - start)
            start = at
        self.bytes = torch.zeros(start, dtype=torch.uint8, device=device)
        starts = [sum(self.sizes[:rank]) for rank in range(len(forms))]
        self.headers = [self.bytes[at : at + header] for at in starts]
        """The header of each rank."""
        self.parts = self.bytes.split(self.sizes)
        """All bytes of each rank."""
        self.tensors = [
            [
                self.bytes[at : at + size].view(dtype).view(shape)
                for (at, size), (shape, dtype) in zip(places, own, strict=True)
            ]
            for places, own in zip(placed, forms, strict=True)
        ]
        """The tensors of each rank, in the order of its forms."""

    def write(self, header: bytes, tensors: Sequence[Tensor | None]) -> None:
        """Write a header for every rank, and all tensors, rank by rank; for None, zeros."""
        into = [view for views in self.tensors for view in views]
        pairs = [(a, b) for a, b in zip(into, tensors, strict=True) if b is not None]
        if header:
            own = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.bytes.device)
            pairs += [(one, own) for one in self.headers]
        copy_pairs(pairs)

    def read_headers(self) -> list[bytes]:
        """Return the header of each rank."""
        every = torch.stack(self.headers).cpu().tolist()
        return [bytes(one) for one in every]


def begin_all_to_all(
    group: dist.ProcessGroup, found: PackedTensors, sent: PackedTensors, what: str
) -> Callable[[], None]:
    """Start an all_to_all, and return a function that waits for it.

    Args:
        group: the ranks.
        found: gets what the other ranks send to this rank.
        sent: what this rank sends.
        what: the operation, for errors: "gather matrices".
    """
    with _transport_errors(group, what):
        work = dist.all_to_all_single(
            found.bytes, sent.bytes, found.sizes, sent.sizes, group=group, async_op=True
        )
    return partial(_wait, group, what, work, sent)


def exchange_packed(
    group: dist.ProcessGroup, found: PackedTensors, sent: PackedTensors, what: str
) -> None:
    """Exchange tensors between those ranks that have something to send to each other.

    Arguments as for :func:`begin_all_to_all`. If the backend has messages, a rank that sends and
    receives nothing need not come, and errors name the rank that is lost.
    """
    if sent.bytes.device.type != "cpu" or not has_messages(group, sent.bytes.device):
        begin_all_to_all(group, found, sent, what)()
        return
    moves = []
    for rank, (coming, going) in enumerate(zip(found.parts, sent.parts, strict=True)):
        if rank == group.rank():
            coming.copy_(going)
            continue
        moves.append((Direction.FROM, rank, coming, coming.numel()))
        moves.append((Direction.TO, rank, going, going.numel()))
    wait_messages(what, group, launch_messages(what, group, moves, TAG))


def _wait(group: dist.ProcessGroup, what: str, work: dist.Work, sent: PackedTensors) -> None:
    """Wait for an exchange, until whose end the sent tensors must stay alive."""
    with _transport_errors(group, what):
        work.wait()


@contextmanager
def _transport_errors(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Turn errors of torch into a TransportError."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            f"group rank {group.rank()} could not {what}: another rank died, or did not "
            f"come within the group's timeout ({error})"
        ) from error


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        with torch.no_grad():
            foreach_copy_([into for into, _ in pairs], [value for _, value in pairs])
