"""How a buffer is cut into lanes by where its gradients are.

Long gradients are read where they lie, in a lane each. The short ones between them are in the flat
gradient, or are brought from where they lie as they are stepped, in pieces.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.brought_gradients import Brought
from functional_optim.flat_buffer import FlatBuffer
from functional_optim.stretches import InStretches, Stretch, flat_from


class _Copied(NamedTuple):
    """Neighbours whose gradients are in the flat gradient."""

    stretch: Stretch


class _Piece(NamedTuple):
    """Neighbours whose gradients are brought together."""

    first: int
    last: int


class _Long(NamedTuple):
    """A segment whose gradient is read where it lies."""

    segment: int


class _Cut(NamedTuple):
    """How one buffer is cut."""

    mask: tuple[int | None, ...]
    parts: tuple[_Copied | _Piece | _Long, ...]
    elsewhere: frozenset[int]
    """Which of them are not in the flat gradient."""


class GradientCuts:
    """Cuts buffers, and remembers how.

    Args:
        buffers: of the layout, those that are stepped as lanes.
        gradients: the flat gradient of each.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], gradients: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._gradients = gradients
        self._cuts: tuple[Any, list[_Cut]] = (None, [])

    def stretches(
        self,
        given: Sequence[Any],
        read: frozenset[int],
        missing: frozenset[int],
        brought: Brought | None = None,
    ) -> list[InStretches]:
        """Where the gradients of each buffer are.

        Args:
            given: a gradient or None for each parameter that the layout was given.
            read: the places of those that are read where they lie.
            missing: the places of those that are None.
            brought: what brings the others; None, if they are in the flat gradients.
        """
        piece = 0 if brought is None else brought.piece
        key = (read, missing, piece)
        if self._cuts[0] != key:
            pairs = zip(self._buffers, self._gradients, strict=True)
            self._cuts = (key, [_cut(*pair, read, missing, piece) for pair in pairs])
        return [
            InStretches(
                cut.mask,
                tuple(_placed(buffer, one, given, brought) for one in cut.parts),
                cut.elsewhere,
            )
            for buffer, cut in zip(self._buffers, self._cuts[1], strict=True)
        ]


def _cut(
    buffer: FlatBuffer,
    gradient: Tensor,
    read: frozenset[int],
    missing: frozenset[int],
    piece: int,
) -> _Cut:
    """How a buffer is cut, short gradients in pieces of so many bytes, if they are brought."""
    mask: list[int | None] = []
    parts: list[_Copied | _Piece | _Long] = []
    room = piece // buffer.dtype.itemsize if piece else buffer.numel
    first = -1  # of the short ones that are stepped together with the segment before
    for k, one in enumerate(buffer.segments):
        if one.index in missing:
            mask.append(None)
            first = -1
            continue
        if one.index in read:
            parts.append(_Long(k))
            first = -1
        elif first < 0 or one.offset + one.numel - buffer.segments[first].offset > room:
            whole = _Copied(Stretch(k, gradient[one.offset :]))
            parts.append(_Piece(k, k) if piece else whole)
            # A piece begins with something, so that its place is where its first one is.
            first = k if one.numel or not piece else -1
        elif piece:
            parts[-1] = _Piece(first, k)
        mask.append(len(parts) - 1)
    elsewhere = frozenset(i for i, one in enumerate(parts) if not isinstance(one, _Copied))
    return _Cut(tuple(mask), tuple(parts), elsewhere)


def _placed(
    buffer: FlatBuffer,
    part: _Copied | _Piece | _Long,
    given: Sequence[Any],
    brought: Brought | None,
) -> Stretch:
    if isinstance(part, _Copied):
        return part.stretch
    if isinstance(part, _Piece):
        assert brought is not None
        return brought.stretch(buffer, part.first, part.last)
    one = buffer.segments[part.segment]
    return Stretch(part.segment, flat_from(given[one.index], one.numel))
