"""Leaf of a step, as executors take it."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import vmap_levels
from functional_optim.core.stage import Stage, Transform
from functional_optim.core.state import state_tensors


class Scalars(Enum):
    """Source of a step's numbers, which all elements of a leaf have in common."""

    HOST = "Python's numbers, made anew for each step"
    DEVICE = "0-d tensors beside the parameters: a replay of a CUDA graph computes them again"


PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The classes of tensors whose memory is looked into."""


class Leaf(NamedTuple):
    """Parameter with a gradient, as the stages see it: real, dense, with coefficients."""

    param: Tensor
    grad: Tensor
    states: tuple[Any, ...]
    """One State per stage."""
    coefficients: tuple[Any, ...]
    """One Coefficients per stage, for this step. Leaves at the same step share one object."""
    name: str
    """Where it stands in its tree, for errors."""
    hypers: tuple[Any, ...] = ()
    """The Hyper of each stage that these coefficients were made of."""
    step: float | Tensor = 0.0
    """The number of the step to be made, from 1."""
    entries: dict[Any, Any] | None = None
    """Where a kernel may keep what it found out, for a chunk that comes again: perhaps with other
    numbers, for which it looks itself."""
    scalars: Scalars = Scalars.HOST
    """Where its coefficients and its step come from."""


class Stepped(NamedTuple):
    """Result of a step of a :class:`Leaf`."""

    param: Tensor
    states: tuple[Any, ...]


def require_kept(leaf: Leaf, stepped: Stepped) -> None:
    """A step keeps every shape and dtype.

    Raises:
        RuntimeError: names the leaf, and what a rule made of it.
    """
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
                f"a rule made of {what} at {leaf.name!r}, of shape {tuple(before.shape)} and "
                f"{before.dtype}, a tensor of shape {tuple(after.shape)} and {after.dtype}; it "
                "must keep both (dtypes drift where torch.where or arithmetic meets Python "
                "numbers or 0-d double tensors: see functional_optim.numeric)"
            )


def require_room(leaf: Leaf, stepped: Stepped) -> None:
    """A step can be written to a leaf inside of torch.func.vmap.

    Raises:
        ValueError: it has a result for each example, and the leaf is one for all of them.
    """
    targets = [leaf.param, *state_tensors(leaf.states)]
    for target, value in zip(targets, [stepped.param, *state_tensors(stepped.states)], strict=True):
        if not vmap_levels(value) <= vmap_levels(target):
            raise ValueError(
                f"the step at {leaf.name!r} has a result for each example of torch.func.vmap, and "
                "the parameter, or its state, is one for all of them: map over both, or use update"
            )


def on_device(leaves: Sequence[Leaf]) -> bool:
    """Return True if the numbers of leaves, which all come from one place, stand on a device."""
    return len(leaves) > 0 and leaves[0].scalars is Scalars.DEVICE


def is_measured(stage: Stage) -> bool:
    """Return True if a stage needs a sum over all gradients first."""
    return isinstance(stage, Transform) and stage.measure is not None


def needs_total(stage: Stage) -> bool:
    """Return True if a stage needs a total over all leaves, or several, before it runs."""
    return is_measured(stage) or stage.reduce is not None


def segments(stages: Sequence[Stage]) -> list[range]:
    """Stages cut before each measured one: within a segment, every leaf runs through alone."""
    starts = [0] + [i for i, stage in enumerate(stages) if is_measured(stage) and i > 0]
    ends = [*starts[1:], len(stages)]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]
