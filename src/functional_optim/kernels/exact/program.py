"""Loop programs: generated, compiled, and compared with torch's operations."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels.cache import compile_lock
from functional_optim.kernels.chunks import POINTER, Table
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.exact.emit import LoopText
from functional_optim.kernels.exact.frame import ALONE
from functional_optim.kernels.exact.library import has_library, table
from functional_optim.kernels.exact.phases import Variant
from functional_optim.kernels.exact.self_check import is_exact
from functional_optim.kernels.exact.verdict import RIGHT, WRONG, Verdict
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.validate import Validated, examples, validate
from functional_optim.native import cache
from functional_optim.native.build import thread_flags

FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fPIC",
    "-shared",
)
"""Flags of the compiler. It contracts only explicit ``fma`` calls, and sets no errno or traps."""


class LoopProgram(NamedTuple):
    """Compiled loop that makes the step of a chain."""

    step: Any
    """The C function, which releases the GIL."""
    library: Any
    variant: Variant

    def run(self, table: Table, scalar_args: Sequence[float | Tensor]) -> None:
        """Step the leaves of a table with the same scalars."""
        self.bound(table, scalar_args)()

    def bound(self, table: Table, scalar_args: Sequence[float | Tensor]) -> Callable[[], object]:
        """Bind a step; the number of threads is read when the step is called."""
        numbers = _doubles(len(scalar_args))(*map(float, scalar_args))
        if table.elements <= ALONE:
            return partial(self.step, *table[1:], numbers, 1, self.library)
        # The number of threads is read at each call, because a forked child has only one.
        step, library = self.step, self.library
        return lambda: step(*table[1:], numbers, threads(), library)


@lru_cache(maxsize=64)
def _doubles(count: int) -> Any:
    """Return the C type of an array of doubles."""
    return ctypes.c_double * count


_ALONE = [False]
"""True in a forked child, which does not have the threads of its parent."""


def _forked() -> None:
    _ALONE[0] = True


os.register_at_fork(after_in_child=_forked)


def threads() -> int:
    """Return the number of threads of a loop."""
    return 1 if _ALONE[0] else torch.get_num_threads()


@contextmanager
def _one_thread_if_alone() -> Iterator[None]:
    """Set torch to one thread in a forked child, where it would wait for the parent's threads."""
    before = torch.get_num_threads()
    if _ALONE[0]:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if _ALONE[0]:
            torch.set_num_threads(before)


def exact_program(
    trace: Trace, chunk: Sequence[Tensor], scalar_args: Sequence[Any], block_size: int
) -> LoopProgram:
    """Return the loop of a graph."""
    with torch.no_grad(), compile_lock(), _one_thread_if_alone():
        few = examples(chunk, block_size)
        validated = validate(trace, few, scalar_args)
        for variant in _variants():
            found = _tried(trace, validated, few, scalar_args, block_size, variant)
            if found is not None:
                _FOUND[:] = [variant]
                return found
    raise UntraceableError(
        "no loop gives the bits of torch's operations: the rounding of some of them depends on the "
        "position of an element, or is not known here"
    )


_FOUND: list[Variant] = []
"""The variant that was equal last time, which is tried first."""


def _variants() -> list[Variant]:
    libraries = (True, False) if has_library() else (False,)
    every = [Variant(fused, library) for fused in (True, False) for library in libraries]
    return [*_FOUND, *(one for one in every if one not in _FOUND)]


def _tried(
    trace: Trace,
    validated: Validated,
    few: Sequence[Tensor],
    scalar_args: Sequence[Any],
    block_size: int,
    variant: Variant,
) -> LoopProgram | None:
    """Return the loop of one variant; None if its bits differ from torch's."""
    source = LoopText(trace, validated, block_size, variant)
    library = table(source.calls, source.precision)
    if library is None:
        return None
    text = source.text()
    flags = (*FLAGS, *thread_flags())
    verdict = Verdict(text, flags)
    known = verdict.read()
    if known == WRONG:
        return None
    step = cache.library(text, flags).step
    step.restype = None
    step.argtypes = [ctypes.c_long, *[POINTER] * 3, ctypes.c_long, POINTER]
    program = LoopProgram(step, library, variant)
    if known == RIGHT:
        return program

    def run(tensors: Sequence[Tensor], numbers: Sequence[Any]) -> None:
        program.run(Table.from_tensors([tensors]), numbers)

    right = is_exact(run, trace, few, scalar_args, block_size)
    verdict.write(right)
    return program if right else None
