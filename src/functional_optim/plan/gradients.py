"""Gradients that are read where autograd left them: are they such as a plan takes, and where?"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functional_optim._torch import DisableTorchFunction
from functional_optim.core.leaf import PLAIN
from functional_optim.native import LOOPS
from functional_optim.plan.gradient_memory import Spans
from functional_optim.plan.guard import LayoutGuard


class GradientAddresses:
    """Finds where gradients lie, if each is dense and laid out as its parameter.

    Args:
        like: for each gradient, a tensor with its shape, strides, dtype and device.
        written: what a step writes to: gradients that lie there are not read there.
    """

    def __init__(self, like: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        self._like, self._written = list(like), list(written)
        self._places: Any = None
        self._closed: Any = None
        self._alike: LayoutGuard | None = None
        self._spans: Spans | None = None

    def of(self, gradients: list[Any]) -> "list[int] | bytes | None":
        """Return the addresses of gradients, as numbers or bytes; None if a layout differs.

        Args:
            gradients: as many as ``like``; each a tensor.
        """
        # A mode such as that of torch.set_default_device would run Python at every call.
        with DisableTorchFunction():
            loops = LOOPS.loaded or LOOPS.get(len(gradients))
            if loops is not None:
                if self._places is None:
                    self._places = loops.remember(self._like)
                    self._closed = loops.remember(self._written)
                if self._places is not None and self._closed is not None:
                    return loops.addresses(self._places, gradients, self._closed)
            return self._looked_at(gradients)

    def _looked_at(self, gradients: list[Any]) -> list[int] | None:
        """Return the addresses without the native loops."""
        if not PLAIN.issuperset(map(type, gradients)):
            return None
        if self._alike is None:
            self._alike = LayoutGuard(self._like)
        if self._spans is None:
            self._spans = Spans(self._written)
        try:
            if not self._alike(gradients):
                return None
        except RuntimeError:  # a sparse gradient
            return None
        starts = list(map(Tensor.data_ptr, gradients))
        return starts if self._spans.are_clear_of(gradients, starts) else None
