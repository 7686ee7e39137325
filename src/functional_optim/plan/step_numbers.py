"""StepNumbers: hyper-parameters and coefficients of the leaves of a step."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.hyper import FIXED, is_plain, resolve, to_floats
from functional_optim.core.leaf import Scalars
from functional_optim.core.on_global_step import at_global_step
from functional_optim.core.stage import Stage, same_coefficients
from functional_optim.core.stage_contract import checked_coefficients
from functional_optim.core.state import Shared
from functional_optim.numeric import larger
from functional_optim.plan.item import (
    Item,
    StepScalars,
    coefficients_error,
    next_step,
    step_scalars,
)
from functional_optim.plan.points import LeafPart
from functional_optim.plan.shared_numbers import as_all_numbers
from functional_optim.plan.step_leaves import GateNumbers, StepLeaves


class StepNumbers:
    """Hyper-parameters and coefficients of one step, for leaves with equal chains and counts."""

    def __init__(self, leaves: StepLeaves, shared: Any, links: int) -> None:
        self._chains, self._groups = leaves.chains, leaves.groups
        self._before = shared
        before = shared.stages if isinstance(shared, Shared) else ((),) * links
        self.shared: list[Any] = as_all_numbers(before)
        """The shared scalars of every link; after the Decision, those after the step."""
        self._made: dict[Any, StepScalars] = {}
        self._hypers: dict[Any, tuple[Any, ...]] = {}

    def share(self, place: int, record: Any) -> None:
        """Set the new shared scalars of a link."""
        self.shared[place] = record
        self._made.clear()

    def global_step(self, gate: int | None, device: torch.device | None = None) -> float | Tensor:
        """Return the number of this step for the stages after a gate.

        Without a gate, it is the number for the stages before the first gate, which count all
        calls.
        """
        before = self._before
        if not isinstance(before, Shared):
            return 1.0
        return next_step(before.step if gate is None else before.opened[gate], device)

    def latest_step(self, gates: Sequence[int | None]) -> float | Tensor:
        """Return the number of this step for a stage that is after different gates in its chains.

        This is the largest number: the stage runs whenever one of the gates opens.
        """
        return functools.reduce(larger, map(self.global_step, gates))

    def resolved(
        self, stage: Stage, hyper: Any, step: float | Tensor, global_step: float | Tensor
    ) -> Any:
        """Return hyper-parameters with the values of schedules."""
        if isinstance(self._before, Shared):
            hyper = at_global_step(hyper, global_step)
        return resolve(stage.name, stage.bounds, stage.check, hyper, step)

    def _global_step_at(self, part: LeafPart, k: int, step: float | Tensor) -> float | Tensor:
        """Return the number of the global step for the stage at ``k`` of a chain."""
        device = step.device if isinstance(step, Tensor) else None
        return self.global_step(_gate_before(part, k), device)

    def hypers_of(self, part: LeafPart, group: int) -> tuple[Any, ...]:
        """Return the hyper-parameters of the stages of a part, for leaves of a group.

        The same object for the same stages and group.
        """
        key = group, part.at
        found = self._hypers.get(key)
        if found is None:
            every = self._chains[group].hypers
            found = self._hypers[key] = tuple(map(every.__getitem__, part.at))
        return found

    def hypers_at(self, part: LeafPart, member: int) -> tuple[Any, ...]:
        """Return the hyper-parameters of the stages of a part, for one of its leaves."""
        return self.hypers_of(part, self._groups[member])

    def scalars_of(self, part: LeafPart, item: Item) -> StepScalars:
        """Return the coefficients of the stages of a part, for one of its items."""
        counts = tuple((int(one.runs), int(one.held)) for one in item.state.gates)
        step = next_step(item.state.step, item.param.device)
        return self._numbers(part, item.hypers, step, counts)

    def of(
        self, part: LeafPart, group: int, step: float | Tensor, counts: GateNumbers
    ) -> StepScalars:
        """Return the coefficients of the stages of leaves."""
        hypers = self._hypers.get((group, part.at)) or self.hypers_of(part, group)
        return self._numbers(part, hypers, step, counts)

    def _numbers(
        self, part: LeafPart, hypers: tuple[Any, ...], step: float | Tensor, counts: GateNumbers
    ) -> StepScalars:
        key = None
        if not isinstance(step, Tensor):
            key = step, counts, id(hypers), part.at
            known = self._made.get(key)
            if known is not None:
                return known
        resolved, found = [], []
        last = part.gates[-1] if counts else -1
        columns = part.at, part.stages, part.places, hypers
        for k, stage, place, given in zip(*columns, strict=True):
            own: Any = given
            at: Any = _step_of(part.gates, k, step, counts) if k <= last else step
            if not (FIXED.issuperset(map(type, own)) or is_plain(own)):
                own = self.resolved(stage, own, at, self._global_step_at(part, k, at))
            if counts and k in part.gates:
                at = counts[part.gates.index(k)][1] + 1.0
            try:
                if stage.coefficients is same_coefficients:
                    made = own
                elif stage.combine is None:
                    made = stage.coefficients(at, own)
                else:
                    shared = self.shared[place]
                    shared = _move_shared(shared, step) if isinstance(step, Tensor) else shared
                    made = stage.coefficients(at, own, shared)
            except ArithmeticError as error:
                raise coefficients_error(stage, at, own, error) from error
            resolved.append(own)
            is_fixed = hasattr(made, "_fields") and FIXED.issuperset(map(type, made))
            found.append(made if is_fixed else to_floats(checked_coefficients(stage, made)))
        both = step_scalars((tuple(resolved), tuple(found), step, Scalars.HOST))
        if key is not None:
            self._made[key] = both
        return both


def _gate_before(part: LeafPart, k: int) -> int | None:
    """Return the index of the last gate before stage ``k`` of a chain."""
    before = [place for at, place in zip(part.gates, part.gate_places, strict=True) if at < k]
    return before[-1] if before else None


def _move_shared(shared: Any, step: Tensor) -> Any:
    """Return shared scalars on the device of batched step counts."""
    moved = [one.to(step.device) if isinstance(one, Tensor) else one for one in shared]
    return type(shared)(*moved) if shared else shared


def _step_of(
    gates: Sequence[int], place: int, step: float | Tensor, counts: GateNumbers
) -> float | Tensor:
    """Return the step number of a stage: of the leaf after its last gate, else of the next gate.

    Schedules count these steps. The coefficients of a gate get the number since it last opened.
    """
    for k, gate in enumerate(gates):
        if place <= gate:
            return counts[k][0] + 1.0
    return step
