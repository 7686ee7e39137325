"""The compiled kernel: the chain's graph as one pass over memory, in machine code.

The graph, with write-back, is compiled by torch's Inductor, ahead of time, for lanes of any length;
the numbers that change with the step are elements of one small tensor. So one compilation serves
every step, every learning rate and any number of parameters, and there are no guards to be checked.
The result is a shared library in a cache on disk, which another process loads in some milliseconds.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.executors.blocked import BlockedKernel
from functional_optim.executors.compile_request import Request, unit_of
from functional_optim.executors.compile_source import compile_source
from functional_optim.executors.compiled_step import CompiledStep
from functional_optim.executors.compiler import COMPILER, cache_folder
from functional_optim.executors.errors import UntraceableError
from functional_optim.executors.examine import EXAMPLE_ELEMENTS, Examined, examine, examples
from functional_optim.executors.graph import Trace
from functional_optim.executors.lanes import part, tensors_of, with_tensors
from functional_optim.executors.leaf import Leaf, is_measured
from functional_optim.executors.lowering import Lowered
from functional_optim.executors.on_device import OnDeviceExecutor
from functional_optim.executors.reading import Reading, kept, read
from functional_optim.executors.signature import Numbers, Signature
from functional_optim.executors.trace import trace
from functional_optim.numeric import beside
from functional_optim.stage import Stage, grain_of

# Not float16: what the reference rounds to zero between two operations, and then divides by, a
# compiled program keeps, so that no bound would hold.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
DEVICES = ("cpu", "cuda")

ALIGNMENT = 16
"""Bytes at multiples of which an accelerator's compiled programs take tensors."""


IN_CACHE = 1 << 19
"""About how many elements a compiled step takes at a time where it works in blocks."""


class _NotThereError(Exception):
    """Why there is no compiled step for a lane that may have one."""


class CompiledKernel:
    """A chain as machine code.

    Args:
        wait: whether a step waits for the compiler. If not, :meth:`refuses` says that it is at work
            until the step is there.
        on_device: whether coefficients are 0-d tensors beside the parameters, and stay there.
    """

    exact = False

    def __init__(self, *, wait: bool, on_device: bool = False) -> None:
        self._wait = wait
        self._on_device = on_device
        self._rest = BlockedKernel()

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        found = self._find(stages, lane)
        return found if isinstance(found, str) else None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        found = self._find(stages, lane)
        if isinstance(found, str):
            return found
        step, traced, numbers, tensors = found
        count, grain = lane.param.numel(), grain_of(stages)
        whole = count - count % step.request.unit
        if whole < count:
            # Less than a unit, with a block in it, perhaps, that is not full.
            rest = with_tensors(lane, part(tensors_of(lane), grain, whole, count))
            refusal = self._step_rest(stages, rest._replace(memo=None), totals)
            if refusal is not None:
                return refusal
        if self._on_device:
            uniform = _uniform_on_device(traced, numbers, totals, lane.param)
        else:
            uniform = uniform_tensor(traced.prologue(numbers, totals), lane.param)
        size = _at_a_time(step.request)
        if whole == count <= size:
            step(tensors, uniform)
            return None
        for start in range(0, whole, size):
            step(part(tensors, grain, start, min(start + size, whole)), uniform)
        return None

    def _step_rest(
        self, stages: Sequence[Stage], rest: Leaf, totals: Sequence[Tensor]
    ) -> str | None:
        """Step what is less than a unit; numbers on a device go to the stages themselves."""
        if self._on_device:
            OnDeviceExecutor().update_(stages, [rest], totals)
            return None
        return self._rest.attempt(stages, rest, totals)

    def _find(
        self, stages: Sequence[Stage], lane: Leaf
    ) -> str | tuple[CompiledStep, Trace, Numbers, list[Tensor]]:
        """What steps a lane; or why nothing here does."""
        unfit = _unfit(stages, lane)
        if unfit is not None:
            return unfit
        try:
            reading, numbers, tensors = read(stages, lane, on_device=self._on_device)
            step, traced = kept(
                lane,
                "compile",
                reading,
                lambda: self._step(stages, lane, reading, numbers, tensors),
            )
        except (UntraceableError, _NotThereError) as error:
            return str(error)
        return step, traced, numbers, tensors

    def _step(
        self,
        stages: Sequence[Stage],
        lane: Leaf,
        reading: Reading,
        numbers: Numbers,
        tensors: Sequence[Tensor],
    ) -> tuple[CompiledStep, Trace]:
        """The compiled step and the graph it is of.

        Raises:
            UntraceableError: there will be none.
            _NotThereError: there is none yet, or the compiler failed.
        """
        request, traced = _request(tuple(stages), lane, reading, numbers, tensors)
        step = COMPILER.step(request, wait=self._wait)
        if step is not None:
            step.load_on(lane.param.device)
        if step is None:
            status, reason = COMPILER.status(request)
            raise _NotThereError(reason if status == "failed" else "it is being compiled")
        return step, traced

    def is_ready(self, stages: Sequence[Stage], lane: Leaf) -> bool:
        """Whether the step is in memory already; starts nothing and reads nothing."""
        try:
            return COMPILER.status(request_for(stages, lane))[0] == "ready"
        except UntraceableError:
            return False

    def prepare(self, stages: Sequence[Stage], lane: Leaf) -> None:
        return None  # a call takes longer than finding out

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        return "compile"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        if not self._wait and self.refuses(stages, lane) is None:
            return True
        if _unfit(stages, lane) is not None:
            return True
        try:
            return COMPILER.wait(request_for(stages, lane), timeout)
        except UntraceableError:
            return True


