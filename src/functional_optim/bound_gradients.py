"""Gradients of a bound optimizer: from wherever they are into the flat buffers."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.checks import check_grad
from functional_optim.flat_buffer import difference
from functional_optim.flat_layout import FlatBuffer, FlatLayout
from functional_optim.stretches import InStretches, Stretches

_LAYOUT = attrgetter("layout")
_NONE = type(None)


class BoundGradients:
    """Where the gradients of bound parameters belong.

    Args:
        layout: where the parameters lie.
        params: all parameters.
        names: their names, for errors.
        others: places of the parameters that are stepped one by one.
        stepped: the buffers that are stepped as lanes.
        written: what their steps write to.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[Tensor],
        names: Sequence[str],
        others: Sequence[int],
        stepped: Sequence[FlatBuffer],
        written: Iterable[Tensor],
    ) -> None:
        self._layout = layout
        self._params = params
        self._names = names
        self._others = others
        self.views: list[Tensor | None] = [None] * len(params)
        """Per parameter, its view of the gradient buffers, in its own dtype and shape."""
        for buffer, flat in zip(layout.buffers, layout.gradient_buffers(), strict=True):
            for one, view in zip(buffer.segments, buffer.views(flat), strict=True):
                whole = params[one.index].is_complex()
                self.views[one.index] = torch.view_as_complex(view) if whole else view
        for i in layout.apart:
            self.views[i] = torch.zeros_like(params[i])
        self._stretches = Stretches(stepped, self.views, written)

    def gather(self, given: list[Any]) -> Sequence[InStretches] | None:
        """Bring gradients, one or None per parameter, into the flat buffers.

        No Python runs per parameter where none is missing, and they do not lie in stretches.

        Returns:
            Where the gradients of each buffer that is stepped lie, if they are best read there;
            nothing, if they are in the flat buffers now; None, with nothing written, where there
            is one that the buffers cannot take.

        Raises:
            TypeError, ValueError: a gradient that does not belong to its parameter.
        """
        if _NONE in map(type, given):
            return self._gather_some(given)
        try:
            dense = list(map(_LAYOUT, given)).count(torch.strided) == len(given)
        except AttributeError:
            return None  # something that is no tensor: leaf by leaf, it is named
        if not dense or self._layout.gradients_in_place(given):
            return () if dense else None
        found = self._stretches.find(given)
        if found is None:
            self._move_away(given, self._others)
            self._layout.gather(given)
        return found or ()

    def _gather_some(self, given: list[Any]) -> Sequence[InStretches] | None:
        """The same, where some are None."""
        present = [i for i, grad in enumerate(given) if grad is not None]
        for i in present:
            check_grad(self._params[i], given[i], self._names[i])
        if any(given[i].layout != torch.strided for i in present):
            return None
        found = self._stretches.find(given)
        if found is None:
            self._move_away(given, present)
            for i in present:
                view, grad = self.views[i], given[i]
                if view is not None and view is not grad:
                    view.copy_(grad)
        return found or ()

    def _move_away(self, given: list[Any], which: Sequence[int]) -> None:
        """Copy gradients that lie at other places of the buffers, before those are written."""
        memory = {flat.untyped_storage().data_ptr() for flat in self._layout.gradient_buffers()}
        for i in which:
            view, grad = self.views[i], given[i]
            if view is None or difference(grad, view) is None:
                continue
            if grad.untyped_storage().data_ptr() in memory:
                given[i] = grad.clone()
