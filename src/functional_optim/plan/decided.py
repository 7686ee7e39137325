"""What a step is to do, decided before anything is written.

A chain is gone through once: shared numbers are made (with the totals that they need), gates asked,
and so it is found for each leaf which of its stages run, and by which coefficients. What is left is
one run of some stages for each group of leaves that have the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.global_step import at_global_step
from functional_optim.core.hyper import numbers, resolve
from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.stage import Gate, Stage
from functional_optim.core.state import GateCounts, LeafState, Shared
from functional_optim.kernels import Executor, needs_total
from functional_optim.plan import engine
from functional_optim.plan.engine import Item, Made
from functional_optim.plan.shared_numbers import as_number, as_numbers, combined


class StepLeaf(NamedTuple):
    """A parameter at a step, with a gradient or without."""

    position: int
    """Among the leaves of the tree."""
    param: Tensor
    grad: Tensor | None
    state: LeafState
    chain: LeafChain
    name: str


class Run(NamedTuple):
    """Leaves whose stages ``[start, stop)`` run at this step, by one call of an executor."""

    chain: LeafChain
    start: int
    stop: int
    leaves: tuple[StepLeaf, ...]
    items: tuple[Item, ...]
    """Of these leaves, with the state of these stages alone."""
    measured: tuple[Tensor, ...]
    """The totals of the measured stages among them."""
    is_late: bool
    """Whether it is what the leaves kept at a gate that goes on, or is put back."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those that run."""
        return self.chain.stages[self.start : self.stop]

    @property
    def is_step(self) -> bool:
        """Whether every stage runs, so that the step counts."""
        return self.stop == len(self.chain.stages)

    def gates(self) -> list[tuple[int, bool]]:
        """The gates that are reached, and whether each lets the leaves through."""
        return [
            (k, self.is_late or self.is_step or place < self.stop - 1)
            for k, place in enumerate(gate_places(self.chain.stages))
            if self.start <= place < self.stop
        ]


class Decided(NamedTuple):
    """A step that may be made."""

    runs: list[Run]
    make: Callable[[Item], Made]
    """Gives the coefficients of an item."""
    shared: list[Any]
    """The shared numbers of every link, after the step."""


def gate_places(stages: Sequence[Stage]) -> list[int]:
    """Where the gates stand in a chain."""
    return [place for place, stage in enumerate(stages) if stage.gate is not None]


class _Leaf:
    """A leaf on its way through the chain, before anything is written."""

    __slots__ = ("is_closed", "is_late", "leaf", "start", "stop")

    def __init__(self, leaf: StepLeaf) -> None:
        self.leaf = leaf
        self.start = 0
        self.stop = 0
        """Behind the last stage that was reached."""
        self.is_closed = leaf.grad is None
        self.is_late = False
        """Whether it has no gradient of its own, and goes on with what it kept at a gate."""


