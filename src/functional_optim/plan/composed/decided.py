"""What a step is to do, decided before anything is written.

A chain is gone through once: shared numbers are made (with the totals that they need), gates asked,
and so it is found for each leaf which of its stages run, and by which coefficients. What is left is
one run of some stages for each group of leaves that have the same.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain as joined
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_optim.core.global_step import at_global_step
from functional_optim.core.hyper import is_plain, numbers, resolve
from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.stage import Gate, Stage
from functional_optim.core.state import LeafState, Shared
from functional_optim.kernels import Executor, is_measured, needs_total
from functional_optim.plan import engine
from functional_optim.plan.composed.leaf_inputs import LeafInputs
from functional_optim.plan.composed.shared_numbers import as_all_numbers, as_number, combined
from functional_optim.plan.composed.step_leaves import (
    GateNumbers,
    Part,
    Run,
    StepLeaf,
    StepLeaves,
    gate_places,
)
from functional_optim.plan.engine import Item, Made

_NUMBERS = frozenset({float, int, bool, str, type(None)})
"""Types of what is the same at each step; asked so, it is no call for each stage."""


class Decided(NamedTuple):
    """A step that may be made."""

    runs: list[Run]
    leaves: Sequence[StepLeaf]
    grads: Sequence[Tensor | None]
    """Of these; of those that are late, zeros."""
    items: Callable[[Part], list[Item]]
    """The leaves of a run, with the state of its stages alone."""
    make: Callable[[Part, Item], Made]
    """Gives the coefficients of an item of a run."""
    numbers: Callable[[Part, float, GateNumbers], Made]
    """Gives those of leaves by the number of their step and what they counted at gates."""
    shared: list[Any]
    """The shared numbers of every link, after the step."""
    inputs: LeafInputs | None
    """What leaves are given beside their gradients; None where no stage takes anything."""


Summed = Callable[["Decider", Part, Sequence[Tensor]], Tensor]
"""What the leaves of a part add to the total of its last stage, by the totals before it."""


class _OnTheWay:
    """Leaves on their way through their chain, before anything is written."""

    __slots__ = ("chain", "is_closed", "is_late", "is_missing", "members", "start", "stop")

    def __init__(self, chain: LeafChain, members: tuple[int, ...], *, is_missing: bool) -> None:
        self.chain, self.members, self.is_missing = chain, members, is_missing
        self.start = 0
        self.stop = 0
        """Behind the last stage that was reached, once that is known."""
        self.is_closed = is_missing
        self.is_late = False
        """Whether they have no gradients of their own, and go on with what they kept at a gate."""


class Decider:
    """Decides a step.

    Args:
        links: of the optimizer, with the hyper-parameters of this step.
        executor: takes the sums of measured stages.
        leaves: all parameters of the tree; those that are frozen may be left out.
        shared: as it is before the step.
        measured: the totals of the first stages that need one, where other shards or ranks have a
            part in them: a vector for a stage that reduces.
        extra: the inputs beside the gradients, by name; those of leaves are lists.
        summed: sums up what leaves add to a total; they are taken as any step takes them without.
    """

    def __init__(
        self,
        links: Links,
        executor: Executor,
        leaves: StepLeaves,
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
        summed: Summed | None = None,
    ) -> None:
        self._links, self.executor = links, executor
        self.leaves = leaves.leaves
        self.grads = list(leaves.grads)
        """Of the leaves; of those that are late, zeros."""
        self._parts = [
            _OnTheWay(one.chain, one.members, is_missing=not one.has_gradients)
            for one in leaves.cohorts
        ]
        self._given, self._extra = list(measured), extra
        takes = any(link.stage.inputs for link in links)
        self.inputs = LeafInputs(links, self.leaves, extra) if takes else None
        is_shared = isinstance(shared, Shared)
        self._step = engine.next_step(shared.step) if is_shared else 1.0
        before = shared.stages if is_shared else ((),) * len(links)
        self._shared = as_all_numbers(before)
        self._totals: dict[int, Tensor] = {}
        self._made: dict[Any, Made] = {}
        self._summed = summed

    def decide(self) -> Decided:
        """The step.

        Raises:
            FloatingPointError, ValueError, TypeError: a stage refuses it.
        """
        for place, link in enumerate(self._links):
            if link.stage.combine is not None or is_measured(link.stage):
                self._pass(place)
        for one in self._parts:
            if not one.is_closed:
                one.stop = len(one.chain.stages)
        return Decided(
            self._runs(),
            self.leaves,
            self.grads,
            self.items,
            self.make,
            self.numbers,
            self._shared,
            self.inputs,
        )

    def total(self) -> Tensor:
        """What the leaves add to the total of the first stage that is given none."""
        place = self._pass_given()
        return self._total(place, self._reaching(place))

    def addends(self) -> tuple[list[Tensor], Tensor]:
        """What each leaf adds to that total, and what one adds that does not reach the stage.

        The totals before are given, so that no leaf looks at another one.
        """
        place = self._pass_given()
        reaching = {k: one for one in self._reaching(place) for k in one.members}
        nothing = self._total(place, [])
        alone = {k: self._total(place, [one], only=k) for k, one in reaching.items()}
        every = sorted(joined.from_iterable(one.members for one in self._parts))
        return [alone.get(k, nothing) for k in every], nothing

    def _pass_given(self) -> int:
        """The stages before the first one that needs a total and is given none; its place."""
        known = len(self._given)
        for place, link in enumerate(self._links):
            if needs_total(link.stage):
                if known == 0:
                    return place
                known -= 1
            self._pass(place)
        raise AssertionError("checked before")

    def _pass(self, place: int) -> None:
        """One stage: its total, its shared numbers, and its gate."""
        stage = self._links[place].stage
        reaching = self._reaching(place)
        totals: Sequence[Any] = ()
        if needs_total(stage):
            total = self._given.pop(0) if self._given else self._total(place, reaching)
            if stage.reduce is None:
                self._totals[place] = total
            else:
                totals = tuple(map(as_number, total.unbind()))
        if stage.combine is not None:
            hyper = self._links[place].hyper
            if not is_plain(hyper):
                hyper = self._resolved(stage, hyper, self._step)
            self._shared[place] = combined(stage, self._shared[place], totals, hyper, self._extra)
            self._made.clear()
        if stage.gate is not None:
            self._ask(place, stage.gate, reaching)

    def _resolved(self, stage: Stage, hyper: Any, step: float | Tensor) -> Any:
        """Hyper-parameters with a number for each schedule."""
        hyper = at_global_step(hyper, self._step)
        return resolve(stage.name, stage.bounds, stage.check, hyper, step)

    def _reaching(self, place: int) -> list[_OnTheWay]:
        return [one for one in self._parts if not one.is_closed and place in one.chain.places]

    def _ask(self, place: int, gate: Gate, reaching: Sequence[_OnTheWay]) -> None:
        """Close the gate, or let late leaves through."""
        is_open = gate.opens(self._shared[place])
        for one in reaching:
            one.is_closed = not is_open
            one.stop = one.chain.places.index(place) + 1
            if not is_open and self.inputs is not None and gate.holds != "nothing":
                self.inputs.refuse_held(self._links[place].stage, one.chain.stages[one.stop :])
        if not is_open or gate.holds == "nothing":
            return
        for one in list(self._parts):
            if one.is_missing and place in one.chain.places:
                self._let_late(one, one.chain.places.index(place), gate)

    def _let_late(self, missing: _OnTheWay, at: int, gate: Gate) -> None:
        """Let those through, of leaves without gradients, that keep something at an open gate."""
        number = gate_places(missing.chain.stages).index(at)
        late = [k for k in missing.members if int(self.leaves[k].state.gates[number].held)]
        if not late:
            return
        missing.members = tuple(sorted({*missing.members} - {*late}))
        for k in late:
            self.grads[k] = torch.zeros_like(self.leaves[k].param)
        part = _OnTheWay(missing.chain, tuple(late), is_missing=False)
        part.start, part.stop, part.is_late = at, at + 1, True
        part.is_closed = gate.holds == "parameter"
        self._parts.append(part)

    def _total(self, place: int, reaching: Sequence[_OnTheWay], only: int | None = None) -> Tensor:
        """The total of a stage over the leaves that reach it, or over one of them alone."""
        stage = self._links[place].stage
        found: dict[Any, tuple[LeafChain, list[int]]] = {}
        for one in reaching:
            members = one.members if only is None else (only,)
            found.setdefault((one.start, id(one.chain)), (one.chain, []))[1].extend(members)
        total: Tensor | None = None
        parts = [
            Part(chain, start, chain.places.index(place) + 1, tuple(sorted(members)))
            for (start, _), (chain, members) in found.items()
            if members
        ]
        for part in sorted(parts, key=_first):  # in the order of their first leaves
            own = self._totals_of(part._replace(stop=part.stop - 1))
            summed = self._summed  # no bound method is kept: it would hold the Decider in a ring
            more = self.add_up(part, own) if summed is None else summed(self, part, own)
            total = more if total is None else total + more.to(total.device)
        if total is None:
            shape = () if stage.reduce is None else (stage.totals,)
            return torch.zeros(shape, dtype=torch.float64, device="cpu")
        return total

    def add_up(self, part: Part, totals: Sequence[Tensor]) -> Tensor:
        """What leaves add to the total of the last stage of a part, as any step takes them."""
        make = partial(self.make, part)
        return engine.reduced(part.stages, self.executor, self.items(part), totals, make)

    def _totals_of(self, part: Part) -> tuple[Tensor, ...]:
        if not self._totals:
            return ()
        places = part.chain.places[part.start : part.stop]
        return tuple(self._totals[place] for place in places if place in self._totals)

    def items(self, part: Part) -> list[Item]:
        """The leaves of a part, with the state of its stages alone, and what these are given."""
        if self.inputs is not None:
            self.inputs.require(part)
        return [self._item(k, part) for k in part.members]

    def _item(self, member: int, part: Part) -> Item:
        leaf, grad = self.leaves[member], self.grads[member]
        assert grad is not None
        return item_at(part, leaf, grad, member, self.inputs)

    def _runs(self) -> list[Run]:
        """What there is to do, in the order of the first leaves."""
        runs = []
        for one in self._parts:
            if one.stop and one.members:
                part = Part(one.chain, one.start, one.stop, one.members)
                if self.inputs is not None:
                    self.inputs.require(part)
                runs.append(Run(part, self._totals_of(part), one.is_late))
        return runs if len(runs) == 1 else sorted(runs, key=lambda run: run.part.members[0])

    def make(self, part: Part, item: Item) -> Made:
        """The coefficients of the stages of a part, for one of its items."""
        counts = tuple((int(one.runs), int(one.held)) for one in item.state.gates)
        return self.numbers(part, engine.next_step(item.state.step), counts)

    def numbers(self, part: Part, step: float | Tensor, counts: GateNumbers) -> Made:
        """The coefficients of the stages of leaves.

        Args:
            part: of them.
            step: the number of the step to be made, where they count as one.
            counts: what they have counted at gates.
        """
        chain, start, stop, _ = part
        key = None if isinstance(step, Tensor) else (step, counts, id(chain), start, stop)
        if key is not None and key in self._made:
            return self._made[key]
        resolved, found = [], []
        gates = gate_places(chain.stages) if counts else [-1]
        for k in range(start, stop):
            stage, hyper = chain.stages[k], chain.hypers[k]
            at = _step_of(gates, k, step, counts) if k <= gates[-1] else step
            own, number = hyper, cast("Any", at)
            if not (_NUMBERS.issuperset(map(type, hyper)) or is_plain(hyper)):
                own = self._resolved(stage, hyper, at)
            more = () if stage.combine is None else (self._shared[chain.places[k]],)
            made = stage.coefficients(number, own, *more)
            resolved.append(own)
            found.append(made if _NUMBERS.issuperset(map(type, made)) else numbers(made))
        both = Made(tuple(resolved), tuple(found), step)
        if key is not None:
            self._made[key] = both
        return both


def item_at(
    part: Part, leaf: StepLeaf, grad: Tensor, member: int, inputs: LeafInputs | None
) -> Item:
    """A leaf of a part, with the state of its stages alone, and what these are given.

    Args:
        part: that runs.
        leaf: of it.
        grad: of the leaf.
        member: the place of the leaf among those of the step.
        inputs: of the step, if its stages take any.
    """
    chain, start, stop, _ = part
    states = leaf.state.stages[start:stop]
    if inputs:
        states = inputs.put(member, part.stages, states)
    own = LeafState(leaf.state.step, states, leaf.state.gates)
    return Item(leaf.param, grad, own, chain.hypers[start:stop], leaf.name)


def _first(part: Part) -> int:
    return part.members[0]


def _step_of(
    gates: Sequence[int], place: int, step: float | Tensor, counts: GateNumbers
) -> float | Tensor:
    """Which step it is for a stage: of those behind the last gate, of its gate, or its own."""
    for k, gate in enumerate(gates):
        if place == gate:
            return counts[k][1] + 1.0
        if place < gate:
            return counts[k][0] + 1.0
    return step
