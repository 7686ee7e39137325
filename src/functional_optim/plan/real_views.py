"""RealViews: real views of complex tensors in the list of a step."""

from collections.abc import Sequence
from typing import Any, Self

import torch

from functional_optim.core.leaf import PLAIN
from functional_optim.core.views import real_view


class RealViews:
    """Positions of complex tensors in the list of a step. It holds no tensor.

    Args:
        positions: of the complex tensors.
        grads: positions of gradients, which a step only reads.
    """

    def __init__(self, positions: Sequence[int], grads: Sequence[int]) -> None:
        self._positions, self._grads = positions, set(grads)

    @classmethod
    def among(cls, rows: Sequence[Sequence[int]], tensors: Sequence[Any]) -> Self | None:
        """Find the complex tensors of leaves; return None if there are none."""
        positions = sorted({k for row in rows for k in row if tensors[k].is_complex()})
        return cls(positions, [grad for _, grad, *_ in rows]) if positions else None

    def of(self, tensors: list[Any]) -> list[Any] | None:
        """Return the list with real views; None if a step must not write to one of the tensors.

        A conjugated gradient is copied. A step cannot write through a view to a conjugated
        parameter, or to one that is the result of an operation.
        """
        found = tensors.copy()
        for k in self._positions:
            one = tensors[k]
            if type(one) not in PLAIN or one.layout != torch.strided or not one.is_complex():
                return None
            if k not in self._grads and (one.is_conj() or not one.is_leaf):
                return None
            found[k] = real_view(one.detach())
        return found
