"""Kernel that steps lists of leaves, and pieces of large leaves, with torch's foreach functions.

For a small tensor, a launch or a Python call costs more than the computation. So one call of a
foreach function runs an operation of the graph for all leaves, if a trial shows that the bits are
equal. All other operations run leaf by leaf. The step equals the reference bit for bit, needs no
compiler, and has about as many launches as the rule has operations. Its temporaries have the size
of a piece.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.cache_key import CacheKey, entry, key_of
from functional_optim.kernels.chunks import flatten_dense, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import KernelStep, no_op
from functional_optim.kernels.list_program import ListProgram, list_program
from functional_optim.kernels.pieces import cut_lists, piece_elements
from functional_optim.kernels.pointwise_check import check_pointwise_stages
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.trace import trace

FEW = 2
"""Largest number of temporaries of a leaf with which its pieces are large."""

_PROGRAMS: Cache[ListProgram] = Cache()


class ForeachKernel:
    """Kernel that steps lists of leaves and pieces of large leaves, with torch's foreach functions.

    Args:
        cpu_only: True to step no tensors on accelerators.
    """

    exact = True
    name = "foreach"

    def __init__(self, *, cpu_only: bool = False) -> None:
        self._cpu_only = cpu_only

    def is_for(self, like: Leaf) -> bool:
        return like.scalars is Scalars.HOST and (like.param.is_cpu or not self._cpu_only)

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        try:
            key, *_ = key_of(stages, chunk)
            trace(tuple(stages), key.classes, key.shape)
        except UntraceableError as error:
            return str(error)
        return None

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        return "blocked"

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        return no_op if chunk.param.numel() == 0 else _bind(stages, chunk, None)

    def bind_lists(
        self, stages: Sequence[Stage], like: Leaf, columns: Sequence[list[Tensor]]
    ) -> KernelStep | str:
        if block_size_of(stages) > 1:
            columns = [list(map(flatten_dense, column)) for column in columns]
            # In a leaf of one element, state per block cannot be told from state per element.
            longest = max(zip(*columns, strict=True), key=lambda row: row[0].numel())
            like = with_tensors(like, longest)
        return _bind(stages, like, columns)


def _bind(
    stages: Sequence[Stage], like: Leaf, columns: Sequence[list[Tensor]] | None
) -> KernelStep | str:
    """Bind a step of leaves, as for :meth:`~.kernel.ListKernel.bind_lists`, or of ``like``."""
    try:
        key, numbers, tensors = key_of(stages, like)
        found = entry(
            like, "foreach", key, lambda: _program(tuple(stages), like, key, numbers, tensors)
        )
    except UntraceableError as error:
        return str(error)
    program, compute_scalars, cut = found
    if columns is None:
        columns = [[one] for one in tensors]
    return partial(_step, program, compute_scalars, numbers, cut(columns))


def _step(
    program: ListProgram,
    compute_scalars: Callable[..., Any],
    numbers: Numbers,
    parts: Sequence[Sequence[list[Tensor]]],
    totals: Sequence[Tensor],
) -> None:
    device = parts[0][0][0].device
    near = [one if one.is_cpu else one.to(device) for one in totals]
    scalar_args = compute_scalars(numbers, near)
    for part in parts:
        program.step(*part, *scalar_args)


def _program(
    stages: tuple[Stage, ...],
    like: Leaf,
    key: CacheKey,
    numbers: Numbers,
    tensors: Sequence[Tensor],
) -> tuple[ListProgram, Callable[..., Any], Callable[..., Any]]:
    """Return a program, and the functions that compute its scalars and cut lists of leaves."""
    traced = trace(stages, key.classes, key.shape)
    device, block_size = tensors[0].device, block_size_of(stages)

    def make() -> ListProgram:
        totals = [torch.ones((), dtype=torch.float64, device="cpu")] * traced.totals
        scalar_args = traced.compute_scalars(numbers, totals)
        check_pointwise_stages(stages, like, totals)
        return list_program(traced, tensors, scalar_args, block_size)

    want = (stages, key.classes, key.shape, key.dtypes, device.type)
    program = _PROGRAMS.get_or_make(want, make)
    most = piece_elements(block_size, device.type, small=program.temporaries > FEW)
    if program.is_one_call:  # no result is read from the cache
        most = sys.maxsize
    return program, traced.compute_scalars, partial(cut_lists, block_size=block_size, most=most)
