"""The steps of an optimizer of optimizers over leaves that stay the same tensors.

What was decided of a step is made by kept plans. A plan is kept by what decides what a run
does: its stages, its leaves, whether they are late, and what they are given beside gradients. The
numbers of a step come from who has decided it.

What leaves are given in every step is copied to where the plan has it. What they are given now and
then is no part of a plan, so that no memory is held for it in between.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_copy_
from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.kernels import Executor, needs_total
from functional_optim.plan.composed import one_step
from functional_optim.plan.composed.addends import Addends, is_simple
from functional_optim.plan.composed.counted import Counted
from functional_optim.plan.composed.decider import Decider
from functional_optim.plan.composed.leaf_inputs import copied, places_of
from functional_optim.plan.composed.outline import End, LeafPart, Outline, StageRun
from functional_optim.plan.composed.shared_numbers import Written
from functional_optim.plan.composed.step_leaves import StepLeaf, StepLeaves, storages_written
from functional_optim.plan.guard import LayoutGuard, mask_of
from functional_optim.plan.step_plan import PlannedLeaves, Steps

MASKS = 8
"""For how many sets of missing gradients steps are kept, unless told otherwise."""

RUNS = 8
"""For how many runs, for each such set, plans are kept."""

ENDS = 64
"""Of how many ends, for each such set, the plans are known: late leaves may be others each time."""


class Prepared(NamedTuple):
    """A step of which nothing is refused any more."""

    runs: list[Callable[[], object]]
    """What makes each run."""
    numbers: list[Any]
    """The shared numbers of every link, after the step."""
    opened: list[int]
    """The places of the gates that let it through."""


class _Planned(NamedTuple):
    """A run that is planned."""

    leaves: PlannedLeaves
    counted: Counted
    places: list[Tensor]
    """Where it has what its leaves are given beside their gradients."""

    def prepared(self, run: StageRun, decided: Decider) -> Callable[[], object] | None:
        """Bind the run, all errors are raised now; None if the plan does not make it."""
        part, made = run.part, []
        if self.places and decided.inputs is not None:
            foreach_copy_(self.places, decided.inputs.of(part))
        for one in self.counted.now:  # as a rule one, and a comprehension is a call
            made.append(decided.numbers(part, *one))  # noqa: PERF401
        grads: list[Any] = list(map(decided.grads.__getitem__, part.members))
        totals = decided.totals_of(part) if part.totals else ()
        steps = self.leaves.prepared(grads, (), totals, numbers=made)
        if steps is None:
            return None
        return partial(_make, steps, self.counted, run.gates) if run.gates else steps.make


def _make(steps: Steps, counted: Counted, gates: Sequence[tuple[int, bool]]) -> None:
    steps.make()
    counted.at_gates(gates)


class _Mask:
    """The steps in which the same gradients are missing.

    Args:
        outline: of them.
        chains: of each of its chains, the number among those of all steps.
        like: gradients that others have to be like, where they are summed before they are looked at
            one by one; and whether they are laid out as their parameters.
    """

    def __init__(
        self, outline: Outline, chains: list[int], like: tuple[LayoutGuard | None, bool]
    ) -> None:
        self.outline = outline
        self.chains = None if chains == list(range(len(chains))) else chains
        """Of each chain of the outline, its number among those of all steps, where it is another.
        """
        self.alike, self.sums = like
        self.counted: list[Counted] = []
        """What those with gradients have counted."""
        self.ends: dict[tuple[End, tuple[str, ...]], list[_Planned]] = {}
        """The plans of what there is to do, also by what leaves are given."""

    def are_alike(self, grads: list[Tensor | None]) -> bool:
        """Return True if gradients are; not if one cannot be asked, such as a sparse one."""
        there: list[Any] = grads
        if type(None) in map(type, grads):
            there = [one for one in grads if one is not None]
        try:
            return self.alike is None or self.alike(there)
        except RuntimeError:
            return False


class ComposedSteps:
    """Keeps what is known of the steps of certain leaves, and makes them by kept plans.

    Args:
        executor: that steps the leaves.
        leaves: of all steps; parameters and state stay these tensors.
        chains: for each leaf the number of its chain.
        masks: for how many sets of missing gradients steps are kept.
        owns_shared: whether what belongs to no leaf is written to by steps, and by torch's
            operations alone: it is then read again only where these say so.
    """

    def __init__(
        self,
        executor: Executor,
        leaves: Sequence[StepLeaf],
        chains: Sequence[int],
        *,
        masks: int = MASKS,
        owns_shared: bool = False,
    ) -> None:
        self._executor, self._leaves, self._chains = executor, leaves, chains
        self._storages = storages_written(leaves)  # leaves stay on their memory
        stages = {stage for leaf in leaves for stage in leaf.chain.stages}
        self._sums = any(map(needs_total, stages))
        self._most = masks
        self._written = Written() if owns_shared else None
        self._turn = 0
        self._forget()

    def _forget(self) -> None:
        self._masks: dict[bytes | None, _Mask] = {}
        self._runs: dict[Any, _Planned] = {}
        self._counted: dict[tuple[int, ...], Counted] = {}
        self._addends: dict[LeafPart, Addends] = {}

    def prepared(
        self,
        links: Links,
        chains: Sequence[LeafChain],
        grads: list[Tensor | None],
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
    ) -> Prepared | None:
        """A step of which nothing is refused any more; None where it was not planned.

        Args:
            links: with the hyper-parameters of now.
            chains: by their numbers, with the same.
            grads: one for each leaf.
            shared: what belongs to no leaf.
            measured: totals that are known.
            extra: the inputs beside the gradients.

        Raises:
            FloatingPointError, TypeError, ValueError, RuntimeError: as for any step; nothing was
                changed.
        """
        found = self._known(chains, grads)
        if found is None:
            return None
        known, leaves = found
        before = shared if self._written is None else self._written.before(shared)
        rows = self._rows if known.sums else None
        with torch.no_grad():
            leaves = leaves.with_gradients_apart(self._storages)
            decided = one_step.decide(links, self._executor, leaves, before, measured, extra, rows)
        plans = self._plans_of(known, decided)
        if plans is None:
            return None
        runs = []
        for one, run in zip(plans, decided.end.runs, strict=True):
            bound = one.prepared(run, decided)
            if bound is None:
                return None
            runs.append(bound)
        return Prepared(runs, decided.shared, decided.opened)

    def addends(
        self,
        links: Links,
        chains: Sequence[LeafChain],
        grads: list[Tensor | None],
        shared: Any,
        measured: Sequence[Tensor],
    ) -> tuple[list[Tensor], Tensor] | None:
        """Return each leaf's addend to the next total, and the neutral one; None without a plan.

        Args:
            links, chains, grads, shared, measured: as for :meth:`prepared`.
        """
        found = self._known(chains, grads)
        if found is None:
            return None
        rows = self._rows if found[0].sums else None
        decider = Decider(links, self._executor, found[1], shared, measured, {}, rows)
        with torch.no_grad():
            return decider.addends()

    def _known(
        self, chains: Sequence[LeafChain], grads: list[Tensor | None]
    ) -> tuple[_Mask, StepLeaves] | None:
        """Return the plans for such gradients, and the leaves of this step."""
        known = self._masks.get(mask_of(grads))
        if known is None or (known.alike is not None and not known.are_alike(grads)):
            return None
        turn = self._turn = self._turn + 1
        for counted in known.counted:
            if not counted.read(turn):
                return None
        if known.chains is not None:
            chains = [chains[number] for number in known.chains]
        return known, StepLeaves(self._leaves, grads, chains, known.outline)

    def _plans_of(self, known: _Mask, decided: Decider) -> list[_Planned] | None:
        """The plans of all that there is to do; None where one does not hold."""
        names: tuple[str, ...] = ()
        if decided.inputs is not None:
            if decided.inputs.are_seldom:
                return None
            names = decided.inputs.names
        plans = known.ends.get((decided.end, names))
        if plans is None:
            if len(known.ends) >= ENDS:
                known.ends.clear()
            found = [self._runs.get(_key(run, names)) for run in decided.end.runs]
            plans = known.ends[decided.end, names] = [one for one in found if one is not None]
        if len(plans) < len(decided.end.runs):
            return None
        for one in plans:
            counted = one.counted
            if counted.turn != self._turn and not counted.read(self._turn):
                return None
        return plans

    def make(self, prepared: Prepared, shared: Any) -> None:
        """Make a step; ``shared`` is written to."""
        one_step.make(*prepared, shared)
        if self._written is not None:
            self._written.after(shared, prepared.numbers)

    def learn(self, leaves: StepLeaves, decided: Decider) -> None:
        """Plan the steps after one that was made of these leaves."""
        pairs = zip(leaves.leaves, leaves.grads, strict=True)
        both = [(leaf.param, grad) for leaf, grad in pairs if grad is not None]
        there = [grad for _, grad in both]
        if not is_simple(there):
            return
        runs = decided.end.runs
        mask = mask_of(leaves.grads)
        if len(self._runs) + len(runs) > RUNS * self._most:
            self._forget()
        if mask not in self._masks:
            if len(self._masks) >= self._most:
                self._forget()
            is_same = all(param.stride() == grad.stride() for param, grad in both)
            like = LayoutGuard(there) if self._sums else None
            cohorts = {one.number: one for one in leaves.outline.cohorts}
            chains = [self._chains[cohorts[k].members[0]] for k in range(len(leaves.chains))]
            self._masks[mask] = _Mask(leaves.outline, chains, (like, is_same))
        for one in self._masks.values():
            one.ends.clear()
        with_gradients = [one.members for one in leaves.outline.cohorts if one.has_gradients]
        self._masks[mask].counted = list(map(self._count, with_gradients))
        if decided.inputs is None or not decided.inputs.are_seldom:
            names = () if decided.inputs is None else decided.inputs.names
            for run in runs:
                self._plan(run, names, decided)

    def _plan(self, run: StageRun, names: tuple[str, ...], decided: Decider) -> None:
        """Plan a run that was made, unless it is."""
        key, part = _key(run, names), run.part
        counted = self._count(part.members)
        before = self._runs.get(key)
        grads: list[Any] = list(map(decided.grads.__getitem__, part.members))
        if before is not None and before.counted is counted and before.leaves.takes(grads):
            return
        items = [decided.item(part, self._leaves[k], k) for k in part.members]
        items = copied(part.stages, items)
        leaves = PlannedLeaves(
            part.stages, self._executor, items, counted.groups, counted=run.is_step, may_begin=True
        )
        self._runs[key] = _Planned(leaves, counted, places_of(part.stages, items))

    def _count(self, members: tuple[int, ...]) -> Counted:
        """Return the counts of leaves that were stepped."""
        known = self._counted.get(members)
        if known is not None and known.read():
            return known
        self._addends.clear()
        made = self._counted[members] = Counted([self._leaves[k] for k in members])
        return made

    def _rows(
        self, decider: Decider, part: LeafPart, totals: Sequence[Tensor]
    ) -> Sequence[Sequence[float]] | None:
        """Return the addends of each leaf of a part."""
        found = self._looked_at(decider, part)
        return None if found is None else found.rows(decider, totals)

    def _looked_at(self, decider: Decider, part: LeafPart) -> Addends | None:
        """The leaves of a part for its total; None of those of which it is not so simple."""
        if decider.inputs:
            return None
        found = self._addends.get(part)
        if found is None:
            counted = self._counted.get(part.members)
            if counted is None:
                return None
            if len(self._addends) >= ENDS:
                self._addends.clear()
            found = self._addends[part] = Addends(part, self._leaves, counted)
        counted = found.counted
        if not found.are_simple:
            return None
        return found if counted.turn == self._turn or counted.read(self._turn) else None


def _key(run: StageRun, names: tuple[str, ...]) -> Any:
    part = run.part
    return part.start, part.stop, run.is_late, names, part.members
