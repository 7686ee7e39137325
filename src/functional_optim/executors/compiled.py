"""The compiled kernel: the chain's graph as one pass over memory, in machine code.

The graph, with write-back, is compiled by torch's Inductor, ahead of time, for lanes of any length;
the numbers that change with the step are elements of one small tensor. So one compilation serves
every step, every learning rate and any number of parameters, and there are no guards to be checked.
The result is a shared library in a cache on disk, which another process loads in some milliseconds.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from functional_optim.executors.compile_request import Request
from functional_optim.executors.compile_source import compile_source
from functional_optim.executors.compiled_step import CompiledStep
from functional_optim.executors.compiler import COMPILER, cache_folder
from functional_optim.executors.leaf import Leaf
from functional_optim.executors.trace import (
    Signature,
    Trace,
    UntraceableError,
    signature,
    trace,
)
from functional_optim.stage import Stage

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CompiledKernel:
    """A chain as machine code.

    Args:
        wait: whether a step waits for the compiler. If not, :meth:`refuses` says that it is at work
            until the step is there.
    """

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        found = self._find(stages, lane)
        return found if isinstance(found, str) else None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        found = self._find(stages, lane)
        if isinstance(found, str):
            return found
        step, traced, numbers, tensors = found
        step(tensors, uniform_tensor(traced.prologue(numbers, totals), lane.param))
        return None

    def _find(
        self, stages: Sequence[Stage], lane: Leaf
    ) -> str | tuple[CompiledStep, Trace, list[float], list[Tensor]]:
        """What steps a lane; or why nothing here does."""
        if lane.param.dtype not in DTYPES:
            return f"{lane.param.dtype} is not compiled"
        grain = max(stage.granularity for stage in stages)
        if lane.param.numel() < 2 * grain or lane.param.numel() % grain:
            return f"{lane.param.numel()} elements are too few, or end within a block"
        try:
            shape, numbers, tensors = signature(stages, lane)
            request, traced = _request(tuple(stages), lane, shape, tensors)
        except UntraceableError as error:
            return str(error)
        step = COMPILER.step(request, wait=self._wait)
        if step is None:
            status, reason = COMPILER.status(request)
            return reason if status == "failed" else "it is being compiled"
        return step, traced, numbers, tensors

    def is_ready(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        """Whether the step is in memory already; starts nothing and reads nothing."""
        try:
            return COMPILER.status(request_for(stages, lane))[0] == "ready"
        except UntraceableError:
            return False

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        return "compile"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        if not self._wait and self.refuses(stages, lane) is None:
            return True
        try:
            return COMPILER.wait(request_for(stages, lane), timeout)
        except UntraceableError:
            return True


def _classes(lane: Leaf) -> tuple[type, ...]:
    return tuple(type(one) for one in lane.coefficients)


def uniform_tensor(values: Sequence[float | Tensor], param: Tensor) -> Tensor:
    """The uniform values of a step as a compiled program takes them."""
    dtype = uniform_dtype(param.dtype)
    if param.device.type == "cpu":
        return torch.tensor([float(value) for value in values], dtype=dtype)
    fixed = [0.0 if isinstance(value, Tensor) else value for value in values]
    made = torch.tensor(fixed, dtype=dtype, pin_memory=True).to(param.device, non_blocking=True)
    for index, value in enumerate(values):
        if isinstance(value, Tensor):  # measured on the device: not to be waited for
            made[index].copy_(value, non_blocking=True)
    return made


def uniform_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels compute with a parameter of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def request_for(stages: Sequence[Stage], lane: Leaf) -> Request:
    """What the compiler is asked for to step such lanes.

    Raises:
        UntraceableError: the chain cannot be written as a program.
    """
    shape, _, tensors = signature(stages, lane)
    return _request(tuple(stages), lane, shape, tensors)[0]


def _request(
    stages: tuple[Stage, ...], lane: Leaf, shape: Signature, tensors: Sequence[Tensor]
) -> tuple[Request, Trace]:
    count = tensors[0].numel()
    grain = max(stage.granularity for stage in stages)
    inputs = tuple(
        (str(tensor.dtype).removeprefix("torch."), 1 if tensor.numel() == count else grain)
        for tensor in tensors
    )
    uniform = str(uniform_dtype(lane.param.dtype)).removeprefix("torch.")
    return _made(
        stages, _classes(lane), shape, inputs, uniform, lane.param.device.type, str(cache_folder())
    )


@lru_cache(maxsize=512)
def _made(
    stages: tuple[Stage, ...],
    classes: tuple[type, ...],
    shape: Signature,
    inputs: tuple[tuple[str, int], ...],
    uniform: str,
    device: str,
    folder: str,
) -> tuple[Request, Trace]:
    traced = trace(stages, classes, shape)
    count = len(traced.uniform)
    return Request(compile_source(traced), inputs, (uniform, count), device, folder), traced
