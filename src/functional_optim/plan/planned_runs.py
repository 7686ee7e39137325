"""Planned runs of steps that need a Decision, and the counts that they read."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress, count
from typing import Any, NamedTuple, Protocol, TypeVar

from functional_optim._torch import foreach_clone
from functional_optim.core.fields import from_fields
from functional_optim.plan.decision import Decision
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.list_layout import StepLayout
from functional_optim.plan.points import End, LeafPart, Outline, StageRun
from functional_optim.plan.step_counts import CountClasses, Numbers, makes_first_run
from functional_optim.plan.step_plan import BoundStep, StepPlan

ENDS = 64
"""Number of Ends, for each set of missing gradients, whose plans are kept: late leaves may differ
in each step."""

USES = count(1)
"""Clock of the uses of plans, by which the least recently used plans are found."""


class _Used(Protocol):
    used: int


M = TypeVar("M", bound=_Used)


def drop_least_used(masks: Mapping[bytes | None, M], but: bytes | None) -> dict[bytes | None, M]:
    """Return plans by missing gradients, without those that have not been used for longest.

    Args:
        but: the missing gradients whose plans are not dropped.
    """
    least = min((one for one in masks if one != but), key=lambda one: masks[one].used)
    return {mask: one for mask, one in masks.items() if mask != least}


class PreparedStep(NamedTuple):
    """Validated step, ready to run."""

    runs: Sequence[Callable[[], object]]
    """The function of each run."""
    numbers: Sequence[Any]
    """The shared scalars of every link after the step; empty for a plain step."""
    opened: Sequence[int]
    """The indices of the gates that opened."""
    tensors: list[Any]
    """The list of the step. In a pure step, the written tensors are copies."""
    kept: Sequence[int]
    """Of a pure step, the leaves that it does not change."""
    end: End
    """The runs of the step."""


prepared_step = from_fields(PreparedStep)


def copy_where(tensors: list[Any], moved: Sequence[bool]) -> list[Any]:
    """Return a list with copies of some tensors.

    Args:
        moved: for each tensor, True to copy it. Tensors after the end of ``moved`` are not copied.
    """
    found, given = tensors.copy(), list(compress(tensors, moved))
    for k, one in zip(compress(count(), moved), foreach_clone(given) if given else (), strict=True):
        found[k] = one
    return found


class StepNow:
    """Tensors of a step, with a cache of their counts."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        self._numbers: dict[CountClasses, Numbers | None] = {}

    def numbers(self, counted: CountClasses) -> Numbers | None:
        """Return the counts of leaves; None if the counts of a class differ now."""
        if counted not in self._numbers:
            found = counted.read(self.tensors)
            self._numbers[counted] = found
        return self._numbers[counted]

    def first(self, kept: Sequence[Any]) -> tuple[Any, Numbers] | None:
        """Return the first entry that fits the counts of this step, and these counts."""
        for one in kept:
            numbers = self._numbers.get(one.counted) or self.numbers(one.counted)
            if numbers is not None:
                return one, numbers
        return None


class PlannedRun(NamedTuple):
    """Run with its plan."""

    counted: CountClasses
    plan: StepPlan
    has_inputs: bool

    def prepare(
        self, run: StageRun, decided: Decision, tensors: list[Any], numbers: Numbers
    ) -> Callable[[], object] | None:
        """Bind the run and raise all errors; None if the plan does not fit.

        Args:
            run: to be bound.
        """
        part, made = run.part, []
        if self.has_inputs and decided.inputs is not None:
            tensors = [*tensors, *decided.inputs.copies(part)]
        for one in numbers:  # as a rule one, and a comprehension is a call
            made.append(decided.numbers.of(part, *one))  # noqa: PERF401
        totals = decided.totals_of(part) if part.totals else ()
        steps = self.plan.prepare(tensors, (), totals, numbers=made)
        if steps is None:
            return None
        return partial(_run, steps, self.counted, numbers, run.gates) if run.gates else steps.run


def _run(
    steps: BoundStep,
    counted: CountClasses,
    numbers: Numbers,
    gates: Sequence[tuple[int, bool, bool]],
) -> None:
    steps.run()
    counted.at_gates(steps.tensors, numbers, gates)


def bind_runs(
    plans: Sequence[tuple[PlannedRun, Numbers]],
    decided: Decision,
    tensors: list[Any],
    *,
    may_begin: bool,
) -> list[Callable[[], object]] | None:
    """Bind all runs of a step, and return their functions; None if a plan does not fit.

    Args:
        plans: the plan of each run, and the counts of its leaves.
        may_begin: True if the state of leaves before their first step is valid.
    """
    runs = []
    for (one, numbers), run in zip(plans, decided.end.runs, strict=True):
        gate = None if run.is_step else run.gates[-1][0]
        if not may_begin and makes_first_run(numbers, gate):
            return None  # before stages first run, their state may have to be created again
        bound = one.prepare(run, decided, tensors, numbers)
        if bound is None:
            return None
        runs.append(bound)
    return runs


class Counts(NamedTuple):
    """Count classes of leaves, as an entry of a cache."""

    counted: CountClasses


class Mask:
    """Known steps with the same missing gradients.

    Args:
        layout: of all tensors.
        sums: True if leaves may be reduced together: gradients have the strides of parameters.
        on_cuda: True if a parameter is on a CUDA device: a step must not be captured there.
    """

    def __init__(self, outline: Outline, layout: StepLayout, *, sums: bool, on_cuda: bool) -> None:
        self.outline, self.layout, self.sums, self.on_cuda = outline, layout, sums, on_cuda
        self.counts: list[list[Counts]] = []
        """The count classes of the leaves with gradients."""
        self.ends: dict[tuple[End, tuple[str, ...]], list[list[PlannedRun]]] = {}
        """The plans of all runs, by End and by the names of the inputs of leaves."""
        self.runs: dict[Any, list[PlannedRun]] = {}
        """The plans of each run, the latest first."""
        self.counts_of: dict[tuple[int, ...], list[Counts]] = {}
        """The count classes of the leaves of each cohort and run, the latest first."""
        self.addends: dict[LeafPart, list[Any]] = {}
        """What leaves add to totals, for each part of the leaves."""
        self.used = next(USES)
        """Time of the last use."""
        self._copied: dict[End, tuple[list[bool], list[int]]] = {}

    def copied(
        self, end: End, rows: Sequence[LeafPositions], count: int
    ) -> tuple[list[bool], list[int]]:
        """Return which tensors a pure step copies, and which leaves it does not change.

        Args:
            rows: for each leaf, the positions of its tensors.
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
