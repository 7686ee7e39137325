"""Floating-point operations of a step: declared by rules for matrices, counted for other rules."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.core.aliasing import storage_key
from functional_optim.core.blocks import MatrixBlocks
from functional_optim.core.hyper import resolve
from functional_optim.core.leaf import is_measured
from functional_optim.core.on_global_step import at_global_step
from functional_optim.core.stage import Stage
from functional_optim.core.stage_contract import (
    call_coefficients,
    call_reduce,
    call_stage,
    init_state,
)
from functional_optim.core.state import map_state

MAX_SIDE = 8
"""Maximal size of a dimension of the tensor on which operations are counted."""
STEP = 2.0
"""The step count at which operations are counted."""

_FUSED = {"lerp": 3, "addcmul": 3, "addcdiv": 3}
"""Operations per element of torch functions that do more than one."""
_COPIES = frozenset(["clone", "contiguous", "copy_", "fill_", "to", "zeros_like", "ones_like"])
_PRODUCTS = frozenset(
    ["__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum"]
)


def step_flops(stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int]) -> int:
    """Return the floating-point operations of a step of one parameter, on average over steps.

    If a stage declares ``flops``, this function is called for each of its matrices. For every other
    stage, the operations of its rule on a small tensor are counted, and scaled to the number of
    elements. Stages after a gate count as if the gate were open.
    """
    return sum(_stage_flops(*one, tuple(shape)) for one in zip(stages, hypers, strict=True))


def _stage_flops(stage: Stage, hyper: Any, shape: tuple[int, ...]) -> int:
    inner = stage.made_of(hyper)
    if inner is not None:  # a stored stage contains the stages that compute
        return sum(_stage_flops(link.stage, link.hyper, shape) for link in inner[1])
    hyper = at_global_step(hyper, STEP)
    hyper = resolve(stage.name, stage.bounds, stage.check, hyper, STEP)
    if stage.flops is not None:
        blocks = MatrixBlocks() if stage.blocks is None else stage.blocks.of(hyper)
        if stage.blocks is not None or len(shape) == blocks.batch_axes + 1 + blocks.column_axes:
            counts = Counter(blocks.shapes(shape))
            return sum(count * stage.flops(one, hyper) for one, count in counts.items())
    small = tuple(min(size, MAX_SIDE) for size in shape)
    count = math.prod(small)
    return 0 if count == 0 else _count_flops(stage, hyper, small) * math.prod(shape) // count


def _count_flops(stage: Stage, hyper: Any, shape: tuple[int, ...]) -> int:
    dtype = stage.dtypes[0] if stage.dtypes else torch.float32
    param = torch.ones(shape, dtype=dtype, device="cpu")
    state = init_state(stage, param, hyper)
    if stage.inputs:
        given = {one.name: [torch.ones_like(param)] for one in stage.inputs}
        state = state._replace(**given)
    more = [stage.init_shared(hyper)] if stage.combine is not None else []
    coefficients = call_coefficients(stage, STEP, hyper, *more)
    totals = [torch.ones((), dtype=torch.float64, device="cpu")] if is_measured(stage) else []
    grad = torch.ones_like(param)
    state = map_state(lambda one: one.to("cpu"), state)
    with torch.no_grad(), _FlopCounter(stage) as operations:
        call_stage(stage, param, grad, state, coefficients, totals, grad)
        if stage.reduce is not None:
            call_reduce(stage, param, grad, state, coefficients)
    count: int = operations.elements
    return count


class _FlopCounter(TorchFunctionMode):
    """Counter of the elementwise operations of torch's functions."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.elements = 0
        self._stage = stage

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS or (name.startswith("linalg_") and not name.endswith("norm")):
            raise ValueError(
                f"{self._stage.name} multiplies matrices ({name}) and declares no FLOPs, so its "
                "time cannot be planned for; give its Rule flops=, a function of the shape of a "
                "matrix and the hyper-parameters"
            )
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and name not in _COPIES and _is_new(name, made, args):
            scales = (kwargs or {}).get("alpha", 1) != 1
            self.elements += (_FUSED.get(name, 1) + scales) * _elements([*args, made])
        return made


def _is_new(name: str, made: Tensor, args: Sequence[Any]) -> bool:
    """Return True if the result of a function is not a view of an argument."""
    if name.endswith("_") and not name.endswith("__"):
        return True
    storage = storage_key(made)
    return all(storage_key(one) != storage for one in args if isinstance(one, Tensor))


def _elements(values: Sequence[Any]) -> int:
    return max((one.numel() for one in values if isinstance(one, Tensor)), default=0)
