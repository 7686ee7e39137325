"""Whole leaves stepped one by one, by programs that write into kept memory.

The reference makes each temporary anew, and copies its results to where they belong. A program is
the same operations, so the same bits, written into memory that is kept from step to step, and into
the parameter and its state themselves. A leaf of which there is no program goes the reference's
way: one whose rules look at data, or whose tensors are no plain ones, or share memory.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from functional_optim._torch import is_functorch_wrapped_tensor
from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kept_memory import KeptMemory
from functional_optim.kernels.lanes import tensors_of
from functional_optim.kernels.reading import Reader, reader
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.shaped_trace import shaped_trace
from functional_optim.kernels.signature import Numbers, signature
from functional_optim.kernels.whole_program import WholeProgram, whole_program

PROGRAMS = 512
"""How many programs are remembered."""

_KEPT = KeptMemory()


class _Known(NamedTuple):
    """A program, and what gives it its uniform values."""

    program: WholeProgram
    prologue: Callable[[Numbers, Sequence[Tensor]], tuple[Any, ...]]


_Programs = dict[Any, "_Known | None"]
"""Programs by the layouts of tensors."""


class _Read(NamedTuple):
    """How the numbers of a chain are read off its coefficients, while its choices are the same."""

    stages: tuple[Stage, ...]
    """Kept, so that no others have their ids."""
    fetch: Reader
    programs: _Programs


class WholeLeaves:
    """Steps leaves one by one, each as a whole; bit for bit as the reference does."""

    def __init__(self) -> None:
        self._reference = ReferenceExecutor()
        self._programs: dict[Any, _Programs] = {}
        self._count = 0
        self._readings: dict[tuple[int, ...], _Read] = {}
        """What the last step of these stages was found by."""

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], totals: Sequence[Tensor]
    ) -> None:
        """The step, written into the params and states of the leaves.

        Args:
            stages: of the chain.
            leaves: with gradients.
            totals: the sum of each measured stage.
        """
        found: _Programs | None = None
        numbers: Numbers = []
        seen: Any = self  # no coefficients are this
        for leaf in leaves:
            if leaf.coefficients is not seen:
                seen = leaf.coefficients
                found, numbers = self._programs_for(stages, leaf)
            tensors = tensors_of(leaf)
            known = None
            if found is not None and _are_plain(tensors):
                known = self._known(found, stages, leaf, tensors)
            if known is None:
                self._reference.update_(stages, [leaf], totals)
                continue
            program = known.program
            kept = _KEPT.tensors(program, program.kept_bytes, program.tensors)
            program.step(*tensors, *known.prologue(numbers, totals), *kept)

    def _programs_for(
        self, stages: Sequence[Stage], leaf: Leaf
    ) -> tuple[_Programs | None, Numbers]:
        """The programs for leaves with these coefficients, and the numbers among those."""
        if leaf.scalars is Scalars.DEVICE:
            return None, []
        ids = tuple(map(id, stages))
        read = self._readings.get(ids)
        fetched = None if read is None else read.fetch(leaf.coefficients)
        if read is not None and fetched is not None:
            return read.programs, fetched
        try:
            shape, numbers, _ = signature(stages, leaf)
        except UntraceableError:
            return None, []
        programs = self._programs.setdefault((tuple(stages), shape), {})
        if not any(count is not None for fields in shape.fields for count in fields):
            fetch = reader(tuple(map(type, leaf.coefficients)), shape.static)
            if len(self._readings) >= PROGRAMS:
                self._readings.clear()
            self._readings[ids] = _Read(tuple(stages), fetch, programs)
        return programs, numbers

    def _known(
        self, programs: _Programs, stages: Sequence[Stage], leaf: Leaf, tensors: Sequence[Tensor]
    ) -> _Known | None:
        """The program for leaves like this one; None if there is none."""
        layouts = tuple([(one.shape, one.dtype) for one in tensors])
        try:
            return programs[layouts]
        except KeyError:
            found = programs[layouts] = _written(stages, leaf)
        self._count += 1
        if self._count >= PROGRAMS:
            self._programs.clear()
            self._readings.clear()
            self._count = 0
        return found


def _written(stages: Sequence[Stage], leaf: Leaf) -> _Known | None:
    try:
        shape, numbers, _ = signature(stages, leaf)
        trace, values = shaped_trace(stages, leaf, shape, numbers)
        return _Known(whole_program(trace, values), trace.prologue)
    except UntraceableError:
        return None


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are contiguous tensors of the CPU, and none is part of another."""
    spans = []
    for one in tensors:
        if type(one) not in (Tensor, Parameter) or not one.is_cpu or one.is_conj() or one.is_neg():
            return False
        if is_functorch_wrapped_tensor(one) or not one.is_contiguous():
            return False
        start = one.data_ptr()
        spans.append((start, start + one.numel() * one.element_size()))
    spans.sort()
    return all(end <= start for (_, end), (start, _) in pairwise(spans))
