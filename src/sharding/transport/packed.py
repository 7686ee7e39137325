"""Tensors to and from all ranks of a group, packed for one all_to_all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim._torch.operators import foreach_copy_
from sharding.transport.protocol import TransportError

HEADER = 16
"""Number of bytes that each rank sends to each other rank before its tensors."""
ALIGN = 16
"""Tensors start at multiples of this number of bytes, as views of every dtype require."""

Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""


class PackedTensors:
    """Tensors to or from each rank, as views of one buffer of bytes.

    Args:
        forms: for each rank, the forms of its tensors. A header of :data:`HEADER` bytes is first.
        device: of the buffer.
    """

    def __init__(self, forms: Sequence[Sequence[Form]], device: torch.device) -> None:
        self.sizes: list[int] = []
        """The number of bytes of each rank."""
        placed: list[list[tuple[int, int]]] = []
        start = 0
        for own in forms:
            at, places = start + HEADER, []
            for shape, dtype in own:
                size = torch.Size(shape).numel() * dtype.itemsize
                places.append((at, size))
                at += -(-size // ALIGN) * ALIGN
            placed.append(places)
            self.sizes.append(at - start)
            start = at
        self.bytes = torch.zeros(start, dtype=torch.uint8, device=device)
        starts = [sum(self.sizes[:rank]) for rank in range(len(forms))]
        self.headers = [self.bytes[at : at + HEADER] for at in starts]
        """The header of each rank."""
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
        own = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.bytes.device)
        into = [view for views in self.tensors for view in views]
        pairs = [(a, b) for a, b in zip(into, tensors, strict=True) if b is not None]
        copy_pairs([*((one, own) for one in self.headers), *pairs])

    def read_headers(self) -> list[bytes]:
        """Return the header of each rank."""
        every = torch.stack(self.headers).cpu().tolist()
        return [bytes(one) for one in every]


def begin_exchange(
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
