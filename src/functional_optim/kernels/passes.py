"""Passes: a chain cut at transforms that take lists of whole leaves.

A chain such as LAMB's has one stage that needs whole tensors; its other stages are pointwise. Such
a chain is cut at the stages with a ``transform_each_``. Between the cuts, loops run the stages.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage, Transform
from functional_optim.kernels.chunks import why_not_flat


class HandOnHyper(NamedTuple):
    pass


class HandOnState(NamedTuple):
    grad: Tensor


def hand_on_transform(
    grad: Tensor, param: Tensor, state: HandOnState, c: HandOnHyper
) -> tuple[Tensor, HandOnState]:
    return grad, HandOnState(grad)


HAND_ON = Transform(
    name="hand_on", hyper=HandOnHyper, state=HandOnState, transform=hand_on_transform
)
"""The last stage of a loop that hands its gradients to the next pass: they are its state."""


class Pass(NamedTuple):
    """Pointwise stages ``[start, stop)`` of a chain, and the whole-leaf stage behind them."""

    start: int
    stop: int
    whole: Transform | None
    """The stage at ``stop``; None in the last pass."""
    reads: int
    """The scratch that its gradients are read from; -1 where they are the given ones."""
    writes: int
    """The scratch that holds its gradients; as ``reads`` if there is no loop."""

    @property
    def loops(self) -> bool:
        """True if a loop runs: there are stages, or given gradients to be copied."""
        return self.start < self.stop or (self.whole is not None and self.reads < 0)


def passes_of(stages: Sequence[Stage]) -> list[Pass] | None:
    """Return the passes of a chain; None if it cannot be cut into passes."""
    places = [k for k, stage in enumerate(stages) if stage.kind != "pointwise"]
    if not places or any(stage.granularity > 1 for stage in stages):
        return None
    if any(isinstance(one, Transform) and one.raw for one in stages[places[0] :]):
        return None  # the raw gradient does not reach behind the first pass
    found: list[Pass] = []
    start, reads = 0, -1
    for place in places:
        whole = stages[place]
        if not isinstance(whole, Transform) or whole.transform_each_ is None:
            return None
        # A loop never writes to the scratch that it reads.
        writes = reads if start == place and reads >= 0 else int(reads == 0)
        found.append(Pass(start, place, whole, reads, writes))
        start, reads = place + 1, writes
    if start < len(stages):
        found.append(Pass(start, len(stages), None, reads, reads))
    return found


def can_pass(stages: Sequence[Stage], passes: Sequence[Pass], leaves: Sequence[Leaf]) -> bool:
    """Return True if the pointwise stages have states of each parameter's size."""
    if len({_form_of(leaf) for leaf in leaves}) > 1:
        return False
    for one in passes:
        own = stages[one.start : one.stop]
        for leaf in leaves:
            part = leaf._replace(states=leaf.states[one.start : one.stop])
            if why_not_flat(own, part) is not None:
                return False
    return True


def _form_of(leaf: Leaf) -> tuple[tuple[int, ...], ...]:
    """Return how many tensors each field of each state has; -1 for a field that is no list."""
    return tuple(
        tuple(len(one) if isinstance(one, list) else -1 for one in state) for state in leaf.states
    )
