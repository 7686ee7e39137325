"""Planned runs of what is composed: what was decided of a step is made by kept StepPlans.

A plan is kept by what decides what a run does: its stages, its leaves, whether they are late, and
what they are given beside gradients. The numbers of a step come from who has decided it.

What leaves are given in every step is copied to where the plan has it. What they are given now and
then is no part of a plan, so that no memory is held for it in between.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import state_tensors
from functional_optim.kernels import Executor, Leaf, ReferenceExecutor, hand_on, total_of
from functional_optim.plan.composed.decided import Decided, Decider, item_at
from functional_optim.plan.composed.leaf_inputs import copied, places_of
from functional_optim.plan.composed.step_leaves import Cohort, GateNumbers, Part, Run, StepLeaf
from functional_optim.plan.counts import Counts
from functional_optim.plan.guard import PLAIN
from functional_optim.plan.step_plan import StepPlan, Steps

_Members = tuple[int, ...]
_IS_CPU = attrgetter("is_cpu")


class _Alike(NamedTuple):
    """Leaves that have counted the same, at each gate too."""

    steps: Counts
    gates: tuple[tuple[Counts, Counts], ...]
    """Runs, and those that were held."""

    @classmethod
    def of(cls, leaves: Sequence[StepLeaf]) -> "_Alike":
        """These leaves."""
        states = [leaf.state for leaf in leaves]
        columns = zip(*(state.gates for state in states), strict=True)
        gates = [(Counts([g.runs for g in k]), Counts([g.held for g in k])) for k in columns]
        return cls(Counts([state.step for state in states]), tuple(gates))

    def read(self) -> tuple[float, GateNumbers] | None:
        """The number of the next step, and what they counted; None where they have parted.

        Nor is it known of leaves before their first step, whose state may be made anew.
        """
        made, begun = self.steps.common(), False
        found = []
        for runs, held in self.gates:
            pair = runs.common(), held.common()
            if pair[0] is None or pair[1] is None:
                return None
            begun = begun or pair[0] > 0
            found.append((pair[0], pair[1]))
        return None if made is None or not (made or begun) else (made + 1.0, tuple(found))


class Counted:
    """What leaves have counted, read together.

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
        self._classes = [_Alike.of(own) for own in classes.values()]
        self.now: list[tuple[float, GateNumbers]] = []
        """Of each such class, the number of its next step and what it has counted at gates."""

    def read(self) -> bool:
        """Whether leaves that counted the same have not parted; :attr:`now` is new then."""
        self.now = []
        for one in self._classes:
            found = one.read()
            if found is None:
                return False
            self.now.append(found)
        return True

    def at_gates(self, gates: Sequence[tuple[int, bool]]) -> None:
        """Count a run up to some gates, by what was read last.

        Args:
            gates: the number of each, and whether it lets the leaves through.
        """
        for one, (_, counts) in zip(self._classes, self.now, strict=True):
            for k, passed in gates:
                runs, held = one.gates[k]
                runs.advance()
                by = -counts[k][1] if passed else 1
                if by:
                    held.advance(by)


class _Planned(NamedTuple):
    """A run that is planned."""

    plan: StepPlan
    counted: Counted
    places: list[Tensor]
    """Where it has what its leaves are given beside their gradients."""

    def prepared(self, run: Run, decided: Decided, hypers: Any) -> Callable[[], object]:
        """What makes the run; all errors are raised now."""
        part, made = run.part, []
        if self.places and decided.inputs is not None:
            foreach_copy_(self.places, decided.inputs.of(part))
        for one in self.counted.now:  # as a rule one, and a comprehension is a call
            made.append(decided.numbers(part, *one))  # noqa: PERF401
        grads: list[Any] = list(map(decided.grads.__getitem__, part.members))
        steps = self.plan.prepared(
            grads, [hypers] * len(made), run.measured, numbers=made.__getitem__
        )
        assert steps is not None
        gates = run.gates() if self.counted.now[0][1] else []
        return partial(_make, steps, self.counted, gates) if gates else steps.make


def _make(steps: Steps, counted: Counted, gates: Sequence[tuple[int, bool]]) -> None:
    steps.make()
    counted.at_gates(gates)


class _Addends(NamedTuple):
    """Leaves that are looked at for a total."""

    leaves: Sequence[tuple[Tensor, tuple[Any, ...], str]]
    """Of each the parameter, the states of the stages, and the name."""
    counted: Counted
    kinds: Sequence[int]
    """The place among them of one of each shape and dtype that has counted the same."""


