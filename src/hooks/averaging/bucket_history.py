"""Buckets in which gradients were reduced, so that a resumed run reduces in the same buckets."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from hooks.work_queue import done_future

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class SubBucket:
    """Part of a ``GradBucket`` of torch, with the methods that communication hooks call."""

    number: int
    flat: Tensor
    """The gradients of ``params``, concatenated."""
    params: Sequence[Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def is_last(self) -> bool:
        return self.last

    def parameters(self) -> list[Tensor]:
        return list(self.params)

    def gradients(self) -> list[Tensor]:
        slices = self.flat.split([param.numel() for param in self.params])
        return [flat.view(one.shape) for flat, one in zip(slices, self.params, strict=True)]


class BucketHistory(Generic[Key]):
    """Buckets of the last backward pass; after a resume, also the buckets of the next two passes.

    DDP's first backward pass has other buckets than later passes, with ``static_graph`` also the
    second, and the rounding of a sum over more than two ranks may depend on the position in a
    buffer. So the first two passes of a resumed run reduce in the buckets of the stopped run, one
    after another, if DDP's bucket is a union of these. This holds: DDP starts with one bucket for
    all parameters of a dtype, or, if it looks for unused parameters, never changes its buckets. All
    ranks resume from the same buckets.

    A key identifies a parameter, such as its name.

    Example::

        >>> found = BucketHistory()
        >>> found.resume([["b"], ["a"]])
        >>> def hook(bucket):
        ...     print(bucket.index(), bucket.buffer())
        ...     done = Future()
        ...     done.set_result(bucket.buffer())
        ...     return done
        >>> params = [torch.ones(1), torch.ones(2)]
        >>> whole = SubBucket(0, torch.arange(3.0), params, last=True)
        >>> found.reduce(whole, ["a", "b"], hook).wait()
        0 tensor([1., 2.])
        1 tensor([0.])
        tensor([0., 1., 2.])
        >>> found.buckets
        [['b'], ['a']]
    """

    def __init__(self) -> None:
        self.buckets: list[list[Key]] = []
        """The keys of each bucket of the last complete backward pass."""
        self._seen: list[list[Key]] = []
        self._resumed: list[list[Key]] = []
        self._passes_left = 0
        """Number of passes that still reduce in the buckets of the stopped run."""

    def resume(self, buckets: Sequence[Sequence[Key]]) -> None:
        """Reduce in these buckets of a stopped run in the next two passes; in DDP's if empty."""
        self.buckets = [list(keys) for keys in buckets]
        self._resumed, self._passes_left = self.buckets, 2

    def reduce(
        self, bucket: Any, keys: Sequence[Key], hook: Callable[[Any], Future[Tensor]]
    ) -> Future[Tensor]:
        """Pass a bucket to a hook, whole or in parts; return a future of the bucket's buffer.

        ``keys`` are those of its parameters, in order.
        """
        parts = self._parts(keys)
        if parts == [(bucket.index(), list(range(len(keys))))]:
            parts = []  # DDP's bucket equals a bucket of the stopped run
        if bucket.index() == 0:  # the last pass may have failed before its end
            self._seen = []
        self._seen += [[keys[k] for k in indices] for _, indices in parts] or [list(keys)]
        if bucket.is_last():
            resumed = [one for one in self._resumed if one in self._seen]
            self.buckets = resumed if len(resumed) == len(self._seen) else self._seen
            self._seen, self._passes_left = [], self._passes_left - 1
            if self._passes_left <= 0:
                self._resumed = []
        return _reduce_in_parts(bucket, parts, hook) if parts else hook(bucket)

    def _parts(self, keys: Sequence[Key]) -> list[tuple[int, list[int]]]:
        """Return the buckets of the stopped run that make up this bucket; empty if there are none.

        Each part has its number, and the positions of its parameters in this bucket.
        """
        indices = {key: index for index, key in enumerate(keys)}
        found = [
            (number, [indices[key] for key in one])
            for number, one in enumerate(self._resumed)
            if set(one) <= indices.keys()
        ]
        if sorted(index for _, one in found for index in one) == list(range(len(keys))):
            return found
        self._resumed = []  # numbers of DDP's and of resumed buckets could collide in one pass
        return []


def _reduce_in_parts(
    bucket: Any, parts: Sequence[tuple[int, Sequence[int]]], hook: Callable[[Any], Future[Tensor]]
) -> Future[Tensor]:
    """Pass a bucket to a hook in parts, and wait for each; return a future of the whole buffer.

    Each part has its number, and the positions of its parameters in the bucket.
    """
    params, flat = bucket.parameters(), bucket.buffer()
    slices = flat.split([param.numel() for param in params])
    for position, (number, indices) in enumerate(parts):
        last = bucket.is_last() and position == len(parts) - 1
        part = SubBucket(
            number, torch.cat([slices[k] for k in indices]), [params[k] for k in indices], last
        )
        found = hook(part).wait()
        sizes = [slices[k].numel() for k in indices]
        for index, reduced in zip(indices, found.split(sizes), strict=True):
            slices[index].copy_(reduced)
    return done_future(flat)
