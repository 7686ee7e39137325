"""Kernel that steps lists of leaves with torch's foreach functions.

For a small tensor, a launch or a Python call costs more than the computation. So one call of a
foreach function runs an operation of the graph for all leaves, if a trial shows that the bits are
equal. All other operations run leaf by leaf. The step equals the reference bit for bit, needs no
compiler, and has about as many launches as the rule has operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.cache_key import CacheKey, entry, key_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import KernelStep
from functional_optim.kernels.list_program import ListProgram, list_program
from functional_optim.kernels.pointwise_check import check_pointwise_stages
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.trace import trace

SLAB = 1 << 25
"""Largest number of elements that are stepped at a time, which limits the memory of temporaries."""

_PROGRAMS: Cache[ListProgram] = Cache()


class ForeachKernel:
    """Kernel that steps lists of leaves with torch's foreach functions.

    Args:
        on_cpu: True for the CPU, False for accelerators.
    """

    name = "foreach"

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu

    def is_for(self, like: Leaf) -> bool:
        return like.scalars is Scalars.HOST and like.param.is_cpu is self._on_cpu

    def bind_lists(
        self, stages: Sequence[Stage], like: Leaf, columns: Sequence[list[Tensor]]
    ) -> KernelStep | str:
        if block_size_of(stages) > 1:
            return "it works in blocks of several elements"
        try:
            key, numbers, tensors = key_of(stages, like)
            found = entry(
                like, "foreach", key, lambda: _program(tuple(stages), like, key, numbers, tensors)
            )
        except UntraceableError as error:
            return str(error)
        program, compute_scalars = found
        slabs = split_slabs(list(map(Tensor.numel, columns[0])), SLAB)

        def run(totals: Sequence[Tensor]) -> None:
            scalar_args = compute_scalars(numbers, totals)
            for start, stop in slabs:
                program.step(*[column[start:stop] for column in columns], *scalar_args)

        return run


def _program(
    stages: tuple[Stage, ...],
    like: Leaf,
    key: CacheKey,
    numbers: Numbers,
    tensors: Sequence[Tensor],
) -> tuple[ListProgram, Callable[..., Any]]:
    """Return the program for these dtypes, and the function that computes its scalars.

    Raises:
        UntraceableError: the chain cannot be written as a program.
        NotPointwiseError: a stage computes with more than one element at a time.
    """
    traced = trace(stages, key.classes, key.shape)
    device = tensors[0].device

    def make() -> ListProgram:
        totals = [torch.ones((), dtype=torch.float64, device="cpu")] * traced.totals
        scalar_args = traced.compute_scalars(numbers, totals)
        check_pointwise_stages(stages, like, totals)
        return list_program(traced, tensors, scalar_args)

    want = (stages, key.classes, key.shape, key.dtypes, device.type)
    return _PROGRAMS.get_or_make(want, make), traced.compute_scalars


def split_slabs(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Split lists into slabs ``[start, stop)`` of one leaf, or of at most ``most`` elements."""
    if sum(lengths) <= most:
        return [(0, len(lengths))]
    found, start, count = [], 0, 0
    for place, length in enumerate(lengths):
        if count and count + length > most:
            found.append((start, place))
            start, count = place, 0
        count += length
    return [*found, (start, len(lengths))]
