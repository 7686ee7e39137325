"""Planned runs of composed steps, and what they read of the tensors of a step."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, count
from typing import Any, NamedTuple

from functional_optim._torch import foreach_clone
from functional_optim.plan.count_classes import Counted, Numbers, makes_first_step
from functional_optim.plan.decision import Decision
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.points import End, Outline, StageRun
from functional_optim.plan.step_layout import StepLayout
from functional_optim.plan.step_plan import StepPlan, Steps

ENDS = 64
"""Of how many ends, for each set of missing gradients, the plans are known: late leaves may be
others each time."""


class Prepared(NamedTuple):
    """A step of which nothing is refused any more."""

    runs: Sequence[Callable[[], object]]
    """What makes each run."""
    numbers: Sequence[Any]
    """The shared numbers of every link, after the step; none where the step waits for nothing."""
    opened: Sequence[int]
    """The places of the gates that let it through."""
    tensors: list[Any]
    """The list of the step: of a pure one, with copies of what it writes to."""
    kept: Sequence[int]
    """Of a pure step, the leaves that it leaves alone."""
    end: End
    """What there is to do."""


def copied_where(tensors: list[Any], moved: Sequence[bool]) -> list[Any]:
    """Return a list with copies of some tensors.

    Args:
        tensors: the list of a step.
        moved: for each, whether it is copied; those behind the last are not.
    """
    found, given = tensors.copy(), list(compress(tensors, moved))
    for k, one in zip(compress(count(), moved), foreach_clone(given) if given else (), strict=True):
        found[k] = one
    return found


class StepNow:
    """The tensors of a step, and what was read of their counts.

    Args:
        tensors: the list of the step.
        may_begin: as for :class:`PlannedSteps`.
    """

    def __init__(self, tensors: list[Any], *, may_begin: bool) -> None:
        self.tensors, self._may_begin = tensors, may_begin
        self._numbers: dict[Counted, Numbers | None] = {}

    def numbers(self, counted: Counted) -> Numbers | None:
        """Return what leaves have counted; None if those that counted the same have parted."""
        if counted not in self._numbers:
            found = counted.read(self.tensors, may_begin=self._may_begin)
            self._numbers[counted] = found
        return self._numbers[counted]

    def first(self, kept: Sequence[Any]) -> Any:
        """Return the first that was kept for what leaves have counted; None if there is none."""
        for one in kept:
            if self.numbers(one.counted) is not None:
                return one
        return None


class PlannedRun(NamedTuple):
    """A run that is planned."""

    counted: Counted
    plan: StepPlan
    has_inputs: bool

    def prepared(
        self, run: StageRun, decided: Decision, tensors: list[Any], numbers: Numbers
    ) -> Callable[[], object] | None:
        """Bind the run, all errors are raised now; None if the plan does not make it.

        Args:
            run: to be made.
            decided: what is to be done.
            tensors: the list of the step.
            numbers: what the leaves have counted.
        """
        part, made = run.part, []
        if self.has_inputs and decided.inputs is not None:
            tensors = [*tensors, *decided.inputs.copies(part)]
        for one in numbers:  # as a rule one, and a comprehension is a call
            made.append(decided.numbers.of(part, *one))  # noqa: PERF401
        totals = decided.totals_of(part) if part.totals else ()
        steps = self.plan.prepared(tensors, (), totals, numbers=made)
        if steps is None:
            return None
        return partial(_make, steps, self.counted, numbers, run.gates) if run.gates else steps.make


def _make(
    steps: Steps, counted: Counted, numbers: Numbers, gates: Sequence[tuple[int, bool]]
) -> None:
    steps.make()
    counted.at_gates(steps.tensors, numbers, gates)


def bound_runs(
    plans: Sequence[PlannedRun],
    decided: Decision,
    tensors: list[Any],
    now: StepNow,
    *,
    may_begin: bool,
) -> list[Callable[[], object]] | None:
    """Bind what makes each run; None if a plan does not make one of them.

    Args:
        plans: of the runs.
        decided: what is to be done.
        tensors: the list of the step.
        now: what the leaves have counted.
        may_begin: whether the state of leaves before their first step is known to be as it is.
    """
    runs = []
    for one, run in zip(plans, decided.end.runs, strict=True):
        numbers = now.numbers(one.counted)
        if numbers is None or (run.is_step and not may_begin and makes_first_step(numbers)):
            return None  # in a first step, state may be made anew
        bound = one.prepared(run, decided, tensors, numbers)
        if bound is None:
            return None
        runs.append(bound)
    return runs


class Counts(NamedTuple):
    """A way in which leaves have counted."""

    counted: Counted


class Mask:
    """The steps in which the same gradients are missing.

    Args:
        outline: of them.
        layout: of all tensors.
        sums: whether leaves may be summed up together: gradients are laid out as parameters.
    """

    def __init__(self, outline: Outline, layout: StepLayout, *, sums: bool) -> None:
        self.outline, self.layout, self.sums = outline, layout, sums
        self.counts: list[list[Counts]] = []
        """What those with gradients have counted."""
        self.ends: dict[tuple[End, tuple[str, ...]], list[list[PlannedRun]]] = {}
        """The plans of what there is to do, also by what leaves are given."""
        self._copied: dict[End, tuple[list[bool], list[int]]] = {}

    def copied(
        self, end: End, rows: Sequence[LeafPositions], count: int
    ) -> tuple[list[bool], list[int]]:
        """Return which tensors a pure step copies, and which leaves it leaves alone.

        Args:
            end: what there is to do.
            rows: for each leaf, the positions of its tensors.
            count: number of tensors.
        """
        found = self._copied.get(end)
        if found is None:
            if len(self._copied) >= ENDS:
                self._copied.clear()
            own = {k for run in end.runs for k in run.part.members}
            moved = {k for row in map(rows.__getitem__, own) for k in row.kept}
            kept = [k for k in range(len(rows)) if k not in own]
            found = self._copied[end] = [k in moved for k in range(count)], kept
        return found