class ComposedPlans:
    """Keeps the plans of an optimizer's runs over certain leaves.

    All that is asked of it is of these leaves, as long as parameters and state are the same tensors
    and each gradient is dense and laid out as its parameter.

    Args:
        executor: that steps them.
        leaves: of all steps.
        most: how many runs are kept.
    """

    def __init__(self, executor: Executor, leaves: Sequence[StepLeaf], most: int) -> None:
        self.executor, self.leaves, self._most = executor, leaves, most
        self._runs: dict[Any, _Planned] = {}
        self._addends: dict[Any, _Addends] = {}
        self._counted: dict[_Members, Counted] = {}
        self._read: list[Counted] = []
        self._hypers: dict[tuple[int, int, int], tuple[LeafChain, tuple[Any, ...]]] = {}

    def knows(self, cohorts: Sequence[Cohort]) -> bool:
        """Whether it has been seen what those with gradients have counted, and that holds."""
        self._read = []
        for one in cohorts:
            counted = self._counted.get(one.members) if one.has_gradients else None
            if counted is not None and counted.read():
                self._read.append(counted)
            elif one.has_gradients:
                return False
        return True

    def _reads(self, counted: Counted) -> bool:
        """Whether leaves that counted the same have not parted, at this step."""
        return counted in self._read or counted.read()

    def prepared(self, decided: Decided) -> list[Callable[[], object]] | None:
        """What makes every run of a step when it is called; None where one was not planned.

        Raises:
            TypeError, ValueError, RuntimeError: a gradient that does not fit; nothing was changed.
        """
        found: list[tuple[_Planned, Run]] = []
        if decided.inputs is not None and decided.inputs.are_seldom:
            return None
        for run in decided.runs:
            one = self._runs.get(_key(run, decided))
            if one is None or not self._reads(one.counted) or not one.plan.holds():
                return None
            found.append((one, run))
        return [one.prepared(run, decided, self._hypers_of(run.part)) for one, run in found]

    def learn(self, decided: Decided) -> None:
        """Plan the runs of a step that was made, for the steps after it."""
        self._read = []
        if decided.inputs is not None and decided.inputs.are_seldom:
            return
        if len(self._runs) + len(decided.runs) > self._most:
            self._runs.clear()
            self._addends.clear()
            self._counted.clear()
        for run in decided.runs:
            key, part = _key(run, decided), run.part
            counted = self._count(part.members)
            before = self._runs.get(key)
            if before is None or before.counted is not counted or not before.plan.holds():
                grads: list[Any] = [decided.grads[k] for k in part.members]
                items = [
                    item_at(part, self.leaves[k], grad, k, decided.inputs)
                    for k, grad in zip(part.members, grads, strict=True)
                ]
                items = copied(part.stages, items)
                plan = StepPlan(
                    part.stages,
                    self.executor,
                    items,
                    counted.groups,
                    counted=run.is_step,
                    may_begin=True,
                )
                self._runs[key] = _Planned(plan, counted, places_of(part.stages, items))

    def _count(self, members: _Members) -> Counted:
        """What is counted of leaves that were stepped."""
        known = self._counted.get(members)
        if known is not None and known.read():
            return known
        self._addends.clear()
        made = self._counted[members] = Counted([self.leaves[k] for k in members])
        return made

    def summed(self, decider: Decider, part: Part, totals: Sequence[Tensor]) -> Tensor:
        """What the leaves of a part add to the total of its last stage."""
        key = part[1:]
        if decider.inputs:
            return decider.add_up(part, totals)
        found = self._addends.get(key)
        if found is None:
            found = self._looked_at(part)
        if found is None or not self._reads(found.counted):
            return decider.add_up(part, totals)
        self._addends[key] = found
        stages, counted = part.stages, found.counted
        grads: list[Any] = [decider.grads[k] for k in part.members]  # there is one of each
        made = [decider.numbers(part, *one) for one in counted.now]

        def leaf(k: int) -> Leaf:
            (param, states, name), now = found.leaves[k], made[counted.groups[k]]
            return Leaf(param, grads[k], states, now.coefficients, name, now.hypers, now.step)

        if stages[-1].reduce is None and self.executor.exact:
            before = stages[:-1]
            if not before or all(hand_on(before, leaf(k)) for k in found.kinds):
                return total_of(stages[-1], grads)
        leaves = list(map(leaf, range(len(part.members))))
        if stages[-1].reduce is None:
            return self.executor.measure(stages, leaves, totals)
        return _added(ReferenceExecutor().addends(stages, leaves, totals))

    def _looked_at(self, part: Part) -> _Addends | None:
        """The leaves of a part for its total; None of those of which it is not so simple."""
        counted = self._counted.get(part.members)
        leaves = [self.leaves[k] for k in part.members]
        if counted is None:
            return None
        own = [(one.param, one.state.stages[part.start : part.stop], one.name) for one in leaves]
        tensors = [one for param, states, _ in own for one in (param, *state_tensors(states))]
        if not is_simple(tensors) or not all(map(_IS_CPU, tensors)):
            return None
        kinds: dict[Any, int] = {}
        for k, (leaf, group) in enumerate(zip(leaves, counted.groups, strict=True)):
            kinds.setdefault((group, leaf.param.shape, leaf.param.dtype), k)
        return _Addends(own, counted, list(kinds.values()))

    def _hypers_of(self, part: Part) -> tuple[Any, ...]:
        """The hyper-parameters of the stages of a run: one object as long as they are the same."""
        chain, start, stop, members = part
        known = self._hypers.get((start, stop, members[0]))
        if known is None or known[0].hypers is not chain.hypers:
            known = self._hypers[start, stop, members[0]] = chain, chain.hypers[start:stop]
        return known[1]


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


def _key(run: Run, decided: Decided) -> Any:
    _, start, stop, members = run.part
    given = () if decided.inputs is None else decided.inputs.names
    return start, stop, run.is_late, given, members
