"""Parts of planned steps: prepared steps, runs with their plans, and the counts that they read."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress, count
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim._torch.operators import foreach_clone
from functional_optim.core.links import Links
from functional_optim.core.named_tuples import from_fields
from functional_optim.core.overrides import LeafChain
from functional_optim.kernels import Executor
from functional_optim.plan.decision import Decision
from functional_optim.plan.points import End, StageRun
from functional_optim.plan.shared_numbers import Written
from functional_optim.plan.step_counts import CountClasses, Numbers, makes_first_run
from functional_optim.plan.step_plan import BoundStep, StepPlan

COUNTS = 4
"""Number of plans that are kept for a run, one for each way in which leaves share counts."""


class PlanOptions(NamedTuple):
    """Arguments that all plans of certain leaves share."""

    executor: Executor
    numbers: Sequence[int]
    """For each leaf, the number of its chain."""
    places: Sequence[int]
    """For each leaf, its index in the tree."""
    more: Sequence[int]
    """Positions of tensors that a step writes to, and that belong to no leaf."""
    written: Written | None
    """Cache of shared scalars that only steps write to."""
    may_begin: bool
    """True if plans may make the first step of a leaf."""


class StepInputs(NamedTuple):
    """Arguments of one step of certain leaves."""

    links: Links
    chains: Sequence[LeafChain]
    """By number, with the hyper-parameters of this step."""
    tensors: list[Any]
    """Parameters, state and other listed tensors."""
    grads: list[Tensor | None]
    """For each leaf, its gradient or None."""
    shared: Any
    """The shared scalars."""
    measured: Sequence[Tensor]
    """The totals of the first stages that need a total, if they are known."""
    extra: Mapping[str, Any]
    """The inputs besides the gradients."""


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


step_inputs, prepared_step = from_fields(StepInputs), from_fields(PreparedStep)


def copy_where(tensors: list[Any], moved: Sequence[bool]) -> list[Any]:
    """Return a list with copies of some tensors."""
    found, given = tensors.copy(), list(compress(tensors, moved))
    for k, one in zip(compress(count(), moved), foreach_clone(given) if given else (), strict=True):
        found[k] = one
    return found


class StepNow:
    """Tensors of a step, with a cache of their counts."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors
        self._numbers: dict[CountClasses, Numbers | None] = {}

    def first(self, kept: Sequence[Any]) -> tuple[Any, Numbers] | None:
        """Return the first entry that fits the counts of this step, and these counts."""
        for one in kept:
            if one.counted not in self._numbers:
                self._numbers[one.counted] = one.counted.read(self.tensors)
            numbers = self._numbers[one.counted]
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
        """Bind the run and raise all errors; None if the plan does not fit."""
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
    """Bind all runs of a step, and return their functions; None if a plan does not fit."""
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
