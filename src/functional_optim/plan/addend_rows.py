"""Addends: what each leaf adds to a stage's total, computed for many leaves in one call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.leaf import PLAIN
from functional_optim.core.stage import Stage, Transform
from functional_optim.core.stage_contract import call_measure, call_reduce
from functional_optim.core.state import map_state
from functional_optim.kernels import Leaf, ReferenceExecutor
from functional_optim.kernels.totals import (
    UnchangedBy,
    columns_of,
    try_measure_each,
    try_reduce_each,
)
from functional_optim.plan.decision import Decision
from functional_optim.plan.item import StepScalars
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.points import LeafPart
from functional_optim.plan.step_counts import CountClasses, Numbers

_IS_CPU = attrgetter("is_cpu")

BATCH = 1 << 15
"""Largest number of elements that are reduced in one call: their copies stay in the cache."""

FEWEST = 4
"""Smallest number of leaves with state that are reduced in one call."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Leaves that one call can reduce."""

    group: int
    """The class of leaves whose coefficients they have."""
    places: list[int] = field(default_factory=list)


class Addends:
    """Reduction of the leaves of a part, whose last stage needs a total. It holds no tensor."""

    def __init__(
        self,
        part: LeafPart,
        rows: Sequence[LeafPositions],
        counted: CountClasses,
        tensors: list[Tensor],
    ) -> None:
        self.counted = counted
        self._part, self._positions = part, rows
        params = [tensors[row.param] for row in rows]
        own = [tensors[k] for row in rows for k in row.written]
        self.are_simple = is_simple(own) and all(map(_IS_CPU, own)) and are_real(own)
        """True if this class can reduce the leaves: all are plain real tensors on the CPU."""
        kinds: dict[Any, int] = {}
        for k, (param, group) in enumerate(zip(params, counted.groups, strict=True)):
            kinds.setdefault((group, param.shape, param.dtype), k)
        self._kinds = list(kinds.values())
        """A leaf of each count class, shape and dtype."""
        self._unchanged = UnchangedBy(part.stages[:-1])
        batches = self._batched(params) if part.stages[-1].reduce is not None else []
        self._batches = [(one, *self._columns(one)) for one in batches]
        """Batches, each with the positions of its parameters and of the last stage's state."""

    def rows(
        self, decider: Decision, tensors: list[Tensor], counts: Numbers, totals: Sequence[Tensor]
    ) -> Sequence[Sequence[float]]:
        """Return the addends of each leaf."""
        part, last = self._part, self._part.stages[-1]
        grads: list[Any] = list(map(decider.grads.__getitem__, part.members))
        made = []
        for one in counts:  # as a rule one, and a comprehension is a call
            made.append(decider.numbers.of(part, *one))  # noqa: PERF401
        rows = self._rows(decider, tensors, grads, made)
        if rows is not None:
            return rows
        leaves = [self._leaf(k, tensors, grads, made) for k in range(len(grads))]
        if last.reduce is None:
            measure = decider.executor.measure
            return [[float(measure(part.stages, [one], totals).item())] for one in leaves]
        addends = ReferenceExecutor().addends(part.stages, leaves, totals)
        return [[float(one.item()) for one in parts] for parts in addends]

    def _rows(
        self,
        decider: Decision,
        tensors: list[Tensor],
        grads: list[Any],
        made: Sequence[StepScalars],
    ) -> Sequence[Sequence[float]] | None:
        """Return the addends; None if an earlier stage changes gradients or parameters."""
        last = self._part.stages[-1]

        def leaves() -> list[Leaf]:
            return [self._leaf(k, tensors, grads, made) for k in self._kinds]

        unchanged = self._unchanged.find(made, leaves)
        if not unchanged.gradients:
            return None
        if last.reduce is None:
            return _measured(last, grads) if decider.executor.exact else None
        if not unchanged.params:
            return None
        rows: dict[int, list[float]] = {}
        for each in self._batches:
            batch, params, columns = each
            own = list(map(grads.__getitem__, batch.places))
            state = columns and _state_columns(tensors, columns)
            given = list(map(tensors.__getitem__, params)), own, state
            shared = made[batch.group].coefficients[-1]
            found = try_reduce_each(last, *given, shared, are_alike=True)
            if found is None:  # the stage cannot reduce a batch
                self._batches = [one for one in self._batches if one is not each]
                continue
            for k, *row in zip(batch.places, *found, strict=True):
                rows[k] = row
        for k, leaf in enumerate(self._positions if len(rows) < len(grads) else ()):
            if k not in rows:
                state = map_state(tensors.__getitem__, leaf.states[-1])
                shared = made[self.counted.groups[k]].coefficients[-1]
                alone = call_reduce(last, tensors[leaf.param], grads[k], state, shared)
                rows[k] = [float(one.item()) for one in alone]
        return list(map(rows.__getitem__, range(len(grads))))

    def _batched(self, params: Sequence[Tensor]) -> list[_Batch]:
        """Return batches of leaves with equal coefficients: only small leaves if there is state."""
        copies, found = self._part.stages[-1].stateful, list[_Batch]()
        last: dict[Any, tuple[_Batch, int]] = {}
        for k, param in enumerate(params):
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
        return [one for one in found if not copies or len(one.places) >= FEWEST]

    def _columns(self, batch: _Batch) -> tuple[list[int], Any]:
        """Return the positions of a batch's parameters, and of the last stage's states."""
        rows = [self._positions[k] for k in batch.places]
        return [row.param for row in rows], columns_of([row.states[-1] for row in rows])

    def _leaf(
        self, k: int, tensors: Sequence[Tensor], grads: Sequence[Any], made: Sequence[StepScalars]
    ) -> Leaf:
        """Return a leaf as stages see it."""
        row, now = self._positions[k], made[self.counted.groups[k]]
        param, states = tensors[row.param], row.state(tensors).stages
        return Leaf(param, grads[k], states, now.coefficients, row.name, now.hypers, now.step)


def _state_columns(tensors: list[Tensor], columns: Any) -> Any:
    """Return a State with tensors instead of their positions."""
    get, fields = tensors.__getitem__, []
    for column in columns:
        if column and isinstance(column[0], list):
            fields.append(list(map(list, map(partial(map, get), column))))
        else:
            fields.append(list(map(get, column)))
    return tuple.__new__(type(columns), fields)  # its constructor is a Python call


def _measured(stage: Stage, grads: list[Any]) -> Sequence[Sequence[float]]:
    """Return each gradient's addend to the total of a stage."""
    assert isinstance(stage, Transform)
    found = try_measure_each(stage, grads, are_alike=True)
    numbers = (
        [call_measure(stage, one).item() for one in grads] if found is None else found.tolist()
    )
    return [[float(one)] for one in numbers]


def is_simple(tensors: Sequence[Tensor]) -> bool:
    """Return True if all tensors are plain and strided."""
    return all(type(one) in PLAIN and one.layout == torch.strided for one in tensors)


def are_real(tensors: Sequence[Tensor]) -> bool:
    """Return True if no tensor is complex."""
    return not any(map(Tensor.is_complex, tensors))
