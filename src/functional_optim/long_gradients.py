"""Gradients that are so long, each by itself, that they are read where they lie.

Copying one into the flat buffer costs a step its time once more, as all that a step does is move
memory. A lane of its own costs some microseconds. The short ones beside it are copied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.flat_buffer import FlatBuffer, difference
from functional_optim.flat_gradients import PLAIN
from functional_optim.passing_gradients import Passing, piece_bytes
from functional_optim.stretches import InStretches, Stretch, flat_from, is_apart, spans_of

LONG = 1 << 17
"""Elements from which a gradient is read where it lies."""

_ELSEWHERE = "it is in other memory"


class _Piece(NamedTuple):
    """Neighbours whose gradients are brought together."""

    first: int
    last: int


class _Plan(NamedTuple):
    """How one buffer is cut."""

    mask: tuple[int | None, ...]
    stretches: tuple[Stretch | _Piece | int, ...]
    """Of copied gradients, or of those that are brought; or the number of a segment whose gradient
    is read where it lies."""
    elsewhere: frozenset[int]
    """Which of them are read where they lie."""


class LongGradients:
    """Looks for such gradients.

    Args:
        buffers: of the layout, those that are stepped as lanes.
        gradients: the flat gradient of each.
        views: for each parameter of the layout, a gradient as its buffer would hold it.
        written: what is written before the last gradient is read, gradient buffers among it:
            gradients that lie there are not read there.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        gradients: Sequence[Tensor],
        views: Sequence[Tensor | None],
        written: Sequence[Tensor],
    ) -> None:
        self._buffers = buffers
        self._gradients = gradients
        self._long: dict[int, Tensor] = {}
        for buffer in buffers:
            for one in buffer.segments:
                view = views[one.index]
                # Elsewhere, to launch kernels for a lane takes longer than to copy its gradient.
                if view is not None and view.is_cpu and one.numel >= LONG:
                    self._long[one.index] = view
        self._taken = written
        self._plans: tuple[Any, list[_Plan]] = (None, [])

    @property
    def count(self) -> int:
        """How many parameters are long, and share a buffer with others."""
        shared = [buffer.segments for buffer in self._buffers if len(buffer.segments) > 1]
        return sum(one.index in self._long for segments in shared for one in segments)

    def find(self, given: Sequence[Any]) -> frozenset[int]:
        """The places of the gradients that can be read where they lie."""
        if not self._long:
            return frozenset()
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            taken = spans_of(self._taken)
            return frozenset(
                i
                for i, view in self._long.items()
                if _fits(given[i], view) and is_apart(given[i], taken)
            )

    def stretches(
        self,
        given: Sequence[Any],
        read: frozenset[int],
        missing: frozenset[int],
        passing: Passing | None = None,
    ) -> list[InStretches]:
        """Where the gradients of each buffer lie.

        Args:
            given: a gradient or None for each parameter that the layout was given.
            read: what :meth:`find` found of them.
            missing: the places of those that are None.
            passing: what brings the others; None, if they are in the flat buffers.
        """
        piece = 0 if passing is None else piece_bytes()
        key = (read, missing, piece)
        if self._plans[0] != key:
            pairs = zip(self._buffers, self._gradients, strict=True)
            self._plans = (key, [_plan(*pair, read, missing, piece) for pair in pairs])
        return [
            InStretches(
                plan.mask,
                tuple(_placed(buffer, one, given, passing) for one in plan.stretches),
                plan.elsewhere,
            )
            for buffer, plan in zip(self._buffers, self._plans[1], strict=True)
        ]


def _fits(grad: Any, view: Tensor) -> bool:
    """Whether a gradient has its elements as the view has, in memory of its own."""
    return (
        type(grad) in PLAIN
        and grad.layout == torch.strided
        and difference(grad, view) == _ELSEWHERE
        and not (grad.is_conj() or grad.is_neg() or grad._is_zerotensor())  # noqa: SLF001  torch has no public name
    )


def _plan(
    buffer: FlatBuffer,
    gradient: Tensor,
    read: frozenset[int],
    missing: frozenset[int],
    piece: int,
) -> _Plan:
    """How a buffer is cut, its short gradients in pieces of so many bytes, if they are brought."""
    mask: list[int | None] = []
    stretches: list[Stretch | _Piece | int] = []
    room = piece // buffer.dtype.itemsize if piece else buffer.numel
    first = -1  # of the segments that are copied, or brought, together with the one before
    for k, one in enumerate(buffer.segments):
        if one.index in missing:
            mask.append(None)
            first = -1
            continue
        if one.index in read:
            stretches.append(k)
            first = -1
        elif first < 0 or one.offset + one.numel - buffer.segments[first].offset > room:
            stretches.append(_Piece(k, k) if piece else Stretch(k, gradient[one.offset :]))
            first = k
        elif piece:
            stretches[-1] = _Piece(first, k)
        mask.append(len(stretches) - 1)
    elsewhere = frozenset(i for i, one in enumerate(stretches) if not isinstance(one, Stretch))
    return _Plan(tuple(mask), tuple(stretches), elsewhere)


def _placed(
    buffer: FlatBuffer,
    one: Stretch | _Piece | int,
    given: Sequence[Any],
    passing: Passing | None,
) -> Stretch:
    if isinstance(one, Stretch):
        return one
    if isinstance(one, _Piece):
        assert passing is not None
        return passing.stretch(buffer, *one)
    grad = given[buffer.segments[one].index]
    return Stretch(one, flat_from(grad, buffer.segments[one].numel))
