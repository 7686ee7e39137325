"""Leaf: the arguments of an executor for one parameter."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.derivatives import vmap_levels
from functional_optim.core.stage import Stage, Transform
from functional_optim.core.state import state_tensors
from functional_optim.native import LOOPS


class Scalars(Enum):
    """Form of a step's coefficients."""

    HOST = "Python's numbers, made anew for each step"
    DEVICE = "0-d tensors beside the parameters: a replay of a CUDA graph computes them again"


PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Classes of tensors whose memory kernels may access by address."""


def layouts_of(tensors: list[Any]) -> list[int]:
    """Return for each tensor the index of the first one that differs only in memory and in values.

    For any other value than a plain, strided leaf of autograd, return its own index.
    """
    loops = LOOPS.get(len(tensors))
    if loops is not None:
        return loops.layouts(tensors)
    keys = [
        (one.shape, one.dtype, one.device, one.stride(), one.is_inference(), one.is_conj())
        if type(one) in PLAIN and one.layout == torch.strided and one.is_leaf and not one.is_neg()
        else k
        for k, one in enumerate(tensors)
    ]
    firsts: dict[Any, int] = {}
    return [firsts.setdefault(key, k) for k, key in enumerate(keys)]


class Leaf(NamedTuple):
    """Parameter, gradient, state and coefficients of a step. Rules only see real, dense tensors."""

    param: Tensor
    grad: Tensor
    states: tuple[Any, ...]
    """One State per stage."""
    coefficients: tuple[Any, ...]
    """One Coefficients per stage, for this step. Leaves at the same step share one object."""
    name: str
    """The path of the leaf in its tree, for errors."""
    hypers: tuple[Any, ...] = ()
    """The Hyper of each stage, from which the coefficients were computed."""
    step: float | Tensor = 0.0
    """The number of this step, from 1."""
    entries: dict[Any, Any] | None = None
    """Cache of a kernel for this chunk. The kernel must check if cached coefficients still hold."""
    scalars: Scalars = Scalars.HOST
    """The form of the coefficients and the step."""


class Stepped(NamedTuple):
    """Result of a step of a :class:`Leaf`."""

    param: Tensor
    states: tuple[Any, ...]


def check_kept(leaf: Leaf, stepped: Stepped) -> None:
    """Raise RuntimeError if a step changed a shape or dtype of the parameter or state."""
    pairs = [("the parameter", leaf.param, stepped.param)]
    for old, new in zip(leaf.states, stepped.states, strict=True):
        for field, before, after in zip(getattr(old, "_fields", ()), old, new, strict=True):
            if isinstance(before, list):
                pairs += [(field, *pair) for pair in zip(before, after, strict=True)]
            else:
                pairs.append((field, before, after))
    for what, before, after in pairs:
        if after.shape != before.shape or after.dtype != before.dtype:
            raise RuntimeError(
                f"a rule returned for {what} at {leaf.name!r}, of shape {tuple(before.shape)} and "
                f"{before.dtype}, a tensor of shape {tuple(after.shape)} and {after.dtype}; it "
                "must keep both. Arithmetic and torch.where with Python numbers or 0-d float64 "
                "tensors can change the dtype: use functional_optim.numeric, such as shift(x, "
                "c.eps) instead of x + c.eps"
            )


def check_vmap_levels(leaf: Leaf, stepped: Stepped) -> None:
    """Raise ValueError if torch.func.vmap batches the result of a step, but not the leaf."""
    targets = [leaf.param, *state_tensors(leaf.states)]
    for target, value in zip(targets, [stepped.param, *state_tensors(stepped.states)], strict=True):
        if not vmap_levels(value) <= vmap_levels(target):
            raise ValueError(
                f"the step at {leaf.name!r} has a result for each example of torch.func.vmap, and "
                "the parameter, or its state, is one for all of them: map over both, or use update"
            )


def has_device_scalars(leaves: Sequence[Leaf]) -> bool:
    """Return True if the coefficients are 0-d tensors on the device, for all leaves alike."""
    return len(leaves) > 0 and leaves[0].scalars is Scalars.DEVICE


def is_measured(stage: Stage) -> bool:
    """Return True if a transform needs a sum over all gradients (``measure``)."""
    return isinstance(stage, Transform) and stage.measure is not None


def needs_total(stage: Stage) -> bool:
    """Return True if a stage needs totals over all leaves (``measure`` or ``reduce``)."""
    return is_measured(stage) or stage.reduce is not None


def split_at_measured(stages: Sequence[Stage]) -> list[range]:
    """Split the indices of stages before each measured stage.

    Within a segment, every leaf is stepped independently.
    """
    starts = [0] + [i for i, stage in enumerate(stages) if is_measured(stage) and i > 0]
    ends = [*starts[1:], len(stages)]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]
