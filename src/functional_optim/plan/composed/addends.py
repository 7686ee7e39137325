"""What leaves that stay add to the total of a stage: looked at once, then summed up together."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.state import state_tensors
from functional_optim.kernels import Leaf, ReferenceExecutor, hand_on, total_of
from functional_optim.plan.composed.counted import Counted
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.outline import Part
from functional_optim.plan.composed.step_leaves import StepLeaf
from functional_optim.plan.guard import PLAIN

_IS_CPU = attrgetter("is_cpu")


class Addends:
    """The leaves of a part, whose last stage needs a total.

    Args:
        part: of leaves.
        leaves: of the step, on memory that stays.
        counted: what those of the part have counted.
    """

    def __init__(self, part: Part, leaves: Sequence[StepLeaf], counted: Counted) -> None:
        self.counted = counted
        self._part = part
        own = [leaves[k] for k in part.members]
        self._leaves = [
            (one.param, one.state.stages[part.start : part.stop], one.name) for one in own
        ]
        tensors = [
            one for param, states, _ in self._leaves for one in (param, *state_tensors(states))
        ]
        self.are_simple = is_simple(tensors) and all(map(_IS_CPU, tensors))
        """Whether they may be summed up here."""
        kinds: dict[Any, int] = {}
        for k, (leaf, group) in enumerate(zip(own, counted.groups, strict=True)):
            kinds.setdefault((group, leaf.param.shape, leaf.param.dtype), k)
        self._kinds = list(kinds.values())  # one of each shape and dtype that counted the same

    def of(self, decider: Decider, totals: Sequence[Tensor]) -> Tensor:
        """Their sum.

        Args:
            decider: of the step; it has a gradient for each, laid out as the parameter.
            totals: of the measured stages before.
        """
        part, stages, counted = self._part, self._part.stages, self.counted
        grads: list[Any] = list(map(decider.grads.__getitem__, part.members))
        made = [decider.numbers(part, *one) for one in counted.now]

        def leaf(k: int) -> Leaf:
            (param, states, name), now = self._leaves[k], made[counted.groups[k]]
            return Leaf(param, grads[k], states, now.coefficients, name, now.hypers, now.step)

        if stages[-1].reduce is None and decider.executor.exact:
            before = stages[:-1]
            if not before or all(hand_on(before, leaf(k)) for k in self._kinds):
                return total_of(stages[-1], grads)
        leaves = list(map(leaf, range(len(part.members))))
        if stages[-1].reduce is None:
            return decider.executor.measure(stages, leaves, totals)
        return _added(ReferenceExecutor().addends(stages, leaves, totals))


def _added(addends: Iterable[Sequence[Tensor]]) -> Tensor:
    """The sums of numbers that nothing follows: in Python, whose additions are a double's too."""
    sums: list[float] = []
    for parts in addends:
        own = [float(part.item()) for part in parts]
        sums = [one + more for one, more in zip(sums, own, strict=True)] if sums else own
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def is_simple(tensors: Sequence[Tensor]) -> bool:
    """Whether stages see tensors as they are: real, dense and no class of their own."""
    return all(
        type(one) in PLAIN and one.layout == torch.strided and not one.is_complex()
        for one in tensors
    )
