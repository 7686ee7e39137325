"""The compiled kernel for accelerators: the chain's graph as one pass over memory.

The graph, with write-back, is compiled by ``torch.compile`` (Triton, on CUDA) when it is first
wanted, for chunks of any length; the numbers that change with the step are elements of one small
tensor. So one compilation serves every step, every learning rate and any number of parameters.
It rounds otherwise than torch's operations, by a few units in the last place. On the CPU the exact
loops (:mod:`functional_optim.kernels.exact`) stand in its place.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.cache_key import CacheKey, entry, key_of, require_few_choices
from functional_optim.kernels.chunks import part, tensors_of, with_tensors
from functional_optim.kernels.compiled_graph import compiled_graph
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.kernel import KernelError, KernelStep, nothing
from functional_optim.kernels.lowering import Lowered
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.trace import trace
from functional_optim.kernels.validate import EXAMPLE_ELEMENTS, Validated, examples, validate
from functional_optim.numeric import beside

# Not float16: what the reference rounds to zero between two operations, and then divides by, a
# compiled program keeps, so that no bound would hold.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

ALIGNMENT = 16
"""Bytes at multiples of which compiled programs take tensors."""

Step = Callable[..., object]
"""``step(*chunk tensors, scalar arguments)``, in place."""


_Found = tuple[Step, Trace, Numbers, list[Tensor]]
"""The compiled step of a chunk, the graph it is of, the numbers and the tensors of the chunk."""


class InductorKernel:
    """A chain as a compiled program.

    Args:
        devices: the types of device that it is for.
        backend: of ``torch.compile``.
        captured_only: step by numbers that are on the device alone, as a CUDA graph captures it.
    """

    def __init__(
        self,
        *,
        devices: Sequence[str] = ("cuda",),
        backend: str = "inductor",
        captured_only: bool = False,
    ) -> None:
        self._devices, self._backend = tuple(devices), backend
        self._captured_only = captured_only
        self.exact = "cpu" not in self._devices
        self._rest = BlockedKernel()
        self._programs: Cache[tuple[Step, Trace] | str] = Cache()

    def is_for(self, chunk: Leaf) -> bool:
        if self._captured_only and chunk.scalars is not Scalars.DEVICE:
            return False
        return chunk.param.device.type in self._devices

    def supports(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        found = self._find(stages, chunk)
        return found if isinstance(found, str) else None

    def bind(self, stages: Sequence[Stage], chunk: Leaf) -> KernelStep | str:
        found = self._find(stages, chunk)
        if isinstance(found, str):
            return found
        count, block_size = chunk.param.numel(), block_size_of(stages)
        whole = count - count % block_size
        rest: KernelStep | str = nothing
        if whole < count:  # a block that is not full
            last = with_tensors(chunk, part(tensors_of(chunk), block_size, whole, count))
            rest = self._bind_rest(stages, last._replace(entries=None))
        if isinstance(rest, str):
            return rest
        return partial(_step, chunk, found, (whole, block_size), rest)

    def _bind_rest(self, stages: Sequence[Stage], rest: Leaf) -> KernelStep | str:
        """Bind the step of a block that is not full; numbers on a device go to the stages."""
        if rest.scalars is Scalars.DEVICE:
            return partial(ReferenceExecutor().update_, stages, [rest])
        return self._rest.bind(stages, rest)

    def _find(self, stages: Sequence[Stage], chunk: Leaf) -> str | _Found:
        """Return the compiled step of a chunk; or the reason why there is none."""
        unfit = self._unfit(chunk)
        if unfit is not None:
            return unfit
        try:
            on_device = chunk.scalars is Scalars.DEVICE
            key, numbers, tensors = key_of(stages, chunk, on_device=on_device)
            found = entry(chunk, "inductor", key, lambda: self._step(stages, key, numbers, tensors))
        except UntraceableError as error:
            return str(error)
        return found if isinstance(found, str) else (*found, numbers, tensors)

    def _unfit(self, chunk: Leaf) -> str | None:
        """Return why no compiled step takes a chunk."""
        if chunk.param.dtype not in DTYPES:
            return f"{chunk.param.dtype} is not compiled"
        if chunk.param.is_cuda and find_spec("triton") is None:
            return "there is no Triton, which compiles for such devices"
        if chunk.param.is_cuda and any(t.data_ptr() % ALIGNMENT for t in tensors_of(chunk)):
            # The compiled program would step a copy of such a tensor, and leave the tensor itself.
            return f"a chunk on {chunk.param.device} is compiled if it begins at {ALIGNMENT} bytes"
        return None

    def _step(
        self,
        stages: Sequence[Stage],
        key: CacheKey,
        numbers: Numbers,
        tensors: Sequence[Tensor],
    ) -> tuple[Step, Trace] | str:
        """The compiled step and the graph it is of, or why there is none; found out once."""
        want = _Want(tuple(stages), key)
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
        """The program, and the graph it is of: validated, for a compiler asks no questions."""
        stages, key = want
        traced = trace(stages, key.classes, key.shape)
        block_size = block_size_of(stages)
        with torch.no_grad():
            total = torch.ones((), dtype=torch.float64, device=tensors[0].device)
            scalar_args = traced.compute_scalars(list(map(float, numbers)), [total] * traced.totals)
            if block_size == 1:
                found = validate(traced, examples(tensors, block_size), scalar_args, pointwise=True)
            else:
                found = _validated_in_rows(traced, block_size, tensors, scalar_args)
        module = compiled_graph(traced, found.root)
        step = torch.compile(module, fullgraph=True, dynamic=True, backend=self._backend)
        self._compile(step, traced, tensors, scalar_args, block_size)
        return step, traced

    def _compile(
        self,
        step: Step,
        traced: Trace,
        tensors: Sequence[Tensor],
        scalar_args: Sequence[float | Tensor],
        block_size: int,
    ) -> None:
        """Call it once, on copies: that compiles it.

        Raises:
            KernelError: it does not compile. Going on without would give this process other bits
                than those where it does.
        """
        few = examples(tensors, block_size)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # Of the compiler's own code: where warnings are errors, it would not compile.
                warnings.simplefilter("ignore", DeprecationWarning)
                numbers = scalar_tensor(scalar_args, few[0])
                step(*_in_rows(few, few[0].numel(), block_size), numbers)
        except Exception as error:
            raise KernelError(
                f"the compiler made nothing of this chain: {type(error).__name__}: {error}; use "
                "executor='blocked', which needs none"
            ) from error

    def explain(self, stages: Sequence[Stage], chunk: Leaf) -> str:
        return "inductor"


def _step(
    chunk: Leaf, found: _Found, cut: tuple[int, int], rest: KernelStep, totals: Sequence[Tensor]
) -> None:
    """Step a chunk: its last block, if that is not full, and the blocks before it."""
    step, traced, numbers, tensors = found
    whole, block_size = cut
    rest(totals)
    if chunk.scalars is Scalars.DEVICE:
        scalar_args = _scalars_on_device(traced, numbers, totals, chunk.param)
    else:
        scalar_args = scalar_tensor(traced.compute_scalars(numbers, totals), chunk.param)
    if whole:
        step(*_in_rows(part(tensors, block_size, 0, whole), whole, block_size), scalar_args)


class _Want(NamedTuple):
    """All that a program depends on."""

    stages: tuple[Stage, ...]
    key: CacheKey


def _in_rows(tensors: Sequence[Tensor], count: int, block_size: int) -> list[Tensor]:
    """A chunk as rows of a block, where the chain works in blocks.

    A loop over all elements that has to look up the block of each could not take several at a time.
    """
    if block_size == 1:
        return list(tensors)
    return [one.view(-1, block_size) if one.numel() == count else one for one in tensors]


def _scalars_on_device(
    traced: Trace, numbers: Numbers, totals: Sequence[Tensor], param: Tensor
) -> Tensor:
    """The scalar arguments of a step, computed where the parameter is.

    Nothing waits for the device then, and what a CUDA graph captures of it holds for each replay.
    """
    dtype = scalar_dtype(param.dtype)
    one = torch.ones((), dtype=dtype, device=param.device)
    with Lowered():
        made = [beside(one, value) for value in traced.compute_scalars(numbers, totals)]
    return torch.stack(made) if made else param.new_empty(0, dtype=dtype)


def scalar_tensor(values: Sequence[float | Tensor], param: Tensor) -> Tensor:
    """The scalar arguments of a step as a compiled program takes them."""
    dtype = scalar_dtype(param.dtype)
    if param.device.type == "cpu":
        return torch.tensor([float(value) for value in values], dtype=dtype, device="cpu")
    fixed = [0.0 if isinstance(value, Tensor) else value for value in values]
    host = torch.tensor(fixed, dtype=dtype, device="cpu", pin_memory=True)
    made = host.to(param.device, non_blocking=True)
    for index, value in enumerate(values):
        if isinstance(value, Tensor):  # measured on the device: not to be waited for
            made[index].copy_(value, non_blocking=True)
    return made


def scalar_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels compute with a parameter of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _validated_in_rows(
    traced: Trace, block_size: int, tensors: Sequence[Tensor], scalar_args: Sequence[float | Tensor]
) -> Validated:
    """The graph validated as it is compiled where blocks are more than an element: on rows.

    Raises:
        UntraceableError: a stage takes no parameter of that shape.
    """
    few = min(tensors[0].numel(), max(EXAMPLE_ELEMENTS, block_size)) // block_size * block_size
    rows = [one.clone() for one in _in_rows(part(tensors, block_size, 0, few), few, block_size)]
    try:
        return validate(traced, rows, scalar_args, pointwise=False)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UntraceableError(
            f"it is compiled for parameters of shape (rows, {block_size}), which a stage does not "
            f"take: {error}"
        ) from error
