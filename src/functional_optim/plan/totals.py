"""Totals: the totals that a planned run computes over its leaves."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.stage import Stage, Transform
from functional_optim.kernels import Chunks, Leaf, is_measured, total_of
from functional_optim.kernels.totals import UnchangedBy, try_measure_each
from functional_optim.plan.item import StepScalars


class Totals:
    """Totals of the measured stages of a chain. It holds no tensor.

    Args:
        members: for each chunk, the positions of its leaves.
        params: all parameters, by position.
    """

    def __init__(
        self, stages: Sequence[Stage], members: Sequence[Sequence[int]], params: Sequence[Any]
    ) -> None:
        self._stages, self._members = stages, members
        measured = [place for place, one in enumerate(stages) if is_measured(one)]
        self.count = len(measured)
        """Number of measured stages."""
        self._first = measured[0] if measured else 0
        kinds: dict[Any, int] = {}
        for number, own in enumerate(members if measured else ()):
            for k in own:
                kinds.setdefault((number, params[k].shape, params[k].dtype), k)
        self._kinds = [(number, k) for (number, *_), k in kinds.items()]
        """A leaf of each kind in each chunk."""
        self._unchanged = UnchangedBy(stages[: self._first])
        self._on_one_device = len({params[k].device for _, k in self._kinds}) == 1
        """True if all leaves, which are plain and dense in a plan, are on one device."""

    def of(
        self,
        executor: Chunks,
        numbers: Sequence[StepScalars],
        gradients: list[Tensor],
        measured: Sequence[Tensor],
        leaf: Callable[[int, StepScalars], Leaf],
    ) -> Sequence[Tensor]:
        """Return all totals, if every leaf is in a chunk. The caller turns autograd off."""
        is_first = self.count == 1 and not measured
        kinds = partial(self._leaf_of_each_kind, numbers, leaf)
        if is_first and self._unchanged.find(numbers, kinds).gradients:
            stage = self._stages[self._first]
            return [total_of(stage, gradients, are_alike=self._on_one_device)]
        pairs = zip(self._members, numbers, strict=True)
        numbered = {k: one for own, one in pairs for k in own}
        leaves = [leaf(k, numbered[k]) for k in sorted(numbered)]
        return executor.totals(self._stages, leaves, measured)

    def each(
        self,
        executor: Chunks,
        numbers: Sequence[StepScalars],
        gradients: list[Tensor],
        leaf: Callable[[int, StepScalars], Leaf],
    ) -> Tensor | None:
        """Return what each gradient adds to the first total; None to reduce each leaf alone."""
        stage = self._stages[self._first]
        if not isinstance(stage, Transform) or not executor.exact:
            return None
        with torch.no_grad():
            kinds = partial(self._leaf_of_each_kind, numbers, leaf)
            if not self._unchanged.find(numbers, kinds).gradients:
                return None
            return try_measure_each(stage, gradients, are_alike=self._on_one_device)

    def _leaf_of_each_kind(
        self, numbers: Sequence[StepScalars], leaf: Callable[[int, StepScalars], Leaf]
    ) -> list[Leaf]:
        """Return a leaf of each kind."""
        return [leaf(k, numbers[number]) for number, k in self._kinds]
