"""A chain's loop: written, compiled, held against torch's operations, and called."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels.cache import turn
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
"""No contraction but the one that is written, and no error that nobody looks at."""


class LoopProgram(NamedTuple):
    """A loop that makes a chain's step."""

    step: Any
    """The function in C; it lets go of the GIL."""
    library: Any
    variant: Variant

    def run(self, table: Table, scalar_args: Sequence[float | Tensor]) -> None:
        """Step several leaves, with numbers that are the same for all."""
        self.bound(table, scalar_args)()

    def bound(self, table: Table, scalar_args: Sequence[float | Tensor]) -> Callable[[], object]:
        """Bind a step that is called later, in the threads of that time."""
        numbers = _doubles(len(scalar_args))(*map(float, scalar_args))
        if table.elements <= ALONE:
            return partial(self.step, *table[1:], numbers, 1, self.library)
        # How many threads there are is asked at each call: a forked child has one.
        step, library = self.step, self.library
        return lambda: step(*table[1:], numbers, threads(), library)


@lru_cache(maxsize=64)
def _doubles(count: int) -> Any:
    """So many numbers, as C holds them."""
    return ctypes.c_double * count


_ALONE = [False]
"""Whether this is a forked child: the threads that its parent computed in are not there."""


def _forked() -> None:
    _ALONE[0] = True


os.register_at_fork(after_in_child=_forked)


def threads() -> int:
    """In how many threads a loop works."""
    return 1 if _ALONE[0] else torch.get_num_threads()


@contextmanager
def _one_thread_if_alone() -> Iterator[None]:
    """In a forked child, torch would wait for threads that only its parent has."""
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
    """The loop of a graph.

    Args:
        trace: of a pointwise chain.
        chunk: tensors whose dtypes are the program's.
        scalar_args: the numbers of some step.
        block_size: the granularity of the chain.

    Raises:
        UntraceableError: there is none; the text says why.
        NotPointwiseError: the graph looks at more than one element at a time.
        CompileError: nothing can be compiled.
    """
    with torch.no_grad(), turn(), _one_thread_if_alone():
        few = examples(chunk, block_size)
        validated = validate(trace, few, scalar_args, pointwise=block_size == 1)
        for variant in _variants():
            found = _tried(trace, validated, few, scalar_args, block_size, variant)
            if found is not None:
                _FOUND[:] = [variant]
                return found
    raise UntraceableError(
        "no loop gives the bits of torch's operations: some of them round by where an element "
        "stands, or otherwise than is known here"
    )


_FOUND: list[Variant] = []
"""The variant that was right the last time: it is this machine's, most likely."""


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
    """The loop of one variant, if it is right."""
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
    step.argtypes = [ctypes.c_long, *[POINTER] * 4, ctypes.c_long, POINTER]
    program = LoopProgram(step, library, variant)
    if known == RIGHT:
        return program

    def run(tensors: Sequence[Tensor], numbers: Sequence[Any]) -> None:
        program.run(Table.of_tensors([tensors]), numbers)

    right = is_exact(run, trace, few, scalar_args, block_size)
    verdict.write(right)
    return program if right else None
