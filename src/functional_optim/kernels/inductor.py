"""The compiled kernel for accelerators: the chain's graph as one pass over memory.

The graph, with write-back, is compiled by ``torch.compile`` (Triton, on CUDA) when it is first
wanted, for lanes of any length; the numbers that change with the step are elements of one small
tensor. So one compilation serves every step, every learning rate and any number of parameters.
It rounds otherwise than torch's operations, by a few units in the last place. On the CPU the exact
loops (:mod:`functional_optim.kernels.exact`) stand in its place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, grain_of
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.compile_source import compile_source
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.examine import EXAMPLE_ELEMENTS, Examined, examine, examples
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.kernel import KernelError, Run
from functional_optim.kernels.lanes import part, tensors_of, with_tensors
from functional_optim.kernels.lowering import Lowered
from functional_optim.kernels.reading import Reading, kept, read, require_few_choices
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.trace import trace
from functional_optim.numeric import beside

# Not float16: what the reference rounds to zero between two operations, and then divides by, a
# compiled program keeps, so that no bound would hold.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

ALIGNMENT = 16
"""Bytes at multiples of which compiled programs take tensors."""

Step = Callable[..., object]
"""``step(*lane tensors, uniform values)``, in place."""


_Found = tuple[Step, Trace, Numbers, list[Tensor]]
"""The compiled step of a lane, the graph it is of, the numbers and the tensors of the lane."""


class InductorKernel:
    """A chain as a compiled program.

    Args:
        devices: the types of device that it is for.
        backend: of ``torch.compile``.
    """

    def __init__(
        self,
        *,
        devices: Sequence[str] = ("cuda",),
        backend: str = "inductor",
    ) -> None:
        self._devices, self._backend = tuple(devices), backend
        self.exact = "cpu" not in self._devices
        self._rest = BlockedKernel()
        self._programs: Cache[tuple[Step, Trace] | str] = Cache()

    def is_for(self, lane: Leaf) -> bool:
        return lane.param.device.type in self._devices

    def supports(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        found = self._find(stages, lane)
        return found if isinstance(found, str) else None

    def bind(self, stages: Sequence[Stage], lane: Leaf) -> Run | str:
        found = self._find(stages, lane)
        if isinstance(found, str):
            return found
        count, grain = lane.param.numel(), grain_of(stages)
        whole = count - count % grain
        rest: Run | str = _nothing
        if whole < count:  # a block that is not full
            last = with_tensors(lane, part(tensors_of(lane), grain, whole, count))
            rest = self._bind_rest(stages, last._replace(memo=None))
        if isinstance(rest, str):
            return rest
        return partial(_step, lane, found, (whole, grain), rest)

    def _bind_rest(self, stages: Sequence[Stage], rest: Leaf) -> Run | str:
        """What steps a block that is not full; numbers on a device go to the stages themselves."""
        if rest.scalars is Scalars.DEVICE:
            return partial(ReferenceExecutor().update_, stages, [rest])
        return self._rest.bind(stages, rest)

    def _find(self, stages: Sequence[Stage], lane: Leaf) -> str | _Found:
        """What steps a lane; or why nothing here does."""
        unfit = self._unfit(lane)
        if unfit is not None:
            return unfit
        try:
            on_device = lane.scalars is Scalars.DEVICE
            reading, numbers, tensors = read(stages, lane, on_device=on_device)
            found = kept(
                lane, "compile", reading, lambda: self._step(stages, reading, numbers, tensors)
            )
        except UntraceableError as error:
            return str(error)
        return found if isinstance(found, str) else (*found, numbers, tensors)

    def _unfit(self, lane: Leaf) -> str | None:
        """What of a lane no compiled step takes."""
        if lane.param.dtype not in DTYPES:
            return f"{lane.param.dtype} is not compiled"
        if lane.param.is_cuda and find_spec("triton") is None:
            return "there is no Triton, which compiles for such devices"
        if lane.param.is_cuda and any(t.data_ptr() % ALIGNMENT for t in tensors_of(lane)):
            # The compiled program would step a copy of such a tensor, and leave the tensor itself.
            return f"a lane on {lane.param.device} is compiled if it begins at {ALIGNMENT} bytes"
        return None

    def _step(
        self,
        stages: Sequence[Stage],
        reading: Reading,
        numbers: Numbers,
        tensors: Sequence[Tensor],
    ) -> tuple[Step, Trace] | str:
        """The compiled step and the graph it is of, or why there is none; found out once."""
        want = _Want(tuple(stages), reading)
        return self._programs.get_or_make(want, lambda: self._tried(want, numbers, tensors))

    def _tried(
        self, want: "_Want", numbers: Numbers, tensors: Sequence[Tensor]
    ) -> tuple[Step, Trace] | str:
        try:
            require_few_choices(want, self._programs)
            return self._made(want, numbers, tensors)
        except UntraceableError as error:
            return str(error)

    def _made(
        self, want: "_Want", numbers: Numbers, tensors: Sequence[Tensor]
    ) -> tuple[Step, Trace]:
        """The program, and the graph it is of: examined first, for a compiler asks no questions."""
        stages, reading = want
        traced = trace(stages, reading.classes, reading.shape)
        grain = grain_of(stages)
        with torch.no_grad():
            total = torch.ones((), dtype=torch.float64, device=tensors[0].device)
            uniform = traced.prologue(list(map(float, numbers)), [total] * traced.totals)
            if grain == 1:
                found = examine(traced, examples(tensors, grain), uniform, pointwise=True)
            else:
                found = _examined_in_rows(traced, grain, tensors, uniform)
        scope: dict[str, Any] = {"__name__": "functional_optim.compiled_step"}
        text = compile_source(traced, found.root)
        exec(compile(text, "<compiled step>", "exec"), scope)  # noqa: S102  text written by us
        step = torch.compile(scope["Step"](), fullgraph=True, dynamic=True, backend=self._backend)
        self._compile(step, traced, tensors, uniform, grain)
        return step, traced

    def _compile(
        self,
        step: Step,
        traced: Trace,
        tensors: Sequence[Tensor],
        uniform: Sequence[float | Tensor],
        grain: int,
    ) -> None:
        """Call it once, on copies: that compiles it.

        Raises:
            KernelError: it does not compile. Going on without would give this process other bits
                than those where it does.
        """
        few = examples(tensors, grain)
        try:
            with torch.no_grad():
                numbers = uniform_tensor(uniform, few[0])
                step(*_in_rows(few, few[0].numel(), grain), numbers)
        except Exception as error:
            raise KernelError(
                f"the compiler made nothing of this chain: {type(error).__name__}: {error}; use "
                "executor='blocked', which needs none"
            ) from error

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        return "compile"


def _nothing(totals: Sequence[Tensor]) -> None:
    """The step of a block that is not there."""


def _step(
    lane: Leaf, found: _Found, cut: tuple[int, int], rest: Run, totals: Sequence[Tensor]
) -> None:
    """One step of a lane: of its last block, which is not full, and of the whole ones before it."""
    step, traced, numbers, tensors = found
    whole, grain = cut
    rest(totals)
    if lane.scalars is Scalars.DEVICE:
        uniform = _uniform_on_device(traced, numbers, totals, lane.param)
    else:
        uniform = uniform_tensor(traced.prologue(numbers, totals), lane.param)
    if whole:
        step(*_in_rows(part(tensors, grain, 0, whole), whole, grain), uniform)


class _Want(NamedTuple):
    """All that a program depends on."""

    stages: tuple[Stage, ...]
    reading: Reading


def _in_rows(tensors: Sequence[Tensor], count: int, grain: int) -> list[Tensor]:
    """A lane as rows of a block, where the chain works in blocks.

    A loop over all elements that has to look up the block of each could not take several at a time.
    """
    if grain == 1:
        return list(tensors)
    return [one.view(-1, grain) if one.numel() == count else one for one in tensors]


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


def _examined_in_rows(
    traced: Trace, grain: int, tensors: Sequence[Tensor], uniform: Sequence[float | Tensor]
) -> Examined:
    """The graph examined as it is compiled where blocks are more than an element: on rows.

    Raises:
        UntraceableError: a stage takes no parameter of that shape.
    """
    few = min(tensors[0].numel(), max(EXAMPLE_ELEMENTS, grain)) // grain * grain
    rows = [one.clone() for one in _in_rows(part(tensors, grain, 0, few), few, grain)]
    try:
        return examine(traced, rows, uniform, pointwise=False)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UntraceableError(
            f"it is compiled for parameters of shape (rows, {grain}), which a stage does not take: "
            f"{error}"
        ) from error
