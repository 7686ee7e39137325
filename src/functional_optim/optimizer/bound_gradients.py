"""BoundGradients: gradients of a bound optimizer, copied into its flat buffers."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.plan.flat.buffer import difference
from functional_optim.plan.flat.layout import FlatLayout

_LAYOUT = attrgetter("layout")
_NONE = type(None)


class BoundGradients:
    """Views of the flat buffers for the gradients of bound parameters.

    Args:
        names: their names, for errors.
        others: indices of the parameters that are stepped one by one.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[Tensor],
        names: Sequence[str],
        others: Sequence[int],
    ) -> None:
        self._layout = layout
        self._params = params
        self._names = names
        self._others = others
        self.views: list[Tensor | None] = [None] * len(params)
        """For each parameter, its view of the gradient buffers, in its dtype and shape."""
        for buffer, memory in zip(layout.buffers, layout.gradient_buffers(), strict=True):
            for one, view in zip(buffer.segments, buffer.views(memory), strict=True):
                whole = params[one.index].is_complex()
                self.views[one.index] = torch.view_as_complex(view) if whole else view
        for i in layout.apart:
            self.views[i] = torch.zeros_like(params[i])

    def gather(self, given: list[Any]) -> bool:
        """Copy gradients, one or None per parameter, into the flat buffers.

        If no gradient is missing, no Python runs per parameter.

        Returns:
            False, with nothing written, if the buffers cannot take a gradient; else True.

        Raises:
            TypeError, ValueError: a gradient that does not fit its parameter.
        """
        if _NONE in map(type, given):
            return self._gather_some(given)
        if not self._others and self._layout.gather_at_once(given):
            return True
        try:
            dense = list(map(_LAYOUT, given)).count(torch.strided) == len(given)
        except AttributeError:
            return (
                False  # a value is no tensor: the step leaf by leaf raises an error with its name
            )
        if not dense:
            return False
        if not self._layout.gradients_in_place(given):
            self._move_away(given, self._others)
            self._layout.gather(given)
        return True

    def _gather_some(self, given: list[Any]) -> bool:
        """Copy gradients into the flat buffers, if some are None."""
        present = [i for i, grad in enumerate(given) if grad is not None]
        for i in present:
            check_grad(self._params[i], given[i], self._names[i])
        if any(given[i].layout != torch.strided for i in present):
            return False
        self._move_away(given, present)
        for i in present:
            view, grad = self.views[i], given[i]
            if view is not None and view is not grad:
                view.copy_(grad)
        return True

    def _move_away(self, given: list[Any], which: Sequence[int]) -> None:
        """Clone gradients that are elsewhere in the buffers, before the buffers are written."""
        memory = {flat.untyped_storage().data_ptr() for flat in self._layout.gradient_buffers()}
        for i in which:
            view, grad = self.views[i], given[i]
            if view is None or difference(grad, view) is None:
                continue
            if grad.untyped_storage().data_ptr() in memory:
                given[i] = grad.clone()
