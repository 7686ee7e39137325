"""Matrices on their way to their owners and back: one all_to_all each way for all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.core.dtensors import local
from sharding.matrices.shard_group import Rows, ShardGroup
from sharding.transport.protocol import TransportError
from sharding.zero.coalescing import copy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

HEADER = 16
"""Bytes that each rank tells each other one in front of the rows."""
ALIGN = 16
"""Rows begin at multiples of so many bytes, which every dtype can be read at."""

Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""


@dataclass(frozen=True, eq=False)
class OwnedMatrix:
    """A sharded parameter that is stepped as a whole, by its owner."""

    path: str
    param: "DTensor"
    owner: int
    """Its rank in the group."""
    rows: Sequence[Rows]
    """Of each rank."""
    whole: Tensor | None = None
    """Where the owner has the parameter."""
    grad: Tensor | None = None
    """Where the owner has its gradient."""

    def form_at(self, rank: int) -> Form:
        """Return the form of the rows that a rank holds."""
        start, stop = self.rows[rank]
        return (stop - start, *self.param.shape[1:]), self.param.dtype

    def rows_of(self, whole: Tensor, rank: int) -> Tensor:
        """Return the rows of a whole tensor that a rank holds, as a view."""
        start, stop = self.rows[rank]
        return whole[start:stop]


class Parcels:
    """Tensors for each rank, or from each, as views of one buffer of bytes.

    Args:
        forms: for each rank, those of its tensors; a header of :data:`HEADER` bytes comes first.
        device: of the buffer.
    """

    def __init__(self, forms: Sequence[Sequence[Form]], device: torch.device) -> None:
        self.sizes: list[int] = []
        """Bytes for each rank."""
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
        """Of each rank."""
        self.tensors = [
            [
                self.bytes[at : at + size].view(dtype).view(shape)
                for (at, size), (shape, dtype) in zip(places, own, strict=True)
            ]
            for places, own in zip(placed, forms, strict=True)
        ]
        """For each rank, in the order of its forms."""

    def write(self, header: bytes, tensors: Sequence[Tensor | None]) -> None:
        """Write a header for every rank, and all tensors, rank by rank; None is left zero."""
        own = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.bytes.device)
        into = [view for views in self.tensors for view in views]
        pairs = [(a, b) for a, b in zip(into, tensors, strict=True) if b is not None]
        copy_pairs([*((one, own) for one in self.headers), *pairs])

    def read_headers(self) -> list[bytes]:
        """Return the header of each rank."""
        every = torch.stack(self.headers).cpu().tolist()
        return [bytes(one) for one in every]


class RowExchange:
    """Moves the rows of matrices between their shards and their owners. Collective.

    Args:
        shards: the ranks.
        matrices: the same on all ranks, in the same order; each with memory at its owner.
    """

    def __init__(self, shards: ShardGroup, matrices: Sequence[OwnedMatrix]) -> None:
        self._shards, self.matrices = shards, matrices
        ranks, rank = range(shards.size), shards.rank
        self._by_owner = [[one for one in matrices if one.owner == k] for k in ranks]
        mine = self._by_owner[rank]
        self._gathered = (
            [_twice(own, rank) for own in self._by_owner],
            [_twice(mine, k) for k in ranks],
        )
        """The forms of what is sent to each rank, and of what each sends, to gather matrices."""
        self._scattered = (
            [[one.form_at(k) for one in mine] for k in ranks],
            [[one.form_at(rank) for one in own] for own in self._by_owner],
        )
        """The same to bring rows back."""
        self._device = local(shards.example.detach()).device

    def gather(self, header: bytes, grads: Mapping[str, Tensor]) -> list[bytes]:
        """Write parameters and gradients to the memory of their owners.

        Parameters travel with the gradients, so that a value which a caller has written since the
        last step is stepped.

        Args:
            header: what all other ranks are to know; :data:`HEADER` bytes.
            grads: the local rows of gradients, by path; one that is missing is left out.

        Returns:
            The header of each rank.

        Raises:
            TransportError: another rank died, or did not come.
        """
        sent, found = (Parcels(forms, self._device) for forms in self._gathered)
        rows: list[Tensor | None] = []
        for one in (one for own in self._by_owner for one in own):
            rows += [local(one.param.detach()), grads.get(one.path)]
        sent.write(header, rows)
        self._begin(found, sent, "gather matrices")()
        mine, pairs = self._by_owner[self._shards.rank], []
        for sender, views in enumerate(found.tensors):
            both = [whole for one in mine for whole in (one.whole, one.grad)]
            for one, whole, view in zip(_each_twice(mine), both, views, strict=True):
                assert whole is not None, "the owner has memory for it"
                pairs.append((one.rows_of(whole, sender), view))
        copy_pairs(pairs)
        return found.read_headers()

    def scatter(self, header: bytes, value_of: Callable[[OwnedMatrix], Tensor]) -> "PendingRows":
        """Begin to bring back the local rows of what owners have of each matrix.

        Args:
            header: what all other ranks are to know.
            value_of: gives a whole tensor of the shape and dtype of each matrix owned here.

        Raises:
            TransportError: another rank died, or did not come.
        """
        values = [(one, value_of(one)) for one in self._by_owner[self._shards.rank]]
        sent, found = (Parcels(forms, self._device) for forms in self._scattered)
        size = self._shards.size
        sent.write(header, [one.rows_of(v, k) for k in range(size) for one, v in values])
        paths = [[one.path for one in own] for own in self._by_owner]
        return PendingRows(self._begin(found, sent, "scatter matrices"), found, sent, paths)

    def _begin(self, found: Parcels, sent: Parcels, what: str) -> Callable[[], None]:
        """Begin an exchange, and return the call that waits for it."""
        with self._named(what):
            work = dist.all_to_all_single(
                found.bytes,
                sent.bytes,
                found.sizes,
                sent.sizes,
                group=self._shards.group,
                async_op=True,
            )

        def wait() -> None:
            with self._named(what):
                work.wait()

        return wait

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Raise errors of torch as those of a rank that did not come."""
        try:
            yield
        except RuntimeError as error:
            raise TransportError(
                f"group rank {self._shards.rank} could not {what}: another rank died, or did not "
                f"come within the group's timeout ({error})"
            ) from error


@dataclass(frozen=True, eq=False)
class PendingRows:
    """Rows on their way back from the owners of matrices."""

    wait_for: Callable[[], None]
    found: Parcels
    sent: Parcels
    """Kept, since the exchange reads it."""
    paths: Sequence[Sequence[str]]
    """Of the matrices of each owner."""

    def wait(self) -> tuple[list[bytes], dict[str, Tensor]]:
        """Return the header of each rank; and the rows by path, in memory of their own.

        Raises:
            TransportError: another rank died, or did not come.
        """
        self.wait_for()
        rows = {
            path: view
            for own, views in zip(self.paths, self.found.tensors, strict=True)
            for path, view in zip(own, views, strict=True)
        }
        return self.found.read_headers(), rows


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    copy([into for into, _ in pairs], [value for _, value in pairs])


def _each_twice(matrices: Sequence[OwnedMatrix]) -> list[OwnedMatrix]:
    return [one for one in matrices for _ in range(2)]


def _twice(matrices: Sequence[OwnedMatrix], rank: int) -> list[Form]:
    """The forms of the rows of a rank, of each parameter and its gradient."""
    return [one.form_at(rank) for one in _each_twice(matrices)]
