"""Python versions of the loops of :mod:`functional_optim.native`: slower, always available."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from itertools import chain, compress, repeat
from operator import add, attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_add_
from functional_optim._torch.tensors import DisableTorchFunction
from functional_optim.core.leaf import PLAIN
from functional_optim.kernels.chunks import is_dense
from functional_optim.native import LOOPS
from functional_optim.plan.guard import DEVICE, DTYPE, IS_LEAF, SHAPE

_BYTES, _LAYOUT = attrgetter("nbytes"), attrgetter("layout")
_STRIDED = frozenset({torch.strided})
_TRAITS: list[Callable[[Any], Any]] = [
    *(SHAPE, DTYPE, DEVICE),
    *(Tensor.stride, Tensor.is_conj, Tensor.is_neg),
]


def traits_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the layouts of dense tensors: shapes, dtypes, devices, strides, and views of values.

    ``requires_grad`` is no part of a layout.
    """
    return list(map(list, map(map, _TRAITS, repeat(tensors))))


class _Layout:
    """Layouts of tensors, and the addresses at which the last check of shared memory passed."""

    def __init__(
        self, tensors: Sequence[Tensor], written: Sequence[bool | None], slots: Sequence[int]
    ) -> None:
        self.traits = traits_of(tensors)
        self.are_dense = all((one.is_cpu or one.is_cuda) and is_dense(one) for one in tensors)
        """True if all tensors are dense in memory that has addresses."""
        self.sizes = list(map(_BYTES, tensors))
        self.changed = [one is not False for one in written]
        pairs = list(zip(written, self.sizes, strict=True))
        self.written = [one is True and size > 0 for one, size in pairs]
        self.read = [not one and size > 0 for one, size in pairs]
        by_slot = {slot: k for k, slot in enumerate(slots) if slot >= 0}
        self.order = [by_slot[slot] for slot in range(len(by_slot))]
        """The positions of the tensors whose pointers are wanted, in the order of the table."""
        self.last: list[int] = []

    def are_disjoint(self, starts: list[int]) -> bool:
        """Return True if all tensors have memory, and no written tensor shares its memory."""
        if 0 in compress(starts, self.sizes):
            return False  # its memory was freed
        spans = list(zip(starts, map(add, starts, self.sizes), strict=True))
        closed = sorted(compress(spans, self.written))
        reach = 0
        for begin, end in closed:
            if begin < reach:
                return False
            reach = end
        begins = [begin for begin, _ in closed]
        for begin, end in compress(spans, self.read):
            last = bisect_left(begins, end) - 1  # of those that begin before its end
            if last >= 0 and closed[last][1] > begin:
                return False
        return True


class PythonLoops:
    """Functions of :class:`~functional_optim.native.Loops` that plans need, in Python."""

    @staticmethod
    def walk(tree: Any) -> tuple[list[Tensor], list[Any]] | None:
        """Return the tensors of a tree and its form, as the native function does."""
        tensors: list[Tensor] = []
        form: list[Any] = []
        left = [tree]
        while left:
            one = left.pop()
            if type(one) in PLAIN:
                tensors.append(one)
                form.append(True)
            elif isinstance(one, tuple) or type(one) is list:
                form += [len(one), type(one)]
                left += reversed(one)
            elif one is None:
                form.append(None)
            else:
                return None
        return tensors, form

    @staticmethod
    def lay_out(tensors: list[Any], written: list[bool | None], slots: list[int]) -> _Layout | None:
        """Record layouts for :meth:`locate`; None if a tensor is not plain and strided."""
        if not PLAIN.issuperset(map(type, tensors)) or not _STRIDED.issuperset(
            map(_LAYOUT, tensors)
        ):
            return None
        return _Layout(tensors, written, slots)

    @staticmethod
    def hold(layout: _Layout, tensors: list[Any]) -> bool:
        """Return True if tensors have the layouts."""
        if len(tensors) != len(layout.sizes) or not PLAIN.issuperset(map(type, tensors)):
            return False
        # A mode such as that of torch.set_default_device would run Python at every call.
        with DisableTorchFunction():
            try:
                return traits_of(tensors) == layout.traits
            except RuntimeError:  # a sparse tensor
                return False

    @staticmethod
    def locate(layout: _Layout, tensors: list[Any]) -> bytes | None:
        """Return the pointers of tensors, as the native function does."""
        is_like = layout.are_dense and len(tensors) == len(layout.sizes)
        if not (is_like and PLAIN.issuperset(map(type, tensors))):
            return None
        with DisableTorchFunction():
            try:
                if traits_of(tensors) != layout.traits:  # as hold(), without its call
                    return None
                starts = list(map(Tensor.data_ptr, tensors))
            except RuntimeError:  # a sparse tensor, or a tensor without memory
                return None
            written = list(compress(tensors, layout.changed))
            if not all(map(IS_LEAF, written)) or any(map(Tensor.is_inference, written)):
                return None
        if starts != layout.last:
            if not layout.are_disjoint(starts):
                return None
            layout.last = starts
        pointers = list(map(starts.__getitem__, layout.order))
        return bytes((c_void_p * len(pointers))(*pointers))

    @staticmethod
    def common(tensors: list[Any], positions: list[int] | None = None) -> int | bool | None:
        """Return the integer that all tensors (at these positions) hold; None if they differ.

        Return False if a tensor is not a plain, contiguous int64 tensor.
        """
        counts = tensors if positions is None else list(map(tensors.__getitem__, positions))
        if not PLAIN.issuperset(map(type, counts)) or {*map(DTYPE, counts)} != {torch.int64}:
            return False
        if not all(map(Tensor.is_contiguous, counts)):
            return False
        found: list[Any] = list(map(Tensor.tolist, counts))
        if list in map(type, found):
            found = list(chain.from_iterable(map(Tensor.tolist, map(Tensor.flatten, counts))))
        first: int = found[0]
        return first if found.count(first) == len(found) else None

    @staticmethod
    def advance_each(tensors: list[Any], positions: list[int] | None = None) -> bool:
        """Add 1 to each element of the tensors (at these positions)."""
        counts = tensors if positions is None else list(map(tensors.__getitem__, positions))
        with torch.no_grad():
            foreach_add_(counts, 1)
        return True

    @staticmethod
    def bump(tensors: list[Any], positions: list[int] | None = None) -> None:
        """Tell autograd that the tensors (at these positions) were written to."""
        some = tensors if positions is None else list(map(tensors.__getitem__, positions))
        torch.autograd.graph.increment_version(some)


PYTHON_LOOPS = PythonLoops()


def loops_for(count: int) -> Any:
    """Return the native loops if they are loaded, else the Python loops.

    For many tensors, the compiler is started in the background.
    """
    return LOOPS.loaded or LOOPS.get(count) or PYTHON_LOOPS
