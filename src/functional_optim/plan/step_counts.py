"""Step counts of leaves, and CountClasses: leaves with the same chain and the same counts."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_add_
from functional_optim.core.state import LeafState
from functional_optim.native import LOOPS
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.python_loops import loops_for
from functional_optim.plan.step_leaves import GateNumbers

Numbers = list[tuple[int, float, GateNumbers]]
"""For each class of leaves, the number of its chain, its next step, and its counts at gates."""


def stack_counts(steps: Sequence[Tensor]) -> list[Tensor]:
    """Copy step counts into one tensor, and return views of it."""
    return list(torch.stack(list(steps)).unbind()) if steps else []


def is_step_count(value: Any) -> TypeGuard[Tensor]:
    """Return True if a value is a 0-d int64 tensor on the CPU."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() == 0
        and value.is_cpu
    )


def makes_first_run(numbers: Numbers, gate: int | None) -> bool:
    """Return True if the last stages of a run have not run for some leaves.

    ``gate`` is the number of the gate at which the run ends; None if it ends with the step.
    """
    for _, step, gates in numbers:  # noqa: SIM110  a generator is two calls more
        if step == 1.0 if gate is None else gates[gate][0] == 0:
            return True
    return False


def waits_for_first_step(state: LeafState) -> bool:
    """Return True if a gate keeps something of a leaf that has made no step."""
    held = [one.held for one in state.gates]
    return any(map(int, held)) and int(state.step) == 0


class _Class(NamedTuple):
    """Positions of the counts of a class of leaves."""

    group: int
    steps: list[int]
    gates: tuple[tuple[list[int], list[int]], ...]
    """For each gate, the positions of ``runs`` and of ``held``."""


class CountClasses:
    """Classes of leaves with the same chain and the same counts. It holds no tensor."""

    def __init__(
        self, rows: Sequence[LeafPositions], groups: Sequence[int], tensors: list[Tensor]
    ) -> None:
        classes: dict[Any, list[LeafPositions]] = {}
        numbers: dict[Any, int] = {}
        self.groups: list[int] = []
        """For each leaf, the number of its class."""
        for row, group in zip(rows, groups, strict=True):
            key = (group, *[int(tensors[k]) for k in row.counts])
            classes.setdefault(key, []).append(row)
            self.groups.append(numbers.setdefault(key, len(numbers)))
        self._classes = [_class(group, own) for (group, *_), own in classes.items()]

    def read(self, tensors: list[Tensor]) -> Numbers | None:
        """Return the counts of a step; None if the counts of a class differ now."""
        found: Numbers = []
        common = (LOOPS.loaded or loops_for(len(self.groups))).common
        for group, steps, gates in self._classes:
            made = common(tensors, steps)
            at_gates = []
            for runs, held in gates:
                pair = common(tensors, runs), common(tensors, held)
                if pair[0] is None or pair[0] is False or pair[1] is None or pair[1] is False:
                    return None
                at_gates.append(pair)
            if made is None or made is False:
                return None
            found.append((group, made + 1.0, tuple(at_gates)))
        return found

    def at_gates(
        self, tensors: list[Tensor], numbers: Numbers, gates: Sequence[tuple[int, bool, bool]]
    ) -> None:
        """Update the counts at the gates of a run."""
        loops = LOOPS.loaded or loops_for(len(self.groups))
        for one, (_, _, before) in zip(self._classes, numbers, strict=True):
            for k, passed, counted in gates:
                runs, held = one.gates[k]
                by = -before[k][1] if passed else 1
                if counted:
                    loops.advance_each(tensors, runs)
                if by == 1:
                    loops.advance_each(tensors, held)
                elif by:
                    foreach_add_(list(map(tensors.__getitem__, held)), by)


def _class(group: int, rows: Sequence[LeafPositions]) -> _Class:
    columns = zip(*(row.gates for row in rows), strict=True)
    gates = [([one.runs for one in column], [one.held for one in column]) for column in columns]
    return _Class(group, [row.step for row in rows], tuple(gates))
