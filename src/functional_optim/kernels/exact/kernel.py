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
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.cache_key import (
    CacheKey,
    entry,
    has_entry,
    key_of,
    reader,
    require_few_choices,
)
from functional_optim.kernels.chunks import Table
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.exact.program import LoopProgram, exact_program
from functional_optim.kernels.free_variables import free_variables
from functional_optim.kernels.kernel import BindScalars, KernelStep
from functional_optim.kernels.trace import trace
from functional_optim.native.cache import SLOWER, CompileError, word_of_lacking

WORTH_COMPILING = 1 << 12
"""Elements from which a loop is compiled for a step, or for all steps of the same leaves so far."""


class _Found(NamedTuple):
    """The loop for chunks that are read alike."""

    program: LoopProgram
    compute_scalars: Any


class _Want(NamedTuple):
    """All that a loop depends on."""

    stages: tuple[Stage, ...]
    key: CacheKey
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

    def is_for(self, chunk: Leaf) -> bool:
        return chunk.param.is_cpu and chunk.scalars is Scalars.HOST

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        found = self._find(stages, chunk)
        return found if isinstance(found, str) else None

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        found = self._find(stages, chunk)
        if isinstance(found, str):
            return found
        program, compute_scalars, numbers, tensors = found

        def run(totals: Sequence[Tensor]) -> None:
            program.run(Table.of_tensors([tensors]), compute_scalars(numbers, totals))

        return run

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> BindScalars | None:
        found = self._find(stages, like, elements)
        if isinstance(found, str):
            return None
        program, compute_scalars, _, _ = found
        key = key_of(stages, like)[0]
        fetch, free = reader(key.classes, key.shape.static), free_variables(stages)

        def bind_scalars(
            coefficients: tuple[Any, ...], table: Table, totals: Sequence[Tensor]
        ) -> Callable[[], object] | None:
            numbers = fetch(coefficients) if free.hold() else None
            return (
                None if numbers is None else program.bound(table, compute_scalars(numbers, totals))
            )

        return bind_scalars

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        found = self._find(stages, chunk)
        assert not isinstance(found, str)
        rounding = "fused" if found[0].variant.fused else "separate"
        return f"exact; compiled, with {rounding} multiplications and additions as torch has them"

    def _find(
        self, stages: Sequence[Stage], chunk: Leaf, elements: int | None = None
    ) -> str | tuple[LoopProgram, Any, Any, list[Tensor]]:
        """Return the loop for a chunk, or for so many elements like it; or why there is none."""
        try:
            key, numbers, tensors = key_of(stages, chunk)
            count = chunk.param.numel() if elements is None else elements
            if self._sparing and count * _number(chunk.step) < WORTH_COMPILING:
                known = has_entry(chunk, "exact", key)
                if not known and _want(stages, key, tensors) not in _PROGRAMS:
                    return "no loop is compiled for so few elements"
            found = entry(chunk, "exact", key, lambda: _program(stages, key, numbers, tensors))
        except UntraceableError as error:
            return str(error)
        if isinstance(found, str):
            return found
        return found.program, found.compute_scalars, numbers, tensors


def _number(step: float | Tensor) -> float:
    """Return the number of the step, from 1, as far as it is known."""
    return 1.0 if isinstance(step, Tensor) else max(1.0, step)


def _want(stages: Sequence[Stage], key: CacheKey, tensors: Sequence[Tensor]) -> _Want:
    count = tensors[0].numel()
    # Of a single element, what it has per block looks like what it has per element.
    known = block_size_of(stages) > 1
    fewer = tuple(known and tensor.numel() != count for tensor in tensors)
    return _Want(tuple(stages), key, fewer)


def _program(
    stages: Sequence[Stage], key: CacheKey, numbers: Any, tensors: Sequence[Tensor]
) -> _Found | str:
    """The loop, or why there is none; found out once."""
    want = _want(stages, key, tensors)
    return _PROGRAMS.get_or_make(want, lambda: _made(want, numbers, tensors))


def _made(want: _Want, numbers: Any, tensors: Sequence[Tensor]) -> _Found | str:
    stages, key, _ = want
    try:
        require_few_choices(want, _PROGRAMS)
        with torch.device("cpu"):  # where others make their tensors matters not
            traced = trace(stages, key.classes, key.shape)
            totals = [torch.ones((), dtype=torch.float64)] * traced.totals
            scalar_args = traced.compute_scalars(numbers, totals)
            program = exact_program(traced, tensors, scalar_args, block_size_of(stages))
    except UntraceableError as error:
        return str(error)
    except (CompileError, OSError) as error:  # whatever it is, the step must still run
        _warn(str(error))
        return f"nothing is compiled: {error}"
    return _Found(program, traced.compute_scalars)


_WARNED: list[str] = []


def _warn(reason: str) -> None:
    """Once: whatever is not compiled is right, but slower."""
    word = word_of_lacking(reason)
    if word is None and not _WARNED:
        _WARNED.append(reason)
        word = f"no step is compiled: {reason}. {SLOWER}"
    if word:
        warnings.warn(word, RuntimeWarning, stacklevel=2)
