"""Totals: the totals that a planned run computes over its leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.stage import Stage, Transform
from functional_optim.kernels import Chunks, Leaf, is_measured, total_of
from functional_optim.kernels.totals import UnchangedBy, try_measure_each


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
        coefficients: Sequence[tuple[Any, ...]],
        gradients: list[Tensor],
        measured: Sequence[Tensor],
        leaf: Callable[[int, tuple[Any, ...]], Leaf],
    ) -> Sequence[Tensor]:
        """Return all totals, if every leaf is in a chunk. The caller turns autograd off.

        Args:
            coefficients: for each chunk, those of this step.
            gradients: of all leaves, in their order.
            leaf: returns the leaf at a position, with coefficients, as stages see it.
        """
        if self.count == 1 and not measured and self._hand_on(coefficients, leaf):
            stage = self._stages[self._first]
            return [total_of(stage, gradients, are_alike=self._on_one_device)]
        pairs = zip(self._members, coefficients, strict=True)
        numbered = {k: one for own, one in pairs for k in own}
        leaves = [leaf(k, numbered[k]) for k in sorted(numbered)]
        return executor.totals(self._stages, leaves, measured)

    def each(
        self,
        executor: Chunks,
        coefficients: Sequence[tuple[Any, ...]],
        gradients: list[Tensor],
        leaf: Callable[[int, tuple[Any, ...]], Leaf],
    ) -> Tensor | None:
        """Return what each gradient adds to the first total; None to reduce each leaf alone."""
        stage = self._stages[self._first]
        if not isinstance(stage, Transform) or not executor.exact:
            return None
        with torch.no_grad():
            passes = self._hand_on(coefficients, leaf)
            if not passes:
                return None
            return try_measure_each(stage, gradients, are_alike=self._on_one_device)

    def _hand_on(
        self, coefficients: Sequence[tuple[Any, ...]], leaf: Callable[[int, tuple[Any, ...]], Leaf]
    ) -> bool:
        """Return True if the stages before the first total do not change gradients."""
        now = [one[: self._first] for one in coefficients]

        def leaves() -> list[Leaf]:
            return [leaf(k, coefficients[number]) for number, k in self._kinds]

        return self._unchanged.find(now, leaves).gradients
