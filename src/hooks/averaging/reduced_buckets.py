"""In which buckets gradients were reduced, so that a run that is resumed reduces in the same."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.futures import Future

from hooks.averaging.cut_bucket import reduced_in_parts

Key = TypeVar("Key", bound=Hashable)


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

        >>> import torch
        >>> from hooks.averaging.cut_bucket import CutBucket
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
        return reduced_in_parts(bucket, parts, hook) if parts else hook(bucket)

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
