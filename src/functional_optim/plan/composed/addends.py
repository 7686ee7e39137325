"""What leaves that stay add to the total of a stage: looked at once, then summed up together."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.state import state_tensors
from functional_optim.kernels import HandedOn, Leaf, ReferenceExecutor, numbers_of_each, total_of
from functional_optim.plan.composed.counted import Counted
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.outline import Part
from functional_optim.plan.composed.step_leaves import StepLeaf
from functional_optim.plan.engine import Made
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
        self._handed_on = HandedOn(part.stages[:-1])
        self._at_once = part.stages[-1].reduce is not None and not part.stages[-1].stateful

    def of(self, decider: Decider, totals: Sequence[Tensor]) -> Tensor:
        """Their sum.

        Args:
            decider: of the step; it has a gradient for each, laid out as the parameter.
            totals: of the measured stages before.
        """
        part, stages, counted = self._part, self._part.stages, self.counted
        grads: list[Any] = list(map(decider.grads.__getitem__, part.members))
        made = []
        for one in counted.now:  # as a rule one, and a comprehension is a call
            made.append(decider.numbers(part, *one))  # noqa: PERF401

        def leaf(k: int) -> Leaf:
            (param, states, name), now = self._leaves[k], made[counted.groups[k]]
            return Leaf(param, grads[k], states, now.coefficients, name, now.hypers, now.step)

        last, handed_on = stages[-1], self._handed_on
        now = [one.coefficients[:-1] for one in made]
        if now != handed_on.asked:
            handed_on.look(now, map(leaf, self._kinds))
        if last.reduce is None and decider.executor.exact and handed_on.gradients:
            return total_of(last, grads)
        if last.reduce is not None and handed_on.gradients and handed_on.params:
            return self._reduced(last.reduce, grads, made)
        leaves = list(map(leaf, range(len(part.members))))
        if last.reduce is None:
            return decider.executor.measure(stages, leaves, totals)
        return _added(ReferenceExecutor().addends(stages, leaves, totals))

    def _reduced(
        self,
        reduce: Callable[..., Sequence[Tensor]],
        grads: list[Any],
        made: Sequence[Made],
    ) -> Tensor:
        """The sums of a stage that is given parameters and gradients as they are."""
        numbers = [one.coefficients[-1] for one in made]
        if self._at_once and len(numbers) == 1:
            params = [param for param, _, _ in self._leaves]
            found = numbers_of_each(reduce, params, grads, numbers[0])
            if found is not None:
                sums = [functools.reduce(operator.add, column) for column in found]
                return torch.tensor(sums, dtype=torch.float64, device="cpu")
            self._at_once = False  # it is written for tensors
        groups = self.counted.groups
        return _added(
            reduce(param, grad, states[-1], numbers[group])
            for (param, states, _), grad, group in zip(self._leaves, grads, groups, strict=True)
        )


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
