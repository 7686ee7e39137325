"""The totals that a planned step needs over all of its leaves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.forms import map_state, real_view
from functional_optim.core.stage import Stage
from functional_optim.kernels import HandedOn, Leaf, is_measured, total_of
from functional_optim.plan.chunk import Chunk
from functional_optim.plan.item import Item


class Totals:
    """Takes the totals of the measured stages of a chain.

    Args:
        stages: of the chain.
        items: the leaves of the plan.
        chunks: of them.
    """

    def __init__(
        self, stages: Sequence[Stage], items: Sequence[Item], chunks: Sequence[Chunk]
    ) -> None:
        self._stages, self._items, self._chunks = stages, items, chunks
        self._measured = [place for place, one in enumerate(stages) if is_measured(one)]
        self.count = len(self._measured)
        """How many there are."""
        kinds: dict[Any, tuple[Chunk, int]] = {}
        for number, chunk in enumerate(chunks if self._measured else ()):
            for k in chunk.members:
                param = items[k].param
                kinds.setdefault((number, param.shape, param.dtype), (chunk, k))
        self._kinds = list(kinds.values())
        """A leaf of each kind in each chunk."""
        self._has_complex = any(one.param.is_complex() for one in items)
        self._handed_on = HandedOn(stages[: self._measured[0]] if self._measured else ())

    def of(self, gradients: list[Tensor], measured: Sequence[Tensor]) -> Sequence[Tensor]:
        """All of them, where every leaf is in a chunk.

        Args:
            gradients: one for each leaf.
            measured: those that are known.
        """
        with torch.no_grad():
            if self._has_complex:
                gradients = list(map(real_view, gradients))
            first = self._measured[0]
            now = [chunk.coefficients[:first] for chunk in self._chunks]
            if now != self._handed_on.asked:
                pairs = [(self._items[k], gradients[k], one) for one, k in self._kinds]
                leaves = [_leaf(item, grad, one.coefficients) for item, grad, one in pairs]
                self._handed_on.look(now, leaves)
            if self.count == 1 and not measured and self._handed_on.gradients:
                return [total_of(self._stages[first], gradients)]
            coefficients: dict[int, tuple[Any, ...]] = {}
            for chunk in self._chunks:
                coefficients.update(dict.fromkeys(chunk.members, chunk.coefficients))
            leaves = [
                _leaf(item, gradients[k], coefficients[k]) for k, item in enumerate(self._items)
            ]
            return self._chunks[0].executor.totals(self._stages, leaves, measured)


def _leaf(item: Item, gradient: Tensor, coefficients: tuple[Any, ...]) -> Leaf:
    """A leaf as stages see it."""
    param, states = item.param, item.state.stages
    if param.is_complex():
        param, gradient = real_view(param), real_view(gradient)
        states = tuple(map_state(real_view, one) for one in states)
    return Leaf(param, gradient, states, coefficients, item.name)
