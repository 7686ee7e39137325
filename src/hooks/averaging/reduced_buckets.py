"""In which buckets gradients were reduced, so that a run that is resumed reduces in the same."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class CutBucket:
    """Some parameters' gradients, as a communication hook takes a ``torch.distributed.GradBucket``.

    Args:
        number: of the bucket, from 0.
        flat: the gradients, one after the other.
        params: theirs, in that order.
        last: whether it is the last one of a backward pass.
    """

    number: int
    flat: Tensor
    params: Sequence[Tensor]
    last: bool

    def index(self) -> int:
        """Its number."""
        return self.number

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self.flat

    def is_last(self) -> bool:
        """Return True if no other comes after it."""
        return self.last

    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return list(self.params)

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, in the parameters' shapes."""
        slices = self.flat.split([param.numel() for param in self.params])
        return [flat.view(one.shape) for flat, one in zip(slices, self.params, strict=True)]


class ReducedBuckets(Generic[Key]):
    """The buckets of the last backward pass, and those to reduce in in the next, after a resume.

    DDP's first backward pass has other buckets than all that follow, and the rounding of a sum over
    more than two ranks may depend on the place in a buffer. In its first pass a run that goes on is
    reduced in the buckets of the run that was stopped, one after the other, wherever a bucket of
    DDP's is made of whole ones of those. It is: DDP begins with one bucket for all parameters of a
    dtype, or, where it looks for unused parameters, has the same buckets for ever. All ranks resume
    from the same buckets.

    A key is what says which parameter is meant, such as its name; all are of one type.

    Example::

        >>> found = ReducedBuckets()
        >>> found.resume([["b"], ["a"]])
        >>> def hook(bucket):
        ...     print(bucket.index(), bucket.buffer())
        ...     done = Future()
        ...     done.set_result(bucket.buffer())
        ...     return done
        >>> params = [torch.ones(1), torch.ones(2)]
        >>> whole = CutBucket(0, torch.arange(3.0), params, last=True)
        >>> found.reduce(whole, ["a", "b"], hook).wait()
        0 tensor([1., 2.])
        1 tensor([0.])
        tensor([0., 1., 2.])
        >>> found.buckets
        [['b'], ['a']]
    """

    def __init__(self) -> None:
        self.buckets: list[list[Key]] = []
        """The keys of each bucket of the last backward pass that came to its end."""
        self._seen: list[list[Key]] = []
        self._resumed: list[list[Key]] = []

    def resume(self, buckets: Sequence[Sequence[Key]]) -> None:
        """Reduce in these in the next backward pass.

        Args:
            buckets: of the last pass of the run that was stopped; none for those that come.
        """
        self.buckets = [list(keys) for keys in buckets]
        self._resumed = self.buckets

    def reduce(
        self, bucket: Any, keys: Sequence[Key], hook: Callable[[Any], Future[Tensor]]
    ) -> Future[Tensor]:
        """Give a bucket to a hook, whole or in parts.

        Args:
            bucket: a ``GradBucket``.
            keys: of its parameters, in their order.
            hook: a communication hook, without its state.

        Returns:
            A future of the bucket's buffer.
        """
        parts = self._parts(keys)
        if parts == [(bucket.index(), list(range(len(keys))))]:
            parts = []  # it is one of those
        if bucket.index() == 0:  # the pass before may not have come to its end
            self._seen = []
        self._seen += [[keys[k] for k in places] for _, places in parts] or [list(keys)]
        if bucket.is_last():
            resumed = [one for one in self._resumed if one in self._seen]
            self.buckets = resumed if len(resumed) == len(self._seen) else self._seen
            self._seen, self._resumed = [], []
        return _reduced_in_parts(bucket, parts, hook) if parts else hook(bucket)

    def _parts(self, keys: Sequence[Key]) -> list[tuple[int, list[int]]]:
        """The buckets before the run was stopped that make up this one; none to take it as it is.

        Each as its number, and the places in this bucket of its parameters.
        """
        places = {key: place for place, key in enumerate(keys)}
        found = [
            (number, [places[key] for key in one])
            for number, one in enumerate(self._resumed)
            if set(one) <= places.keys()
        ]
        if sorted(place for _, one in found for place in one) == list(range(len(keys))):
            return found
        self._resumed = []  # numbers of two kinds in one pass could be the same
        return []


def _reduced_in_parts(
    bucket: Any, parts: Sequence[tuple[int, Sequence[int]]], hook: Callable[[Any], Future[Tensor]]
) -> Future[Tensor]:
    """Give a bucket to a hook in parts, one after the other, each to its end.

    Args:
        bucket: a ``GradBucket``, whose buffer is written to.
        parts: the number of each, and the places in the bucket of its parameters, in their order;
            together all of them.
        hook: a communication hook, without its state.

    Returns:
        A future of the bucket's buffer, complete.
    """
    params, flat = bucket.parameters(), bucket.buffer()
    slices = flat.split([param.numel() for param in params])
    for position, (number, places) in enumerate(parts):
        last = bucket.is_last() and position == len(parts) - 1
        part = CutBucket(
            number, torch.cat([slices[k] for k in places]), [params[k] for k in places], last
        )
        found = hook(part).wait()
        sizes = [slices[k].numel() for k in places]
        for place, reduced in zip(places, found.split(sizes), strict=True):
            slices[place].copy_(reduced)
    done: Future[Tensor] = Future(devices=None if flat.device.type == "cpu" else [flat.device])
    done.set_result(flat)
    return done
