"""Gradients to their owners and parameters from them, bucket by bucket, over a transport."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hooks.bucket_layout import is_dense
from hooks.zero.bucket import ZeroBucket
from hooks.zero.layout import Part
from sharding.transport import Range, Transport, Work


class Reduction:
    """The gradients of a bucket on their way to their owners, launched at once.

    Args:
        transport: over the group of the DDP module.
        bucket: whose buffer is reduced in place, each rank its own parts.
    """

    def __init__(self, transport: Transport, bucket: ZeroBucket) -> None:
        portions = bucket.layout.reduction
        self._works: list[Work] = [
            transport.reduce_scatter(bucket.buffer, ranges, average=True)
            for ranges in portions.rounds
        ]
        self._pack: _Pack | None = None
        packed = portions.packed
        if packed:
            gradients: Sequence[Tensor] = bucket.gradients
            if bucket.members[0].factor == 2:
                # As numbers of the buffer's dtype: division of complex ones rounds otherwise.
                gradients = [torch.view_as_real(one) for one in gradients]
                packed = tuple(
                    part._replace(start=2 * part.start, stop=2 * part.stop) for part in packed
                )
            self._pack = _Pack(packed, gradients, transport.size)
            self._pack.fill(packed)
            work = transport.reduce_scatter(self._pack.buffer, self._pack.ranges, average=True)
            self._works.append(work)
        self._own = [part for part in packed if part.rank == transport.rank]

    def wait(self) -> None:
        """Return when this rank's parts are reduced, in the bucket."""
        for work in self._works:
            work.wait()
        if self._pack is not None:
            self._pack.write_back(self._own)


class Gather:
    """The parameters of a bucket on their way from their owners, launched at once.

    Args:
        transport: over a group of its own.
        bucket: whose parameters are made whole.
    """

    def __init__(self, transport: Transport, bucket: ZeroBucket) -> None:
        self.params = list(bucket.params)
        """The parameters, which are not to be touched before :meth:`wait` has returned."""
        packed = bucket.layout.packed
        self._works: list[Work] = [
            transport.all_gather(_memory(bucket.params[place]), ranges)
            for place, rounds in bucket.layout.gathering.items()
            for ranges in rounds
        ]
        self._pack: _Pack | None = None
        if packed:
            self._pack = _Pack(packed, bucket.params, transport.size)
            self._pack.fill([part for part in packed if part.rank == transport.rank])
            self._works.append(transport.all_gather(self._pack.buffer, self._pack.ranges))
        self._others = [part for part in packed if part.rank != transport.rank]
        self._lock = threading.Lock()
        self._done = False

    def wait(self) -> None:
        """Return when the parameters are whole. Any thread may call it, any number of times."""
        with self._lock:
            if self._done:
                return
            for work in self._works:
                work.wait()
            if self._pack is not None:
                self._pack.write_back(self._others)
            self._done = True
            self._works, self._pack = [], None


class _Pack:
    """Small parts of several tensors, side by side in one buffer, by rank."""

    def __init__(self, parts: Sequence[Part], tensors: Sequence[Tensor], ranks: int) -> None:
        self._tensors = tensors
        self._of: dict[Part, Range] = {}
        ends = [0]
        for part in parts:
            self._of[part] = (ends[-1], ends[-1] + part.numel)
            ends.append(ends[-1] + part.numel)
        self.buffer = tensors[parts[0].member].detach().new_empty(ends[-1])
        self.ranges: list[Range] = []
        """Of each rank, in the buffer."""
        for rank in range(ranks):
            own = [self._of[part] for part in parts if part.rank == rank]
            self.ranges.append((own[0][0], own[-1][1]) if own else (0, 0))

    def fill(self, parts: Sequence[Part]) -> None:
        """Copy parts into the buffer."""
        for part in parts:
            start, stop = self._of[part]
            tensor = self._tensors[part.member].detach()
            self.buffer[start:stop] = tensor.reshape(-1)[part.start : part.stop]

    def write_back(self, parts: Sequence[Part]) -> None:
        """Copy parts out of the buffer, to where they come from."""
        for part in parts:
            start, stop = self._of[part]
            write_range(self._tensors[part.member], part.start, self.buffer[start:stop])


def write_range(tensor: Tensor, start: int, values: Tensor) -> None:
    """Write elements of a tensor, numbered in the order of its shape, whatever its strides."""
    whole = tensor.detach()
    if whole.is_contiguous():
        whole.view(-1)[start : start + values.numel()] = values
    elif values.numel() == whole.numel():
        whole.copy_(values.view(whole.shape))
    else:
        flat = whole.reshape(-1)  # a copy, since elements lie in another order
        flat[start : start + values.numel()] = values
        whole.copy_(flat.view(whole.shape))


def _memory(param: Tensor) -> Tensor:
    """All elements as they lie in memory, which they fill."""
    assert is_dense(param)
    return param.detach().as_strided((param.numel(),), (1,))
