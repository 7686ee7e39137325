"""Kernel that runs the operations of a chain over blocks of elements that fit the cache.

The kernel needs no compiler. It allocates a few blocks of scratch, which later steps reuse. If
there is more than one operation, all tensors of a block fit the last-level cache together.
"""

import os
import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.cache_key import CacheKey, entry, key_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.kernel import KernelStep, no_op
from functional_optim.kernels.pieces import is_rounded_by_place, piece_lengths
from functional_optim.kernels.pointwise_check import check_pointwise_stages
from functional_optim.kernels.program import Program, block_program
from functional_optim.kernels.scratch import scratch
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.trace import trace

BLOCK_VARIABLE = "FUNCTIONAL_OPTIM_BLOCK"
"""Environment variable with the number of elements of a block. By default the cache decides."""

ON_DEVICES = 1 << 25
"""Number of elements of a block, and so of each piece of scratch, on an accelerator."""

_PROGRAMS: Cache[Program] = Cache()


class BlockedKernel:
    """Kernel that runs a chain block by block, with the ``out=`` argument of torch's functions."""

    exact = True

    def is_for(self, chunk: Leaf) -> bool:
        return chunk.scalars is Scalars.HOST

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        try:
            key, *_ = key_of(stages, chunk)
            trace(tuple(stages), key.classes, key.shape)
        except UntraceableError as error:
            return str(error)
        return None

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        if chunk.param.numel() == 0:
            return no_op
        try:
            key, numbers, tensors = key_of(stages, chunk)
            found = entry(
                chunk, "blocked", key, lambda: _program(stages, chunk, key, numbers, tensors)
            )
        except UntraceableError as error:
            return str(error)
        return partial(_step, stages, chunk, found, numbers, tensors)

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        return "blocked"


def _program(
    stages: Sequence[Stage], chunk: Leaf, key: CacheKey, numbers: Numbers, tensors: list[Tensor]
) -> tuple[Program, Any, int]:
    """Return a program, the function that computes its scalars, and the elements of a block.

    Raises:
        UntraceableError: the chain cannot be written as a program.
        NotPointwiseError: a stage computes with more than one element at a time.
    """
    chain = tuple(stages)
    traced = trace(chain, key.classes, key.shape)
    device = chunk.param.device
    want = (chain, key.classes, key.shape, key.dtypes, device.type)

    def make() -> Program:
        totals = [torch.ones((), dtype=torch.float64, device=device)] * traced.totals
        scalar_args = traced.compute_scalars(numbers, totals)
        check_pointwise_stages(stages, chunk, totals)
        return block_program(traced, tensors, scalar_args, granularity=block_size_of(stages))

    program = _PROGRAMS.get_or_make(want, make)
    allocates = program.scratch or program.allocating
    if traced.operations == 1 and not allocates and BLOCK_VARIABLE not in os.environ:
        return program, traced.compute_scalars, sys.maxsize  # no result is read from the cache
    touched = len(tensors) + len(program.scratch)
    size = block_elements(touched, block_size_of(stages), device.type)
    return program, traced.compute_scalars, size


def _step(
    stages: Sequence[Stage],
    chunk: Leaf,
    found: tuple[Program, Any, int],
    numbers: Numbers,
    tensors: Sequence[Tensor],
    totals: Sequence[Tensor],
) -> None:
    program, compute_scalars, size = found
    scalar_args = compute_scalars(numbers, [total.to(chunk.param.device) for total in totals])
    if chunk.param.numel() <= size:
        program.step(
            *tensors, *scalar_args, *_scratch(program, chunk.param.numel(), chunk.param.device)
        )
        return
    memory: list[Tensor] = []
    length = -1
    for block in zip(*_cut(tensors, stages, size), strict=True):
        if block[0].numel() != length:
            length = block[0].numel()
            memory = _scratch(program, length, chunk.param.device)
        program.step(*block, *scalar_args, *memory)


def _cut(tensors: Sequence[Tensor], stages: Sequence[Stage], size: int) -> list[Any]:
    """Split each tensor into blocks; a tensor with one entry per group is split accordingly."""
    total = tensors[0].numel()
    granularity = block_size_of(stages)
    groups = -(-total // granularity)
    pieces = piece_lengths(total, size, exact=is_rounded_by_place(tensors, granularity))
    fewer = [-(-one // granularity) for one in pieces]
    return [
        tensor.split(pieces if tensor.numel() == total or groups == 1 else fewer)
        if tensor.numel() == total or tensor.numel() == groups
        else (tensor,) * len(pieces)
        for tensor in tensors
    ]


def _scratch(program: Program, length: int, device: torch.device) -> list[Tensor]:
    dtypes = enumerate(program.scratch)
    return [scratch(("block", place), length, dtype, device) for place, dtype in dtypes]


def block_elements(tensors: int, granularity: int = 1, device: str = "cpu") -> int:
    """Return the number of elements of a block, for a program that uses so many tensors.

    The number is ``FUNCTIONAL_OPTIM_BLOCK`` of the environment, if that is set. By default the
    tensors fill a third of the last-level cache of torch's threads, and the number is a power of
    two from 64 K to 1 M. With smaller blocks, starting the threads takes longer than reading
    memory. On an accelerator, a launch takes as long as the work on such a block, so blocks are
    larger there.

    Raises:
        ValueError: the value of the variable is not a positive number.
    """
    asked = os.environ.get(BLOCK_VARIABLE)
    if asked is not None:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(
                f"{BLOCK_VARIABLE} must be a whole number of elements >= 1, got {asked!r}"
            )
        size = int(asked)
    elif device != "cpu":
        size = ON_DEVICES
    else:
        room = cache_bytes() * torch.get_num_threads() // (3 * 4 * max(tensors, 1))
        size = 1 << max(16, min(20, room.bit_length() - 1))
    return -(-size // granularity) * granularity


@lru_cache(maxsize=1)
def cache_bytes() -> int:
    """Return the last-level cache per processor, in bytes; 4 MiB if the size is unknown."""
    try:
        last = max(_CACHES.glob("index*"), key=lambda one: int((one / "level").read_text()))
        text = (last / "size").read_text().strip()
        size = int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
        shared = (last / "shared_cpu_list").read_text().strip()  # such as 0-3,8
        ranges = [[int(end) for end in one.split("-")] for one in shared.split(",")]
        return size // sum(one[-1] - one[0] + 1 for one in ranges)
    except (OSError, ValueError, KeyError):
        return 4 << 20


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
