"""Counts of leaves: steps, and runs at gates; read together."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functional_optim._torch import foreach_add_
from functional_optim.plan.composed.step_leaves import GateNumbers, StepLeaf
from functional_optim.plan.python_loops import loops_for

_Counts = list[Tensor]
_Class = tuple[_Counts, tuple[tuple[_Counts, _Counts], ...]]
"""Of leaves that have counted the same: their steps; at each gate the runs, and those held."""


class Counted:
    """Counts of leaves, read together.

    Args:
        leaves: of one chain.
    """

    def __init__(self, leaves: Sequence[StepLeaf]) -> None:
        classes: dict[Any, list[StepLeaf]] = {}
        numbers: dict[Any, int] = {}
        self.groups: list[int] = []
        """For each leaf, the number of those that have counted the same."""
        for leaf in leaves:
            own = leaf.state
            key = (int(own.step), *((int(g.runs), int(g.held)) for g in own.gates))
            classes.setdefault(key, []).append(leaf)
            self.groups.append(numbers.setdefault(key, len(numbers)))
        self._classes = list(map(_class, classes.values()))
        self.turn: int | None = None
        """The step for which they were read."""
        self.now: list[tuple[float, GateNumbers]] = []
        """Of each such class, the number of its next step and what it has counted at gates."""

    def read(self, turn: int | None = None) -> bool:
        """Return True if leaves that counted the same have not parted; :attr:`now` is new then.

        Nor is it known of leaves before their first step, whose state may be made anew.

        Args:
            turn: a number of this step, to be kept.
        """
        found: list[tuple[float, GateNumbers]] = []
        common = loops_for(len(self.groups)).common
        for steps, gates in self._classes:
            made, begun = common(steps), False
            at_gates = []
            for runs, held in gates:
                pair = common(runs), common(held)
                if pair[0] is None or pair[1] is None:
                    return False
                begun = begun or pair[0] > 0
                at_gates.append((pair[0], pair[1]))
            if made is None or not (made or begun):
                return False
            found.append((made + 1.0, tuple(at_gates)))
        self.now, self.turn = found, turn
        return True

    def at_gates(self, gates: Sequence[tuple[int, bool]]) -> None:
        """Count a run up to some gates, by what was read last.

        Args:
            gates: the number of each, and whether it lets the leaves through.
        """
        loops = loops_for(len(self.groups))
        for (_, counts), (_, before) in zip(self._classes, self.now, strict=True):
            for k, passed in gates:
                runs, held = counts[k]
                by = -before[k][1] if passed else 1
                loops.advance_each(runs)
                if by == 1:
                    loops.advance_each(held)
                elif by:
                    foreach_add_(held, by)


def _class(leaves: Sequence[StepLeaf]) -> _Class:
    states = [leaf.state for leaf in leaves]
    columns = zip(*(state.gates for state in states), strict=True)
    gates = [([g.runs for g in k], [g.held for g in k]) for k in columns]
    return [state.step for state in states], tuple(gates)
