"""StepLayout: the layouts of all tensors of a step, over all of its runs."""

from collections.abc import Sequence
from typing import Any

from functional_optim.core.leaf import PLAIN
from functional_optim.plan.guard import LayoutGuard
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.list_layout import ListLayout, fills_memory


class StepLayout:
    """The layouts of all tensors of a step. It holds no tensor.

    Args:
        rows: for each leaf, the positions of its tensors. A leaf without states is frozen.
        more: positions of tensors that a step writes to, and that belong to no leaf.
        tensors: the list of a step. All tensors of leaves are plain and strided.
    """

    def __init__(
        self, rows: Sequence[LeafPositions], more: Sequence[int], tensors: list[Any]
    ) -> None:
        own = [k for row in rows if row.states for k in row.kept]
        frozen = [row.param for row in rows if not row.states]
        grads = [row.grad for row in rows if tensors[row.grad] is not None]
        used = dict.fromkeys([*own, *more, *frozen, *grads])
        written = {*own, *more}
        located = [k for k in used if fills_memory(tensors[k])]
        self._layout = ListLayout(tensors, located, written, leaves=len(rows))
        self._loose = sorted(used.keys() - {*located})
        self._alike = LayoutGuard([tensors[k] for k in self._loose]) if self._loose else None
        self.is_located = not self._loose
        """True if every tensor is dense, so that shared memory is found."""

    def holds(self, tensors: list[Any], *, in_place: bool) -> bool:
        """Return True if all tensors have these layouts.

        Args:
            tensors: the list of a step.
            in_place: True to check also that the step may write to its tensors, and that no written
                tensor shares memory with another one.
        """
        layout = self._layout
        there = layout.locate(tensors) is not None if in_place else layout.hold(tensors)
        return there and (self._alike is None or self._are_alike(tensors))

    def _are_alike(self, tensors: list[Any]) -> bool:
        loose = [tensors[k] for k in self._loose]
        if self._alike is None or not PLAIN.issuperset(map(type, loose)):
            return False
        try:
            return self._alike(loose)
        except RuntimeError:  # a sparse one
            return False
