"""A DDP bucket cut into others, for hooks that must see the buckets that they saw before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future


@dataclass(frozen=True)
class CutBucket:
    """Some parameters' gradients, as a communication hook takes a ``torch.distributed.GradBucket``.

    Args:
        number: of the bucket, from 0.
        flat: the gradients, one after the other.
        params: theirs, in that order.
        last: whether it is the last one of a backward pass.

    Example::

        >>> bucket = CutBucket(0, torch.arange(3.0), [torch.ones(1), torch.ones(1, 2)], last=True)
        >>> bucket.gradients()
        [tensor([0.]), tensor([[1., 2.]])]
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
        """Whether no other comes after it."""
        return self.last

    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return list(self.params)

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, in the parameters' shapes."""
        pieces = self.flat.split([param.numel() for param in self.params])
        return [piece.view(one.shape) for piece, one in zip(pieces, self.params, strict=True)]


def reduced_in_parts(
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
    pieces = flat.split([param.numel() for param in params])
    for position, (number, places) in enumerate(parts):
        last = bucket.is_last() and position == len(parts) - 1
        part = CutBucket(
            number, torch.cat([pieces[k] for k in places]), [params[k] for k in places], last
        )
        found = hook(part).wait()
        for place, piece in zip(
            places, found.split([pieces[k].numel() for k in places]), strict=True
        ):
            pieces[place].copy_(piece)
    done: Future[Tensor] = Future(devices=None if flat.device.type == "cpu" else [flat.device])
    done.set_result(flat)
    return done
