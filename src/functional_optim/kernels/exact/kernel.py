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

from functional_optim.core.leaf import Leaf
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
    """A chain as a loop that is torch's operations, bit for bit."""

    exact = True
    takes_device_scalars = False

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
        found = self._find(stages, like)
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

    def is_cut_freely(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        return self.supports(stages, lane) is None

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        found = self._find(stages, lane)
        assert not isinstance(found, str)
        rounding = "fused" if found[0].variant.fused else "separate"
        return f"exact; compiled, with {rounding} multiplications and additions as torch has them"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        self._find(stages, lane)
        return True

    def is_there(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        """Whether the loop is in memory already, or known to be refused; compiles nothing."""
        try:
            reading, _, tensors = read(stages, lane)
        except UntraceableError:
            return True
        return is_kept(lane, "exact", reading) or _want(stages, reading, tensors) in _PROGRAMS

    def _find(
        self, stages: Sequence[Stage], lane: Leaf
    ) -> str | tuple[Program, Any, Any, list[Tensor]]:
        """What steps a lane; or why nothing here does."""
        if not lane.param.is_cpu:
            return f"exact loops are for the CPU, not for {lane.param.device}"
        try:
            reading, numbers, tensors = read(stages, lane)
            found = kept(
                lane, "exact", reading, lambda: _program(stages, reading, numbers, tensors)
            )
        except UntraceableError as error:
            return str(error)
        if isinstance(found, str):
            return found
        return found.program, found.prologue, numbers, tensors


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