def _unfit(stages: Sequence[Stage], lane: Leaf) -> str | None:
    """What of a lane no compiled step takes."""
    if lane.param.dtype not in DTYPES:
        return f"{lane.param.dtype} is not compiled"
    if lane.param.device.type not in DEVICES:
        return f"nothing is compiled for {lane.param.device}"
    if lane.param.device.type != "cpu" and any(t.data_ptr() % ALIGNMENT for t in tensors_of(lane)):
        # The compiled program would step a copy of such a tensor, and leave the tensor itself.
        return f"a lane on {lane.param.device} is compiled if it begins at {ALIGNMENT} bytes"
    least = unit_of(grain_of(stages))
    if lane.param.numel() < least:
        return f"a lane of less than {least} elements is not compiled"
    return None


def _at_a_time(request: Request) -> int:
    """The most elements of a lane that one call takes.

    What is reduced block by block goes through memory between two passes: through the cache, if
    there is not too much of it at a time.
    """
    if not request.in_rows or request.device != "cpu":
        return sys.maxsize
    return max(1, IN_CACHE // request.unit) * request.unit


def _uniform_on_device(
    traced: Trace, numbers: Numbers, totals: Sequence[Tensor], param: Tensor
) -> Tensor:
    """The uniform values of a step, computed where the parameter is.

    Nothing waits for the device then, and what a CUDA graph captures of it holds for each replay.
    """
    dtype = uniform_dtype(param.dtype)
    one = torch.ones((), dtype=dtype, device=param.device)
    with Lowered():
        made = [beside(one, value) for value in traced.prologue(numbers, totals)]
    return torch.stack(made) if made else param.new_empty(0, dtype=dtype)


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
    reading, numbers, tensors = read(stages, lane, on_device=True)
    return _request(tuple(stages), lane, reading, numbers, tensors)[0]


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
    reading: Reading,
    numbers: Numbers,
    tensors: Sequence[Tensor],
) -> tuple[Request, Trace]:
    count = tensors[0].numel()
    grain = grain_of(stages)
    inputs = tuple(
        (str(tensor.dtype).removeprefix("torch."), 1 if tensor.numel() == count else grain)
        for tensor in tensors
    )
    device = lane.param.device.type
    want = _Want(stages, reading.classes, reading.shape, inputs, device, str(cache_folder()))
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


def _examined_in_rows(
    traced: Trace, want: _Want, tensors: Sequence[Tensor], uniform: Sequence[float | Tensor]
) -> Examined:
    """The graph examined as it is compiled where blocks are more than an element: on rows.

    Raises:
        UntraceableError: a stage takes no parameter of that shape.
    """
    grain = grain_of(want.stages)
    unit = unit_of(grain)
    count = tensors[0].numel()
    taken = part(tensors, grain, 0, min(count, max(EXAMPLE_ELEMENTS, unit)) // unit * unit)
    each = [per for _, per in want.inputs]
    rows = [
        one.view(-1, unit).clone() if per == 1 else one.clone()
        for one, per in zip(taken, each, strict=True)
    ]
    try:
        return examine(traced, rows, uniform, pointwise=False)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UntraceableError(
            f"it is compiled for parameters of shape (rows, {unit}), which a stage does not take: "
            f"{error}"
        ) from error


def _made(want: _Want, numbers: Numbers, tensors: Sequence[Tensor]) -> tuple[Request, Trace]:
    """The request, and the graph it is of: examined first, for a compiler asks no questions."""
    traced = trace(want.stages, want.classes, want.shape)
    grain = grain_of(want.stages)
    with torch.no_grad():
        device = tensors[0].device
        total = torch.ones((), dtype=torch.float64, device=device)
        totals = [total] * sum(map(is_measured, want.stages))
        uniform = traced.prologue(list(map(float, numbers)), totals)
        if grain == 1:
            found = examine(traced, examples(tensors, grain), uniform, pointwise=True)
        else:
            found = _examined_in_rows(traced, want, tensors, uniform)
    source = compile_source(traced, found.root)
    numbers_of = str(uniform_dtype(tensors[0].dtype)).removeprefix("torch."), len(traced.uniform)
    request = Request(source, want.inputs, numbers_of, want.device, want.folder, grain)
    return request, traced
