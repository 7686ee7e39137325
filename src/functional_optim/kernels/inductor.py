"""Kernel for accelerators that compiles the graph of a chain into one pass over memory.

``torch.compile`` (Triton on CUDA) compiles the graph, with the writes to the chunk, at the first
use. The program is for chunks of any length, and the numbers that change with the step are elements
of one small tensor. So one program serves every step, learning rate and number of parameters. Its
results differ from torch's operations by a few units in the last place. On the CPU the exact loops
(:mod:`functional_optim.kernels.exact`) are used instead.
"""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functional_optim.core.leaf import Leaf, Scalars
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.cache_key import CacheKey, entry, key_of, require_few_choices
from functional_optim.kernels.chunks import slice_chunk, tensors_of, with_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.graph import Trace
from functional_optim.kernels.kernel import KernelError, KernelStep, no_op
from functional_optim.kernels.lowering import LOWERED, LoweringMode, copy_values, is_torch_function
from functional_optim.kernels.pointwise_check import check_pointwise_stages
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.signature import Numbers
from functional_optim.kernels.trace import trace
from functional_optim.kernels.validate import EXAMPLE_ELEMENTS, Validated, examples, validate
from functional_optim.numeric import beside

# float16 is not supported. The reference may round an intermediate result to zero, and divide by
# it; a compiled program keeps such results in float32, so no bound on the difference holds.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

ALIGNMENT = 16
"""Alignment, in bytes, of the tensors of a compiled program."""

Step = Callable[..., object]
"""``step(*chunk tensors, scalar arguments)`` steps in place."""


_Found = tuple[Step, Trace, Numbers, list[Tensor]]
"""The compiled step of a chunk, its graph, and the numbers and tensors of the chunk."""


class InductorKernel:
    """Kernel that runs a chain as a program compiled by ``torch.compile``.

    Args:
        devices: the types of device.
        backend: of ``torch.compile``.
        captured_only: True to step only chunks whose coefficients are on the device, as in a
            captured step.
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
        rest: KernelStep = no_op
        if whole < count:  # the last block is not full
            last = with_tensors(chunk, slice_chunk(tensors_of(chunk), block_size, whole, count))
            rest = partial(ReferenceExecutor().update_, stages, [last])
        return partial(_step, chunk, found, (whole, block_size), rest)

    def _find(self, stages: Sequence[Stage], chunk: Leaf) -> str | _Found:
        """Return the compiled step of a chunk, or the reason why there is none."""
        reason = self._unsupported_reason(chunk)
        if reason is not None:
            return reason
        try:
            on_device = chunk.scalars is Scalars.DEVICE
            key, numbers, tensors = key_of(stages, chunk, on_device=on_device)
            found = entry(chunk, "inductor", key, lambda: self._step(stages, chunk, key, numbers))
        except UntraceableError as error:
            return str(error)
        return found if isinstance(found, str) else (*found, numbers, tensors)

    def _unsupported_reason(self, chunk: Leaf) -> str | None:
        if chunk.param.dtype not in DTYPES:
            return f"{chunk.param.dtype} is not compiled"
        if chunk.param.is_cuda and find_spec("triton") is None:
            return "there is no Triton, which compiles for such devices"
        if chunk.param.is_cuda and any(t.data_ptr() % ALIGNMENT for t in tensors_of(chunk)):
            # The compiled program would step an aligned copy, and not change the tensor itself.
            return f"a chunk on {chunk.param.device} is compiled if it begins at {ALIGNMENT} bytes"
        return None

    def _step(
        self, stages: Sequence[Stage], chunk: Leaf, key: CacheKey, numbers: Numbers
    ) -> tuple[Step, Trace] | str:
        """Return the compiled step and its graph, or the reason why there is none; cached."""
        want = _ProgramKey(tuple(stages), key)

        def make() -> tuple[Step, Trace] | str:
            try:
                require_few_choices(want, self._programs)
                return self._build(want, chunk, numbers)
            except UntraceableError as error:
                return str(error)

        return self._programs.get_or_make(want, make)

    def _build(self, want: "_ProgramKey", chunk: Leaf, numbers: Numbers) -> tuple[Step, Trace]:
        """Compile a graph. The graph is validated first, because the compiler checks nothing."""
        stages, key = want
        traced = trace(stages, key.classes, key.shape)
        block_size, tensors = block_size_of(stages), tensors_of(chunk)
        with torch.no_grad():
            total = torch.ones((), dtype=torch.float64, device=tensors[0].device)
            totals = [total] * traced.totals
            scalar_args = traced.compute_scalars(list(map(float, numbers)), totals)
            check_pointwise_stages(stages, chunk, totals)
            if block_size == 1:
                found = validate(traced, examples(tensors, block_size), scalar_args)
            else:
                found = _validate_rows(traced, block_size, tensors, scalar_args)
        module = _compiled_module(traced, found.root)
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
        """Compile a step, by calling it on copies."""
        few = examples(tensors, block_size)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # The compiler's own code warns, and would fail where warnings are errors.
                warnings.simplefilter("ignore", DeprecationWarning)
                numbers = scalar_tensor(scalar_args, few[0])
                step(*_view_rows(few, few[0].numel(), block_size), numbers)
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
    """Step a chunk: the last block if it is not full, and all other blocks."""
    step, traced, numbers, tensors = found
    whole, block_size = cut
    rest(totals)
    if chunk.scalars is Scalars.DEVICE:
        scalar_args = _scalars_on_device(traced, numbers, totals, chunk.param)
    else:
        scalar_args = scalar_tensor(traced.compute_scalars(numbers, totals), chunk.param)
    if whole:
        rows = _view_rows(slice_chunk(tensors, block_size, 0, whole), whole, block_size)
        step(*rows, scalar_args)


class _ProgramKey(NamedTuple):
    """Key of a compiled program."""

    stages: tuple[Stage, ...]
    key: CacheKey


def _view_rows(tensors: Sequence[Tensor], count: int, block_size: int) -> list[Tensor]:
    """Return the tensors of a chunk with one row per block, so that loops can be vectorized."""
    if block_size == 1:
        return list(tensors)
    return [one.view(-1, block_size) if one.numel() == count else one for one in tensors]


def _scalars_on_device(
    traced: Trace, numbers: Numbers, totals: Sequence[Tensor], param: Tensor
) -> Tensor:
    """Return the scalar arguments of a step, computed on the device.

    So nothing waits for the device, and a captured CUDA graph computes them again in each replay.
    """
    dtype = scalar_dtype(param.dtype)
    one = torch.ones((), dtype=dtype, device=param.device)
    with LoweringMode():
        made = [beside(one, value) for value in traced.compute_scalars(numbers, totals)]
    return torch.stack(made) if made else param.new_empty(0, dtype=dtype)


def scalar_tensor(values: Sequence[float | Tensor], param: Tensor) -> Tensor:
    """Return the scalar arguments of a compiled program as one tensor on the parameter's device."""
    dtype = scalar_dtype(param.dtype)
    if param.device.type == "cpu":
        return torch.tensor([float(value) for value in values], dtype=dtype, device="cpu")
    fixed = [0.0 if isinstance(value, Tensor) else value for value in values]
    host = torch.tensor(fixed, dtype=dtype, device="cpu", pin_memory=True)
    made = host.to(param.device, non_blocking=True)
    for index, value in enumerate(values):
        if isinstance(value, Tensor):  # a total on the device, which is not waited for
            made[index].copy_(value, non_blocking=True)
    return made


