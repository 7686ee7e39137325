"""Addends of leaves to a stage's total: prepared once, then summed together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.leaf import PLAIN
from functional_optim.core.stage import Stage, Transform
from functional_optim.core.state import state_tensors
from functional_optim.kernels import HandedOn, Leaf, ReferenceExecutor
from functional_optim.kernels.totals import measured_each, reduced_each
from functional_optim.plan.composed.counted import Counted
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.outline import LeafPart
from functional_optim.plan.composed.step_leaves import StepLeaf
from functional_optim.plan.item import Made

_IS_CPU = attrgetter("is_cpu")

BATCH = 1 << 15
"""Most elements of leaves that are reduced at once with their states: copies stay in a cache."""

FEWEST = 4
"""Leaves with states of which fewer are sooner reduced one by one."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Leaves that may be summed up by one call."""

    group: int
    """Whose coefficients they have."""
    places: list[int] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)


class Addends:
    """The leaves of a part, whose last stage needs a total.

    Args:
        part: of leaves.
        leaves: of the step, on memory that stays.
        counted: what those of the part have counted.
    """

    def __init__(self, part: LeafPart, leaves: Sequence[StepLeaf], counted: Counted) -> None:
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
        self._batches = self._batched() if part.stages[-1].reduce is not None else []

    def rows(self, decider: Decider, totals: Sequence[Tensor]) -> Sequence[Sequence[float]]:
        """Return the addends of each leaf.

        Args:
            decider: of the step; it has a gradient for each, laid out as the parameter.
            totals: of the measured stages before.
        """
        part, last = self._part, self._part.stages[-1]
        grads: list[Any] = list(map(decider.grads.__getitem__, part.members))
        made = []
        for one in self.counted.now:  # as a rule one, and a comprehension is a call
            made.append(decider.numbers(part, *one))  # noqa: PERF401
        rows = self._rows(decider, grads, made)
        if rows is not None:
            return rows
        leaves = [self._leaf(k, grads, made) for k in range(len(grads))]
        if last.reduce is None:
            measure = decider.executor.measure
            return [[float(measure(part.stages, [one], totals).item())] for one in leaves]
        addends = ReferenceExecutor().addends(part.stages, leaves, totals)
        return [[float(one.item()) for one in parts] for parts in addends]

    def _rows(
        self, decider: Decider, grads: list[Any], made: Sequence[Made]
    ) -> Sequence[Sequence[float]] | None:
        """Return the addends of leaves that the stages before leave as they are."""
        last, handed_on = self._part.stages[-1], self._handed_on
        now = [one.coefficients[:-1] for one in made]
        if now != handed_on.asked:
            handed_on.look(now, [self._leaf(k, grads, made) for k in self._kinds])
        if not handed_on.gradients:
            return None
        if last.reduce is None:
            return _measured(last, grads) if decider.executor.exact else None
        if not handed_on.params:
            return None
        numbers = [one.coefficients[-1] for one in made]
        rows: dict[int, list[float]] = {}
        for batch in tuple(self._batches):
            own = [grads[k] for k in batch.places]
            shared, states = numbers[batch.group], batch.states
            found = reduced_each(last, batch.params, own, states, shared)
            if found is None:
                self._batches.remove(batch)  # the stage is asked one by one
                continue
            for k, *row in zip(batch.places, *found, strict=True):
                rows[k] = row
        for k, (param, kept, _) in enumerate(self._leaves if len(rows) < len(grads) else ()):
            if k not in rows:
                shared = numbers[self.counted.groups[k]]
                alone = last.reduce(param, grads[k], kept[-1], shared)
                rows[k] = [float(one.item()) for one in alone]
        return [rows[k] for k in range(len(grads))]

    def _batched(self) -> list[_Batch]:
        """Leaves of the same coefficients: all of them, or small ones where there is a state."""
        copies, found = self._part.stages[-1].stateful, list[_Batch]()
        last: dict[Any, tuple[_Batch, int]] = {}
        for k, (param, states, _) in enumerate(self._leaves):
            count = param.numel() if copies else 0
            if count > BATCH:
                continue
            group = self.counted.groups[k]
            key = (group, param.dtype) if copies else group
            batch, held = last.get(key, (None, 0))
            if batch is None or held + count > BATCH:
                batch, held = _Batch(group), 0
                found.append(batch)
            last[key] = batch, held + count
            batch.places.append(k)
            batch.params.append(param)
            batch.states.append(states[-1])
        return [one for one in found if not copies or len(one.places) >= FEWEST]

    def _leaf(self, k: int, grads: Sequence[Any], made: Sequence[Made]) -> Leaf:
        """Return a leaf as stages see it."""
        (param, states, name), now = self._leaves[k], made[self.counted.groups[k]]
        return Leaf(param, grads[k], states, now.coefficients, name, now.hypers, now.step)


def _measured(stage: Stage, grads: list[Any]) -> Sequence[Sequence[float]]:
    """Return each gradient's addend to the total of a measured stage."""
    assert isinstance(stage, Transform)
    assert stage.measure is not None
    found = measured_each(stage, grads)
    numbers = [stage.measure(one).item() for one in grads] if found is None else found.tolist()
    return [[float(one)] for one in numbers]


def is_simple(tensors: Sequence[Tensor]) -> bool:
    """Return True if stages see tensors as they are: real, dense and no class of their own."""
    return all(
        type(one) in PLAIN and one.layout == torch.strided and not one.is_complex()
        for one in tensors
    )
