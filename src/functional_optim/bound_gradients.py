"""Gradients of a bound optimizer: from wherever they are into the flat buffers."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.checks import check_grad
from functional_optim.flat_buffer import difference
from functional_optim.flat_layout import FlatBuffer, FlatLayout
from functional_optim.long_gradients import LongGradients
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
        gradients: the flat gradient of each of these.
        written: what steps write to.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[Tensor],
        names: Sequence[str],
        others: Sequence[int],
        stepped: Sequence[FlatBuffer],
        gradients: Sequence[Tensor],
        written: Sequence[Tensor],
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
        self._long = LongGradients(stepped, gradients, self.views, written)

    def gather(self, given: list[Any]) -> Sequence[InStretches] | None:
        """Bring gradients, one or None per parameter, into the flat buffers.

        Those that are best read where they lie are left there: long ones, and neighbours that lie
        in stretches. No Python runs per short parameter where none is missing, and they do not lie
        in stretches.

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
        if found is not None:
            return found
        read = self._long.find(given)
        self._move_away(given, self._others)
        self._layout.gather(given, read=read)
        return self._long.stretches(given, read, frozenset()) if read else ()

    def _gather_some(self, given: list[Any]) -> Sequence[InStretches] | None:
        """The same, where some are None."""
        present = [i for i, grad in enumerate(given) if grad is not None]
        for i in present:
            check_grad(self._params[i], given[i], self._names[i])
        if any(given[i].layout != torch.strided for i in present):
            return None
        found = self._stretches.find(given)
        if found is not None:
            return found
        read = self._long.find(given)
        copied = [i for i in present if i not in read]
        self._move_away(given, copied)
        for i in copied:
            view, grad = self.views[i], given[i]
            if view is not None and view is not grad:
                view.copy_(grad)
        missing = frozenset(range(len(given))).difference(present)
        return self._long.stretches(given, read, missing) if read else ()

    def _move_away(self, given: list[Any], which: Sequence[int]) -> None:
        """Copy gradients that lie at other places of the buffers, before those are written."""
        memory = {flat.untyped_storage().data_ptr() for flat in self._layout.gradient_buffers()}
        for i in which:
            view, grad = self.views[i], given[i]
            if view is None or difference(grad, view) is None:
                continue
            if grad.untyped_storage().data_ptr() in memory:
                given[i] = grad.clone()
