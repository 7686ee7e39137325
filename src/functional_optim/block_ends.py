"""The ends of parameters that do not fill their last block, in a flat buffer that is stepped whole.

What lies behind such a parameter, up to the next block, takes part in the block. Copies of the
parameter's last element take the same step as that element, and are neither larger nor of another
sign than it: so no block notices them (see ``Stage.fillable``).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from functional_optim.flat_layout import Segment
from functional_optim.stage import in_full_blocks


class BlockEnds:
    """What lies behind those parameters, in everything that has an entry per element.

    Args:
        segments: of the buffer.
        grain: elements of a block; each segment begins with one, and the buffer ends with one.
        flat: the flat parameters and gradients: zero behind each segment, but while a step is made.
        state: the fields of the flat state that have an entry per element.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        grain: int,
        flat: Sequence[Tensor],
        state: Sequence[Tensor],
    ) -> None:
        self._behind: list[Tensor] = []
        self._last: list[Tensor] = []
        runs = _runs([one for one in segments if one.numel % grain], grain)
        # Nobody's values are written to: autograd, which counts, need not know.
        for tensor in (one.data for one in (*flat, *state)):
            for one, count in runs:
                whole = in_full_blocks(one.numel, grain)
                end = tensor.storage_offset() + one.offset + one.numel
                room = whole - one.numel
                self._behind.append(tensor.as_strided((count, room), (whole, 1), end))
                self._last.append(tensor.as_strided((count, room), (whole, 0), end - 1))
        self._cleared = self._behind[: len(flat) * len(runs)]

    def fill(self) -> None:
        """Put copies of its last element behind each segment."""
        torch._foreach_copy_(self._behind, self._last)

    def clear(self) -> None:
        """Put zeros there again, where there have been zeros."""
        torch._foreach_zero_(self._cleared)


def _runs(short: Sequence[Segment], grain: int) -> list[tuple[Segment, int]]:
    """Segments of one length, one behind the other: the first of them, and how many there are."""
    runs: list[tuple[Segment, int]] = []
    for one in short:
        if runs:
            first, count = runs[-1]
            whole = in_full_blocks(first.numel, grain)
            if one.numel == first.numel and one.offset == first.offset + count * whole:
                runs[-1] = (first, count + 1)
                continue
        runs.append((one, 1))
    return runs


def filled(ends: Sequence[BlockEnds]) -> AbstractContextManager[None]:
    """While this lasts, last blocks are filled up; before and after, zeros fill them."""
    return _filled(ends) if ends else _NOTHING


@contextmanager
def _filled(ends: Sequence[BlockEnds]) -> Iterator[None]:
    with torch.no_grad():
        try:
            for one in ends:
                one.fill()
            yield
        finally:
            for one in ends:
                one.clear()


_NOTHING = nullcontext()