def scalar_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's kernels compute with a parameter of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _validate_rows(
    traced: Trace, block_size: int, tensors: Sequence[Tensor], scalar_args: Sequence[float | Tensor]
) -> Validated:
    """Validate the graph of a chain that works in blocks, on tensors with one row per block."""
    few = min(tensors[0].numel(), max(EXAMPLE_ELEMENTS, block_size)) // block_size * block_size
    part = slice_chunk(tensors, block_size, 0, few)
    rows = [one.clone() for one in _view_rows(part, few, block_size)]
    try:
        return validate(traced, rows, scalar_args)
    except (RuntimeError, ValueError, IndexError) as error:
        raise UntraceableError(
            f"it is compiled for parameters of shape (rows, {block_size}), which a stage does not "
            f"take: {error}"
        ) from error


def _compiled_module(trace: Trace, root: Mapping[fx.Node, fx.Node]) -> torch.nn.Module:
    """Return a module that makes one step in place, from ``(*tensors of a chunk, scalars)``."""
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in trace.chunk}
    scalars = graph.placeholder("scalars")
    if trace.scalar_args:
        unbound = graph.call_method("unbind", (scalars,))
        for place, node in enumerate(trace.scalar_args):
            made[node] = graph.call_function(operator.getitem, (unbound, place))
    for node in trace.graph.nodes:
        if node.op != "placeholder":
            fx.node.map_aggregate((node.args, node.kwargs), _refuse_tensor)
            made[node] = _lower(graph.node_copy(node, made.__getitem__))
    # A result that is an old value must be copied before the old value is overwritten.
    lasting = {node: made[node] for node, _ in trace.results if root[node] in trace.chunk}
    made |= {node: graph.call_function(copy_values, (now,)) for node, now in lasting.items()}
    targets = [graph.find_nodes(op="placeholder")[place] for _, place in trace.results]
    for target, (node, _) in zip(targets, trace.results, strict=True):
        graph.call_method("copy_", (target, made[node]))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def _refuse_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):
        raise UntraceableError(
            "the rule uses a tensor that is none of its arguments, which no compiled program holds"
        )
    return value


def _lower(node: fx.Node) -> fx.Node:
    """Let a node call the function that takes 0-d tensors, instead of torch's function."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in LOWERED and (node.op == "call_method" or is_torch_function(node.target, name)):
        node.op, node.target = "call_function", LOWERED[name]
    return node
