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


class Stepped(NamedTuple):
    """What a step makes of a :class:`Leaf`."""

    param: Tensor
    states: tuple[Any, ...]


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


def is_measured(stage: Stage) -> bool:
    """Whether a stage needs a sum over all gradients first."""
    return isinstance(stage, Transform) and stage.measure is not None


def segments(stages: Sequence[Stage]) -> list[range]:
    """Stages cut before each measured one: within a segment, every leaf runs through alone."""
    starts = [0] + [i for i, stage in enumerate(stages) if is_measured(stage) and i > 0]
    ends = [*starts[1:], len(stages)]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]
