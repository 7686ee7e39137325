"""ListLayout and StepLayout: the layouts of tensors in the list of a step."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import strided

from functional_optim.core.leaf import PLAIN
from functional_optim.kernels.chunks import is_dense
from functional_optim.native import LOOPS
from functional_optim.plan.guard import LayoutGuard
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.python_loops import PYTHON_LOOPS, loops_for


class ListLayout:
    """Layouts of some tensors in the list of a step, checked in one call. It holds no tensor.

    Args:
        positions: of the tensors whose layouts are fixed.
        written: positions of the tensors that the step writes to.
        places: positions of the tensors whose pointers kernels get, in the order of the pointers.
        leaves: number of leaves of the step.
    """

    def __init__(
        self,
        tensors: list[Any],
        positions: Iterable[int],
        written: Collection[int],
        places: Sequence[int] = (),
        *,
        leaves: int,
    ) -> None:
        self._positions = sorted(positions)
        self._is_all = self._positions == list(range(len(tensors)))
        slots = [-1] * len(tensors)
        for slot, k in enumerate(places):
            slots[k] = slot
        self._written = [k in written for k in self._positions]
        self._slots = self.fixed(slots)
        self._leaves, self._steps = leaves, 0
        self.loops = loops_for(len(tensors))
        """The loops that check the tensors."""
        are_apart = len({*places}) == len(places)  # else a kernel would find no pointer
        layout = self._lay_out(self.loops, tensors) if are_apart else None
        self._laid: tuple[Any, Any] = self.loops, layout

    def fixed(self, tensors: list[Any]) -> list[Any]:
        """Return the tensors of a list whose layouts are fixed."""
        return tensors if self._is_all else list(map(tensors.__getitem__, self._positions))

    def _lay_out(self, loops: Any, tensors: list[Any]) -> Any:
        """Record the layouts of tensors; None if a kernel cannot step them."""
        return loops.lay_out(self.fixed(tensors), self._written, self._slots)

    def hold(self, tensors: list[Any]) -> bool:
        """Return True if the tensors have these layouts, at any address."""
        loops, layout = self._laid  # ``fixed`` would be one more Python call
        fixed = tensors if self._is_all else list(map(tensors.__getitem__, self._positions))
        return layout is not None and bool(loops.hold(layout, fixed, False))

    def locate(self, tensors: list[Any]) -> bytes | None:
        """Return the pointers of tensors, or None if the step must not use them.

        The result is None if a layout has changed, or if a written tensor is a result of autograd,
        is an inference tensor, or shares memory with another tensor.
        """
        loops, layout = self._laid
        if layout is None:
            return None
        fixed = tensors if self._is_all else list(map(tensors.__getitem__, self._positions))
        pointers: bytes | None = loops.locate(layout, fixed)
        if loops is PYTHON_LOOPS and pointers is not None:
            # A plan of few leaves is worth a compiler once it has made many steps.
            self._steps += 1
            native = LOOPS.get(self._leaves * self._steps)
            layout = None if native is None else self._lay_out(native, tensors)
            if layout is not None:
                self.loops, self._laid = native, (native, layout)
        return pointers


def fills_memory(tensor: Any) -> bool:
    """Return True for a plain, strided tensor without gaps in its memory."""
    return type(tensor) in PLAIN and tensor.layout == strided and is_dense(tensor)


class StepLayout:
    """The layouts of all tensors of a step, over all of its runs. It holds no tensor.

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
