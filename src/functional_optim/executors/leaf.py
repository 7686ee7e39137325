"""What an executor is given for each leaf, and what an executor is."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from functional_optim.stage import Stage, Transform


class Leaf(NamedTuple):
    """One parameter with a gradient, as the stages see it: real, dense, coefficients at hand."""

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
    memo: dict[Any, Any] | None = None
    """Where a kernel may keep what it found out, for a lane that comes again: perhaps with other
    numbers, for which it looks itself."""


class Stepped(NamedTuple):
    """What a step makes of a :class:`Leaf`."""

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


class Executor(Protocol):
    """A way of mapping the stages of a chain over leaves.

    ``measured`` holds the totals of the first measured stages, in order, where the caller knows
    them (from other shards or ranks); the rest is summed over the leaves at hand.
    """

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        """New tensors; the leaves stay as they are."""
        ...

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        """The same, written into the params and states of the leaves."""
        ...

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        """The sum over the leaves that the first stage not in ``measured`` needs."""
        ...

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Make sure that every leaf can be stepped; KernelError, with nothing changed, if not."""
        ...


def is_measured(stage: Stage) -> bool:
    """Whether a stage needs a sum over all gradients first."""
    return isinstance(stage, Transform) and stage.measure is not None


def needs_total(stage: Stage) -> bool:
    """Whether a stage needs a total over all leaves, or several, before it runs."""
    return is_measured(stage) or stage.reduce is not None


def segments(stages: Sequence[Stage]) -> list[range]:
    """Stages cut before each measured one: within a segment, every leaf runs through alone."""
    starts = [0] + [i for i, stage in enumerate(stages) if is_measured(stage) and i > 0]
    ends = [*starts[1:], len(stages)]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]
