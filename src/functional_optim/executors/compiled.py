"""The compiled kernel: the chain's graph as one pass over memory, in machine code.

The graph, with write-back, is compiled by torch's Inductor, ahead of time, for lanes of any length;
the numbers that change with the step are elements of one small tensor. So one compilation serves
every step, every learning rate and any number of parameters, and there are no guards to be checked.
The result is a shared library in a cache on disk, which another process loads in some milliseconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.executors.blocked import BlockedKernel
from functional_optim.executors.compile_request import Request
from functional_optim.executors.compile_source import compile_source
from functional_optim.executors.compiled_step import CompiledStep
from functional_optim.executors.compiler import COMPILER, cache_folder
from functional_optim.executors.examine import examine, examples
from functional_optim.executors.lanes import tensors_of, with_tensors
from functional_optim.executors.leaf import Leaf, is_measured
from functional_optim.executors.trace import (
    Signature,
    Trace,
    UntraceableError,
    signature,
    trace,
)
from functional_optim.stage import Stage

# Not float16: what the reference rounds to zero between two operations, and then divides by, a
# compiled program keeps, so that no bound would hold.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
DEVICES = ("cpu", "cuda")


class CompiledKernel:
    """A chain as machine code.

    Args:
        wait: whether a step waits for the compiler. If not, :meth:`refuses` says that it is at work
            until the step is there.
    """

    exact = False

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self._rest = BlockedKernel()

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        found = self._find(stages, lane)
        return found if isinstance(found, str) else None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        found = self._find(stages, lane)
        if isinstance(found, str):
            return found
        step, traced, numbers, tensors = found
        count, grain = lane.param.numel(), max(stage.granularity for stage in stages)
        full = count - count % grain
        if full < count:
            # What a block means that is not full is the rule's own affair.
            rest = [_cut(tensor, count, grain, full, count) for tensor in tensors_of(lane)]
            refusal = self._rest.attempt(
                stages, with_tensors(lane, rest)._replace(memo=None), totals
            )
            if refusal is not None or not full:
                return refusal
            tensors = [_cut(tensor, count, grain, 0, full) for tensor in tensors]
        step(tensors, uniform_tensor(traced.prologue(numbers, totals), lane.param))
        return None

    def _find(
        self, stages: Sequence[Stage], lane: Leaf
    ) -> str | tuple[CompiledStep, Trace, list[float], list[Tensor]]:
        """What steps a lane; or why nothing here does."""
        unfit = _unfit(stages, lane)
        if unfit is not None:
            return unfit
        try:
            shape, numbers, tensors = signature(stages, lane)
            known = None if lane.memo is None else lane.memo.get("compile")
            if known is not None and known[0] == shape:
                return known[1], known[2], numbers, tensors
            request, traced = _request(tuple(stages), lane, shape, numbers, tensors)
        except UntraceableError as error:
            return str(error)
        step = COMPILER.step(request, wait=self._wait)
        if step is not None and lane.memo is not None:
            lane.memo["compile"] = shape, step, traced
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


def _cut(tensor: Tensor, count: int, grain: int, start: int, stop: int) -> Tensor:
    """What elements [start, stop) of a lane of so many have in a tensor of it."""
    if tensor.numel() == count:
        return tensor[start:stop]
    return tensor[start // grain : -(-stop // grain)]


def _unfit(stages: Sequence[Stage], lane: Leaf) -> str | None:
    """What of a lane no compiled step takes."""
    if lane.param.dtype not in DTYPES:
        return f"{lane.param.dtype} is not compiled"
    if lane.param.device.type not in DEVICES:
        return f"nothing is compiled for {lane.param.device}"
    if lane.param.numel() < 2:  # one element is not told apart from a block of one
        return "a lane of less than two elements is not compiled"
    return None


def _classes(lane: Leaf) -> tuple[type, ...]:
    return tuple(type(one) for one in lane.coefficients)


def uniform_tensor(values: Sequence[float | Tensor], param: Tensor) -> Tensor:
    """The uniform values of a step as a compiled program takes them."""
    dtype = uniform_dtype(param.dtype)
    if param.device.type == "cpu":
        return torch.tensor([float(value) for value in values], dtype=dtype, device="cpu")
    fixed = [0.0 if isinstance(value, Tensor) else value for value in values]
    host = torch.tensor(fixed, dtype=dtype, device="cpu", pin_memory=True)
    made = host.to(param.device, non_blocking=True)
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
    shape, numbers, tensors = signature(stages, lane)
    return _request(tuple(stages), lane, shape, numbers, tensors)[0]


class _Want(NamedTuple):
    """All that a request depends on."""

    stages: tuple[Stage, ...]
    classes: tuple[type, ...]
    shape: Signature
    inputs: tuple[tuple[str, int], ...]
    device: str
    folder: str


def _request(
    stages: tuple[Stage, ...],
    lane: Leaf,
    shape: Signature,
    numbers: Sequence[float],
    tensors: Sequence[Tensor],
) -> tuple[Request, Trace]:
    count = tensors[0].numel()
    grain = max(stage.granularity for stage in stages)
    inputs = tuple(
        (str(tensor.dtype).removeprefix("torch."), 1 if tensor.numel() == count else grain)
        for tensor in tensors
    )
    device = lane.param.device.type
    want = _Want(stages, _classes(lane), shape, inputs, device, str(cache_folder()))
    found = _FOUND.get(want)
    if found is None:
        if len(_FOUND) >= _MANY:
            _FOUND.clear()
        try:
            _require_few_choices(want)
            found = _made(want, numbers, tensors)
        except UntraceableError as error:
            found = str(error)
        _FOUND[want] = found
    if isinstance(found, str):
        raise UntraceableError(found)
    return found


def _require_few_choices(want: _Want) -> None:
    """A chain is compiled for its choices, not for each step.

    Raises:
        UntraceableError: a coefficient that looks like a choice takes ever new values.
    """
    alike = sum(want._replace(shape=one.shape) == one for one in _FOUND)
    if alike >= CHOICES:
        raise UntraceableError(
            f"its coefficients that are no floats have taken {CHOICES} different values, and each "
            "is compiled apart: annotate what changes with the step as float"
        )


CHOICES = 32
"""For how many combinations of its flags and whole numbers a chain is compiled."""

_MANY = 512
_FOUND: dict[_Want, tuple[Request, Trace] | str] = {}


def _made(
    want: _Want, numbers: Sequence[float], tensors: Sequence[Tensor]
) -> tuple[Request, Trace]:
    """The request, and the graph it is of: examined first, for a compiler asks no questions."""
    traced = trace(want.stages, want.classes, want.shape)
    grain = max(stage.granularity for stage in want.stages)
    with torch.no_grad():
        device = tensors[0].device
        total = torch.ones((), dtype=torch.float64, device=device)
        uniform = traced.prologue(numbers, [total] * sum(map(is_measured, want.stages)))
        found = examine(traced, examples(tensors, grain), uniform, pointwise=grain == 1)
    source = compile_source(traced, found.root)
    numbers_of = str(uniform_dtype(tensors[0].dtype)).removeprefix("torch."), len(traced.uniform)
    return Request(source, want.inputs, numbers_of, want.device, want.folder), traced
