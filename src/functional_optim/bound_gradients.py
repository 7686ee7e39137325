"""Gradients of a bound optimizer: from wherever they are to the step.

They are read where they lie, where that is best; else they are copied into the flat buffers, or
brought in pieces as they are stepped.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.brought_gradients import Bringer
from functional_optim.checks import check_grad
from functional_optim.flat_buffer import difference
from functional_optim.flat_layout import FlatBuffer, FlatLayout
from functional_optim.gradient_cuts import GradientCuts
from functional_optim.long_gradients import LongGradients
from functional_optim.stretches import InStretches, Stretches

_LAYOUT = attrgetter("layout")
_NONE = type(None)
_NOTHING: frozenset[int] = frozenset()


class Gathered(NamedTuple):
    """Where gradients are."""

    found: Sequence[InStretches]
    """For each buffer that is stepped, where they are; nothing, if they are in the flat buffers."""
    missing: bool
    """Whether some parameters have none."""


ALL = Gathered((), missing=False)
"""All are in the flat buffers."""


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
        flat: whether short gradients are to be in the flat buffers, wherever they lie.
        once: whether a step reads each gradient once.
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
        *,
        flat: bool,
        once: bool,
    ) -> None:
        self._layout = layout
        self._params = params
        self._names = names
        self._others = others
        self.views: list[Tensor | None] = [None] * len(params)
        """Per parameter, its view of the gradient buffers, in its own dtype and shape."""
        for buffer, memory in zip(layout.buffers, layout.gradient_buffers(), strict=True):
            for one, view in zip(buffer.segments, buffer.views(memory), strict=True):
                whole = params[one.index].is_complex()
                self.views[one.index] = torch.view_as_complex(view) if whole else view
        for i in layout.apart:
            self.views[i] = torch.zeros_like(params[i])
        taken = [*written, *layout.gradient_buffers()]
        self._stretches = Stretches([] if flat else stepped, self.views, written)
        self._long = LongGradients(stepped, self.views, taken)
        self._cuts = GradientCuts(stepped, gradients)
        brings = once and not flat and not others
        self._bringer = Bringer(stepped if brings else [], self.views, taken)

    def explain(self) -> list[str]:
        """What becomes of gradients that are not in the flat buffers, and cuts them into lanes."""
        lines = []
        if self._long.count:
            lines.append(
                f"{self._long.count} long gradients are read where they lie, in a lane each, if "
                "that is not in the buffers"
            )
        if count := self._bringer.count(self._long.places):
            lines.append(
                f"{count} short gradients are brought into the cache in pieces, in a lane each, if "
                "they are not in the buffers, and the loops in C++ are there"
            )
        return lines

    def gather(self, given: list[Any]) -> Gathered | None:
        """Find gradients, one or None per parameter, or copy them into the flat buffers.

        Those that are best read where they lie are left there: long ones, and neighbours that lie
        in stretches. Many short ones are brought as they are stepped. No Python runs per short
        parameter where none is missing, and they do not lie in stretches.

        Returns:
            Where they are now; None, with nothing written, where there is one that the buffers
            cannot take.

        Raises:
            TypeError, ValueError: a gradient that does not belong to its parameter.
        """
        promised = self._stretches.promises(given)
        found = None if promised else self._gather_at_once(given)
        if found is not None:
            return found
        if _NONE in map(type, given):
            return self._gather_some(given)
        try:
            dense = list(map(_LAYOUT, given)).count(torch.strided) == len(given)
        except AttributeError:
            return None  # something that is no tensor: leaf by leaf, it is named
        if not dense or self._layout.gradients_in_place(given):
            return ALL if dense else None
        stretches = self._stretches.find(given)
        if stretches is not None:
            return Gathered(stretches, missing=False)
        return (promised and self._gather_at_once(given)) or self._gather_all(given)

    def _gather_all(self, given: list[Any]) -> Gathered:
        read = self._long.find(given)
        self._move_away(given, self._others)
        self._layout.gather(given, read=read)
        return self._gathered(given, read)

    def _gather_at_once(self, given: list[Any]) -> Gathered | None:
        """The same by the loops in C++; None, with nothing written, where they cannot do it."""
        if self._others:
            return None
        read = self._long.find(given)
        missing = _NOTHING
        if _NONE in map(type, given):
            missing = frozenset(i for i, grad in enumerate(given) if grad is None)
        brought = self._bringer.find(given, read | missing)
        if brought is not None:
            found = self._cuts.stretches(given, read, missing, brought)
            return Gathered(found, missing=bool(missing))
        if missing or not self._layout.gather_at_once(given, read):
            return None
        return self._gathered(given, read)

    def _gather_some(self, given: list[Any]) -> Gathered | None:
        """The same, where some are None."""
        present = [i for i, grad in enumerate(given) if grad is not None]
        for i in present:
            check_grad(self._params[i], given[i], self._names[i])
        if any(given[i].layout != torch.strided for i in present):
            return None
        found = self._stretches.find(given)
        if found is not None:
            return Gathered(found, missing=True)
        read = self._long.find(given)
        copied = [i for i in present if i not in read]
        self._move_away(given, copied)
        for i in copied:
            view, grad = self.views[i], given[i]
            if view is not None and view is not grad:
                view.copy_(grad)
        missing = frozenset(range(len(given))).difference(present)
        return self._gathered(given, read, missing)

    def _gathered(
        self, given: Sequence[Any], read: frozenset[int], missing: frozenset[int] = _NOTHING
    ) -> Gathered:
        found = self._cuts.stretches(given, read, missing) if read else ()
        return Gathered(found, missing=bool(missing))

    def _move_away(self, given: list[Any], which: Sequence[int]) -> None:
        """Copy gradients that lie at other places of the buffers, before those are written."""
        memory = {flat.untyped_storage().data_ptr() for flat in self._layout.gradient_buffers()}
        for i in which:
            view, grad = self.views[i], given[i]
            if view is None or difference(grad, view) is None:
                continue
            if grad.untyped_storage().data_ptr() in memory:
                given[i] = grad.clone()
