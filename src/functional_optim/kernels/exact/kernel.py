"""The exact kernel: a chain as one loop in C++ that gives the bits of torch's own operations.

It is written from the chain's graph, compiled in some tenths of a second when it is first wanted,
held against torch's operations, and kept on disk. One loop serves leaves of any length and number,
any step and any learning rate; leaves, gradients and state are read where they lie.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, grain_of
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.exact.program import Program, exact_program
from functional_optim.kernels.kernel import Feed, Run
from functional_optim.kernels.lane_table import Table
from functional_optim.kernels.reading import (
    Reading,
    is_kept,
    kept,
    read,
    reader,
    require_few_choices,
)
from functional_optim.kernels.trace import trace
from functional_optim.native.cache import SLOWER, CompileError, word_of_lacking

WORTH_COMPILING = 1 << 12
"""Elements from which a loop is compiled for a step, or for all steps of the same leaves so far."""


class _Found(NamedTuple):
    """The loop for lanes that are read alike."""

    program: Program
    prologue: Any


class _Want(NamedTuple):
    """All that a loop depends on."""

    stages: tuple[Stage, ...]
    reading: Reading
    fewer: tuple[bool, ...]
    """Which tensors have an entry per block."""


_PROGRAMS: Cache[_Found | str] = Cache()
"""By :class:`_Want`; of which there is no loop, why."""


class ExactKernel:
    """A chain as a loop that is torch's operations, bit for bit.

    Args:
        sparing: whether a loop is compiled only where that is worth while.
    """

    exact = True

    def __init__(self, *, sparing: bool = False) -> None:
        self._sparing = sparing

    def is_for(self, lane: Leaf) -> bool:
        return lane.param.is_cpu and lane.scalars is Scalars.HOST

    def supports(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        found = self._find(stages, lane)
        return found if isinstance(found, str) else None

    def bind(self, stages: Sequence[Stage], lane: Leaf) -> Run | str:
        found = self._find(stages, lane)
        if isinstance(found, str):
            return found
        program, prologue, numbers, tensors = found

        def run(totals: Sequence[Tensor]) -> None:
            program.run(Table.of_tensors([tensors]), prologue(numbers, totals))

        return run

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> Feed | None:
        found = self._find(stages, like, elements)
        if isinstance(found, str):
            return None
        program, prologue, _, _ = found
        reading = read(stages, like)[0]
        fetch = reader(reading.classes, reading.shape.static)

        def feed(
            coefficients: tuple[Any, ...], table: Table, totals: Sequence[Tensor]
        ) -> Callable[[], object] | None:
            numbers = fetch(coefficients)
            return None if numbers is None else program.bound(table, prologue(numbers, totals))

        return feed

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        found = self._find(stages, lane)
        assert not isinstance(found, str)
        rounding = "fused" if found[0].variant.fused else "separate"
        return f"exact; compiled, with {rounding} multiplications and additions as torch has them"

    def _find(
        self, stages: Sequence[Stage], lane: Leaf, elements: int | None = None
    ) -> str | tuple[Program, Any, Any, list[Tensor]]:
        """What steps a lane, or so many elements like it; or why nothing here does."""
        try:
            reading, numbers, tensors = read(stages, lane)
            count = lane.param.numel() if elements is None else elements
            if self._sparing and count * _number(lane.step) < WORTH_COMPILING:
                known = is_kept(lane, "exact", reading)
                if not known and _want(stages, reading, tensors) not in _PROGRAMS:
                    return "no loop is compiled for so few elements"
            found = kept(
                lane, "exact", reading, lambda: _program(stages, reading, numbers, tensors)
            )
        except UntraceableError as error:
            return str(error)
        if isinstance(found, str):
            return found
        return found.program, found.prologue, numbers, tensors


def _number(step: float | Tensor) -> float:
    """Which step it is, from 1, as far as it is known."""
    return 1.0 if isinstance(step, Tensor) else max(1.0, step)


def _want(stages: Sequence[Stage], reading: Reading, tensors: Sequence[Tensor]) -> _Want:
    count = tensors[0].numel()
    # Of a single element, what it has per block looks like what it has per element.
    known = grain_of(stages) > 1
    fewer = tuple(known and tensor.numel() != count for tensor in tensors)
    return _Want(tuple(stages), reading, fewer)


def _program(
    stages: Sequence[Stage], reading: Reading, numbers: Any, tensors: Sequence[Tensor]
) -> _Found | str:
    """The loop, or why there is none; found out once."""
    want = _want(stages, reading, tensors)
    return _PROGRAMS.get_or_make(want, lambda: _made(want, numbers, tensors))


def _made(want: _Want, numbers: Any, tensors: Sequence[Tensor]) -> _Found | str:
    stages, reading, _ = want
    try:
        require_few_choices(want, _PROGRAMS)
        with torch.device("cpu"):  # where others make their tensors matters not
            traced = trace(stages, reading.classes, reading.shape)
            totals = [torch.ones((), dtype=torch.float64)] * traced.totals
            uniform = traced.prologue(numbers, totals)
            program = exact_program(traced, tensors, uniform, grain_of(stages))
    except UntraceableError as error:
        return str(error)
    except (CompileError, OSError) as error:  # whatever it is, the step must still run
        _warn(str(error))
        return f"nothing is compiled: {error}"
    return _Found(program, traced.prologue)


_WARNED: list[str] = []


def _warn(reason: str) -> None:
    """Once: whatever is not compiled is right, but slower."""
    word = word_of_lacking(reason)
    if word is None and not _WARNED:
        _WARNED.append(reason)
        word = f"no step is compiled: {reason}. {SLOWER}"
    if word:
        warnings.warn(word, RuntimeWarning, stacklevel=2)
