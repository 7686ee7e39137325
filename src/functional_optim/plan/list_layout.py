"""ListLayout and StepLayout: the layouts of tensors in a step; MemoryGuard: also the addresses."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, strided

from functional_optim._torch.tensors import DisableTorchFunction
from functional_optim.core.leaf import PLAIN
from functional_optim.kernels.chunks import is_dense
from functional_optim.native import LOOPS
from functional_optim.plan.guard import IS_LEAF
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.python_loops import PYTHON_LOOPS, loops_for, traits_of


class ListLayout:
    """Layouts of some tensors in the list of a step, checked in one call. It holds no tensor.

    Args:
        positions: of the tensors whose layouts are fixed.
        written: positions of the tensors that the step writes to.
        places: positions of the tensors whose pointers kernels get, in the order of the pointers.
        leaves: number of leaves of the step; 0 if no compiler may be started.
        unshared: False if written tensors may share memory with others.
    """

    def __init__(
        self,
        tensors: list[Any],
        positions: Iterable[int],
        written: Collection[int],
        places: Sequence[int] = (),
        *,
        leaves: int,
        unshared: bool = True,
    ) -> None:
        self._positions = sorted(positions)
        self._is_all = self._positions == list(range(len(tensors)))
        slots = [-1] * len(tensors)
        for slot, k in enumerate(places):
            slots[k] = slot
        is_written = True if unshared else None
        self._written = [is_written if k in written else False for k in self._positions]
        self._slots = self.fixed(slots)
        self._leaves, self._steps = leaves, 0
        self.loops = loops_for(len(tensors) if leaves else 0)
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
        held = layout is not None and bool(loops.hold(layout, fixed))
        if held and loops is PYTHON_LOOPS and LOOPS.loaded is not None:
            self._use(LOOPS.loaded, tensors)
        return held

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
            native = LOOPS.get(self._leaves * self._steps) if self._leaves else LOOPS.loaded
            if native is not None:
                self._use(native, tensors)
        return pointers

    def _use(self, native: Any, tensors: list[Any]) -> None:
        """Check these tensors by native loops from now on, if the loops can."""
        layout = self._lay_out(native, tensors)
        if layout is not None:
            self.loops, self._laid = native, (native, layout)


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
        loose = used.keys() - {*located}
        self._loose = ListLayout(tensors, loose, (), leaves=0) if loose else None
        self.is_located = not loose
        """True if every tensor is dense, so that shared memory is found."""

    def holds(self, tensors: list[Any], *, in_place: bool) -> bool:
        """Return True if all tensors have these layouts.

        For a step in place, also check that the step may write to its tensors, and that no written
        tensor shares memory with another one.
        """
        layout = self._layout
        there = layout.locate(tensors) is not None if in_place else layout.hold(tensors)
        return there and (self._loose is None or self._loose.hold(tensors))


class MemoryGuard:
    """Guard that tensors have the layouts and the addresses of views.

    Args:
        views: of memory that the caller keeps alive, so that no other tensor can get it.
        leaves: number of first tensors that must be leaves of autograd.
    """

    def __init__(self, views: Sequence[Tensor], *, leaves: int = 0) -> None:
        every = range(len(views))
        self.layout = ListLayout(list(views), every, range(leaves), every, leaves=0, unshared=False)
        """The layouts of the views, at any address."""
        self._leaves = leaves
        self._pointers = self.layout.locate(list(views))
        self._memory = self._memory_of(views) if self._pointers is None else None
        """Layouts and addresses of views that are not dense, or without addresses."""

    def hold(self, tensors: list[Tensor]) -> bool:
        """Return True if each tensor is the same memory, shape, strides and dtype as its view."""
        if self._pointers is not None:
            return self.layout.locate(tensors) == self._pointers
        return self._memory is not None and self._memory_of(tensors) == self._memory

    def _memory_of(self, tensors: Sequence[Tensor]) -> list[list[Any]] | None:
        """Return layouts and addresses; None for a sparse tensor, or a result of autograd."""
        # A mode such as that of torch.set_default_device would run Python at every call.
        with DisableTorchFunction():
            try:
                are_leaves = all(map(IS_LEAF, tensors[: self._leaves]))
                found = [*traits_of(tensors), list(map(Tensor.data_ptr, tensors))]
            except RuntimeError:  # a sparse tensor, or a tensor without memory
                return None
        return found if are_leaves else None
