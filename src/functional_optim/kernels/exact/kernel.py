"""Kernel that runs a chain as one C++ loop with the bits of torch's own operations.

The loop is generated from the graph of the chain. It is compiled at the first use in some tenths of
a second, compared with torch's operations, and cached on disk. One loop serves any number and
length of leaves, any step and any learning rate. It gets pointers to the tensors of the leaves.
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
from functional_optim.kernels.chunks import Table, tensors_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.exact.program import LoopProgram, exact_program
from functional_optim.kernels.free_variables import free_variables
from functional_optim.kernels.kernel import BindScalars, KernelStep
from functional_optim.kernels.pointwise_check import check_pointwise_stages
from functional_optim.kernels.trace import trace
from functional_optim.native.cache import SLOWER, CompileError, missing_compiler_warning

WORTH_COMPILING = 1 << 12
"""Number of elements, summed over the steps of a leaf so far, from which a loop is compiled."""


class _Found(NamedTuple):
    """Compiled loop, and the function that computes its scalar arguments."""

    program: LoopProgram
    compute_scalars: Any


class _Want(NamedTuple):
    """Key of a loop."""

    stages: tuple[Stage, ...]
    key: CacheKey
    fewer: tuple[bool, ...]
    """For each tensor, True if it has one element per block."""


_PROGRAMS: Cache[_Found | str] = Cache()
"""Loops by :class:`_Want`; the reason if a loop cannot be used."""


class ExactKernel:
    """Kernel that runs a chain as a compiled loop, bit for bit like torch's operations.

    Args:
        sparing: True to compile a loop only from :data:`WORTH_COMPILING` elements on.
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
            program.run(Table.from_tensors([tensors]), compute_scalars(numbers, totals))

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
            numbers = fetch(coefficients) if not free.reads or free.hold() else None
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
        """Return the loop for a chunk or a table of ``elements``, or the reason why it has none."""
        try:
            key, numbers, tensors = key_of(stages, chunk)
            count = chunk.param.numel() if elements is None else elements
            if self._sparing and count * _number(chunk.step) < WORTH_COMPILING:
                known = has_entry(chunk, "exact", key)
                if not known and _want(stages, key, tensors) not in _PROGRAMS:
                    return "no loop is compiled for so few elements"
            found = entry(chunk, "exact", key, lambda: _program(stages, chunk, key, numbers))
        except UntraceableError as error:
            return str(error)
        if isinstance(found, str):
            return found
        return found.program, found.compute_scalars, numbers, tensors


def _number(step: float | Tensor) -> float:
    """Return the step count, at least 1; 1 if it is a tensor."""
    return 1.0 if isinstance(step, Tensor) else max(1.0, step)


def _want(stages: Sequence[Stage], key: CacheKey, tensors: Sequence[Tensor]) -> _Want:
    count = tensors[0].numel()
    # In a leaf of one element, state per block cannot be told from state per element.
    known = block_size_of(stages) > 1
    fewer = tuple(known and tensor.numel() != count for tensor in tensors)
    return _Want(tuple(stages), key, fewer)


def _program(stages: Sequence[Stage], chunk: Leaf, key: CacheKey, numbers: Any) -> _Found | str:
    """Return the loop, or the reason why there is none; cached."""
    want = _want(stages, key, tensors_of(chunk))
    return _PROGRAMS.get_or_make(want, lambda: _made(want, chunk, numbers))


def _made(want: _Want, chunk: Leaf, numbers: Any) -> _Found | str:
    stages, key, _ = want
    try:
        require_few_choices(want, _PROGRAMS)
        with torch.device("cpu"):  # a user may have set another default device
            traced = trace(stages, key.classes, key.shape)
            totals = [torch.ones((), dtype=torch.float64)] * traced.totals
            scalar_args = traced.compute_scalars(numbers, totals)
            check_pointwise_stages(stages, chunk, totals)
            size = block_size_of(stages)
            program = exact_program(traced, tensors_of(chunk), scalar_args, size)
    except UntraceableError as error:
        return str(error)
    except (CompileError, OSError) as error:  # the step must run without a compiler, too
        _warn(str(error))
        return f"nothing is compiled: {error}"
    return _Found(program, traced.compute_scalars)


_WARNED: list[str] = []


def _warn(reason: str) -> None:
    """Warn once that steps are slower because nothing is compiled."""
    word = missing_compiler_warning(reason)
    if word is None and not _WARNED:
        _WARNED.append(reason)
        word = f"no step is compiled: {reason}. {SLOWER}"
    if word:
        warnings.warn(word, RuntimeWarning, stacklevel=2)
