"""Floating-point operations of a step: declared by rules of matrices, counted for all others."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.core.aliasing import storage_of
from functional_optim.core.blocks import MatrixBlocks
from functional_optim.core.calling import called, started
from functional_optim.core.hyper import resolve
from functional_optim.core.leaf import is_measured
from functional_optim.core.stage import Stage
from functional_optim.core.state import map_state

SIDE = 8
"""Longest side of the tensor on which operations are counted."""
STEP = 2.0
"""Step whose operations are counted."""

_FUSED = {"lerp": 3, "addcmul": 3, "addcdiv": 3}
"""Operations on an element, where torch's operator does more than one."""
_COPIES = frozenset(["clone", "contiguous", "copy_", "fill_", "to", "zeros_like", "ones_like"])
_PRODUCTS = frozenset(
    ["__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum"]
)


def step_flops(stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int]) -> int:
    """Return the floating-point operations of a step of one parameter, on average over steps.

    A stage that declares ``flops`` is asked for each of its matrices. For every other stage, the
    operations of its rule on a small tensor are counted, and scaled to the number of elements.
    Stages behind a gate count as if the gate were open.

    Args:
        stages: of the chain.
        hypers: their hyper-parameters.
        shape: of the parameter.

    Raises:
        ValueError: a stage multiplies matrices and declares no FLOPs.

    Example::

        >>> from functional_optim import muon
        >>> optimizer = muon(ns_steps=1)
        >>> step_flops(optimizer.stages, [link.hyper for link in optimizer.links], (2, 3))
        64
    """
    return sum(_stage(*one, tuple(shape)) for one in zip(stages, hypers, strict=True))


def _stage(stage: Stage, hyper: Any, shape: tuple[int, ...]) -> int:
    inner = stage.made_of(hyper)
    if inner is not None:  # a stage with storages, around the stages that do the work
        return sum(_stage(link.stage, link.hyper, shape) for link in inner[1])
    hyper = resolve(stage.name, stage.bounds, stage.check, hyper, STEP)
    if stage.flops is not None:
        blocks = MatrixBlocks() if stage.blocks is None else stage.blocks.of(hyper)
        if stage.blocks is not None or len(shape) == blocks.batch_axes + 1 + blocks.column_axes:
            counts = Counter(blocks.shapes(shape))
            return sum(count * stage.flops(one, hyper) for one, count in counts.items())
    small = tuple(min(size, SIDE) for size in shape)
    count = math.prod(small)
    return 0 if count == 0 else _counted(stage, hyper, small) * math.prod(shape) // count


def _counted(stage: Stage, hyper: Any, shape: tuple[int, ...]) -> int:
    dtype = stage.dtypes[0] if stage.dtypes else torch.float32
    param = torch.ones(shape, dtype=dtype, device="cpu")
    state = started(stage, param, hyper)
    if stage.inputs:
        given = {one.name: [torch.ones_like(param)] for one in stage.inputs}
        state = state._replace(**given)
    more = [stage.init_shared(hyper)] if stage.combine is not None else []
    coefficients = stage.coefficients(STEP, hyper, *more)
    totals = [torch.ones((), dtype=torch.float64, device="cpu")] if is_measured(stage) else []
    grad = torch.ones_like(param)
    state = map_state(lambda one: one.to("cpu"), state)
    with torch.no_grad(), _Operations(stage) as operations:
        called(stage, param, grad, state, coefficients, totals, grad)
        if stage.reduce is not None:
            stage.reduce(param, grad, state, coefficients)
    count: int = operations.elements
    return count


class _Operations(TorchFunctionMode):
    """Counter of the operations on elements that torch's functions do."""

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
    """Return True if a function computed a tensor, and did not return a view of an argument."""
    if name.endswith("_") and not name.endswith("__"):
        return True
    storage = storage_of(made)
    return all(storage_of(one) != storage for one in args if isinstance(one, Tensor))


def _elements(values: Sequence[Any]) -> int:
    """Return the most elements of a tensor among some values."""
    return max((one.numel() for one in values if isinstance(one, Tensor)), default=0)