class Decider:
    """Decides a step.

    Args:
        links: of the optimizer, with the hyper-parameters of this step.
        executor: takes the sums of measured stages.
        leaves: all parameters of the tree; those that are frozen may be left out.
        shared: as it is before the step.
        measured: the totals of the first stages that need one, where other shards or ranks have a
            part in them: a vector for a stage that reduces.
        extra: the inputs beside the gradients, by name.
    """

    def __init__(
        self,
        links: Links,
        executor: Executor,
        leaves: Sequence[StepLeaf],
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
    ) -> None:
        self._links, self._executor = links, executor
        self._leaves = [_Leaf(leaf) for leaf in leaves if leaf.chain.stages]
        self._given, self._extra = list(measured), extra
        is_shared = isinstance(shared, Shared)
        self._step = engine.next_step(shared.step) if is_shared else 1.0
        before = shared.stages if is_shared else ((),) * len(links)
        self._shared = [as_numbers(one) for one in before]
        self._totals: dict[int, Tensor] = {}
        self._made: dict[Any, Made] = {}
        self._counts: dict[int, tuple[GateCounts, ...]] = {
            id(one.leaf.state.step): one.leaf.state.gates for one in self._leaves
        }
        self._starts: dict[int, tuple[LeafChain, int]] = {}

    def decide(self) -> Decided:
        """The step.

        Raises:
            FloatingPointError, ValueError, TypeError: a stage refuses it.
        """
        for place in range(len(self._links)):
            self._pass(place)
        return Decided(self._runs(), self._make, self._shared)

    def total(self) -> Tensor:
        """What the leaves add to the total of the first stage that is given none."""
        place = self._pass_given()
        return self._summed(place, self._reaching(place))

    def addends(self) -> tuple[list[Tensor], Tensor]:
        """What each leaf adds to that total, and what one adds that does not reach the stage.

        The totals before are given, so that no leaf looks at another one.
        """
        place = self._pass_given()
        reaching = {id(one) for one in self._reaching(place)}
        nothing = self._summed(place, [])
        return [
            self._summed(place, [one]) if id(one) in reaching else nothing for one in self._leaves
        ], nothing

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
            total = self._given.pop(0) if self._given else self._summed(place, reaching)
            if stage.reduce is None:
                self._totals[place] = total
            else:
                totals = tuple(map(as_number, total.unbind()))
        if stage.combine is not None:
            self._shared[place] = combined(
                stage, self._shared[place], totals, self._hyper(place), self._extra
            )
            self._made.clear()
        for one in reaching:
            one.stop = one.leaf.chain.places.index(place) + 1
        if stage.gate is not None:
            self._ask(place, stage.gate, reaching)

    def _hyper(self, place: int) -> Any:
        stage, hyper = self._links[place][:2]
        hyper = at_global_step(hyper, self._step)
        return resolve(stage.name, stage.bounds, stage.check, hyper, self._step)

    def _reaching(self, place: int) -> list[_Leaf]:
        return [one for one in self._leaves if not one.is_closed and place in one.leaf.chain.places]

    def _ask(self, place: int, gate: Gate, reaching: Sequence[_Leaf]) -> None:
        """Close the gate, or let late leaves through."""
        is_open = gate.opens(self._shared[place])
        for one in reaching:
            one.is_closed = not is_open
        if not is_open or gate.holds == "nothing":
            return
        for one in self._leaves:
            if one.leaf.grad is None and place in one.leaf.chain.places:
                at = one.leaf.chain.places.index(place)
                gates = gate_places(one.leaf.chain.stages)
                if int(one.leaf.state.gates[gates.index(at)].held) == 0:
                    continue
                one.start, one.stop, one.is_late = at, at + 1, True
                one.leaf = one.leaf._replace(grad=torch.zeros_like(one.leaf.param))
                one.is_closed = gate.holds == "parameter"

    def _summed(self, place: int, reaching: Sequence[_Leaf]) -> Tensor:
        """The total of a stage over the leaves that reach it."""
        stage = self._links[place].stage
        total: Tensor | None = None
        for chain, start, leaves in _grouped(reaching, lambda one: one.start):
            at = chain.places.index(place)
            stages = chain.stages[start : at + 1]
            items = [self._item(leaf, start, at + 1) for leaf in leaves]
            own = self._totals_of(chain, start, at)
            one = engine.reduced(stages, self._executor, items, own, self._make)
            total = one if total is None else total + one.to(total.device)
        if total is None:
            shape = () if stage.reduce is None else (stage.totals,)
            return torch.zeros(shape, dtype=torch.float64, device="cpu")
        return total

    def _totals_of(self, chain: LeafChain, start: int, stop: int) -> tuple[Tensor, ...]:
        places = chain.places[start:stop]
        return tuple(self._totals[place] for place in places if place in self._totals)

    def _item(self, leaf: StepLeaf, start: int, stop: int) -> Item:
        assert leaf.grad is not None
        chain, state = leaf.chain, leaf.state
        self._starts[id(state.step)] = (chain, start)
        part = LeafState(state.step, state.stages[start:stop])
        return Item(leaf.param, leaf.grad, part, chain.hypers[start:stop], leaf.name)

    def _runs(self) -> list[Run]:
        """What there is to do."""
        runs = []
        reached = [one for one in self._leaves if one.stop]
        parts = _grouped(reached, lambda one: (one.start, one.stop, one.is_late))
        for chain, (start, stop, late), leaves in parts:
            items = tuple(self._item(leaf, start, stop) for leaf in leaves)
            own = self._totals_of(chain, start, stop)
            runs.append(Run(chain, start, stop, tuple(leaves), items, own, late))
        return runs

    def _make(self, item: Item) -> Made:
        """The coefficients of the stages that an item has."""
        gates = self._counts[id(item.state.step)]
        chain, start = self._starts[id(item.state.step)]
        step = engine.next_step(item.state.step)
        counts = tuple((int(one.runs), int(one.held)) for one in gates)
        count = len(item.hypers)
        key = None if isinstance(step, Tensor) else (step, counts, id(chain), start, count)
        if key is None or key not in self._made:
            resolved, found = [], []
            for k in range(start, start + count):
                stage, hyper = chain.stages[k], at_global_step(chain.hypers[k], self._step)
                at = _step_of(chain.stages, k, step, counts)
                own = resolve(stage.name, stage.bounds, stage.check, hyper, at)
                number: Any = at
                more = () if stage.combine is None else (self._shared[chain.places[k]],)
                resolved.append(own)
                found.append(numbers(stage.coefficients(number, own, *more)))
            made = Made(tuple(resolved), tuple(found), step)
            if key is None:
                return made
            self._made[key] = made
        return self._made[key]


def _step_of(
    stages: Sequence[Stage], place: int, step: float | Tensor, counts: Sequence[tuple[int, int]]
) -> float | Tensor:
    """Which step it is for a stage: of those behind the last gate, of its gate, or its own."""
    gates = gate_places(stages)
    for k, gate in enumerate(gates):
        if place == gate:
            return counts[k][1] + 1.0
        if place < gate:
            return counts[k][0] + 1.0
    return step


def _grouped(
    leaves: Sequence[_Leaf], part: Callable[[_Leaf], Any]
) -> list[tuple[LeafChain, Any, list[StepLeaf]]]:
    """Leaves that have a chain, and a part of it, in common."""
    groups: dict[Any, tuple[LeafChain, Any, list[StepLeaf]]] = {}
    for one in leaves:
        chain, own = one.leaf.chain, part(one)
        groups.setdefault((id(chain), own), (chain, own, []))[2].append(one.leaf)
    return list(groups.values())
