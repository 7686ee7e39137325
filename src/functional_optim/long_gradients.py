"""Gradients that are so long, each by itself, that they are read where they lie.

Copying one into the flat buffer costs a step its time once more, as all that a step does is move
memory. A lane of its own costs some microseconds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.flat_buffer import FlatBuffer, difference
from functional_optim.flat_gradients import PLAIN
from functional_optim.stretches import is_apart, spans_of

LONG = 1 << 17
"""Elements from which a gradient is read where it lies."""

_ELSEWHERE = "it is in other memory"


class LongGradients:
    """Looks for such gradients.

    Args:
        buffers: of the layout, those that are stepped as lanes.
        views: for each parameter of the layout, a gradient as its buffer would hold it.
        written: what is written before the last gradient is read, gradient buffers among it:
            gradients that lie there are not read there.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        views: Sequence[Tensor | None],
        written: Sequence[Tensor],
    ) -> None:
        self._long: dict[int, Tensor] = {}
        for buffer in buffers:
            for one in buffer.segments:
                view = views[one.index]
                # Elsewhere, to launch kernels for a lane takes longer than to copy its gradient.
                if view is not None and view.is_cpu and one.numel >= LONG:
                    self._long[one.index] = view
        self.places = frozenset(self._long)
        """Where the long ones stand among the parameters."""
        shared = [buffer.segments for buffer in buffers if len(buffer.segments) > 1]
        self.count = sum(one.index in self._long for segments in shared for one in segments)
        """How many of them share a buffer with others."""
        self._taken = written

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


def _fits(grad: Any, view: Tensor) -> bool:
    """Whether a gradient has its elements as the view has, in memory of its own."""
    return (
        type(grad) in PLAIN
        and grad.layout == torch.strided
        and difference(grad, view) == _ELSEWHERE
        and not (grad.is_conj() or grad.is_neg() or grad._is_zerotensor())  # noqa: SLF001  torch has no public name
    )
