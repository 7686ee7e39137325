"""The way of leaves through their chain: where a step has to wait, and what runs in the end.

It depends on the stages, on which gradients are missing, and on the gates that open; never on a
number. So it is found out once for the same leaves, and gone along at each of their steps.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from functional_optim.core.leaf import is_measured, needs_total
from functional_optim.core.links import Links
from functional_optim.core.selectors import implies
from functional_optim.core.stage import Stage

_MOST = 16
"""How many ways on are kept at a point: late leaves may be others each time."""


class Cohort(NamedTuple):
    """Leaves that have the same stages, of which each has a gradient, or none has."""

    places: tuple[int, ...]
    """Of their stages among all links."""
    stages: tuple[Stage, ...]
    members: tuple[int, ...]
    """The places of the leaves among those of the step, in order."""
    has_gradients: bool


@dataclass(frozen=True, eq=False, slots=True)
class LeafPart:
    """Leaves at stages ``[start, stop)`` of those that they have in common."""

    start: int
    stop: int
    members: tuple[int, ...]
    """Their places among the leaves of the step, in order."""
    stages: tuple[Stage, ...]
    """These stages."""
    places: tuple[int, ...]
    """Of these among all links."""
    gates: tuple[int, ...]
    """Where the gates of the whole chain stand in it."""
    gate_places: tuple[int, ...]
    """Of these gates among all links."""
    totals: tuple[int, ...]
    """The places of the measured stages whose totals these stages are given."""


@dataclass(frozen=True, eq=False, slots=True)
class StageRun:
    """Leaves whose stages run at a step, by one call of an executor."""

    part: LeafPart
    is_late: bool
    """Whether it is what the leaves kept at a gate that goes on, or is put back."""
    is_step: bool
    """Whether every stage runs, so that the step counts."""
    gates: tuple[tuple[int, bool], ...]
    """The gates that are reached, by number, and whether each lets the leaves through."""


class _Passage(NamedTuple):
    """Leaves on their way through their chain."""

    cohort: Cohort
    members: tuple[int, ...]
    start: int
    stop: int
    """Behind the last stage that was reached, once that is known."""
    is_closed: bool
    is_late: bool
    """Whether they have no gradients of their own, and go on with what they kept at a gate."""

    @property
    def is_missing(self) -> bool:
        """Return True if they wait for a gate behind which they would be late."""
        return not (self.cohort.has_gradients or self.is_late)

    def reaches(self, place: int) -> bool:
        """Return True if they get to the stage of a link."""
        return not self.is_closed and place in self.cohort.places


@dataclass(eq=False, slots=True)
class Point:
    """A stage at which a step waits: for a total, for shared numbers, or at a gate."""

    place: int
    """Among all links."""
    stage: Stage
    parts: tuple[LeafPart, ...]
    """The leaves that reach it, up to and with it, in the order of their first ones."""
    missing: tuple[tuple[int, tuple[int, ...]], ...]
    """Of leaves without gradients that may have kept something at it: its number among the gates of
    their chain, and the leaves."""
    ways: tuple[_Passage, ...]
    behind_gates: tuple[int | None, ...]
    """The last gate before it in each chain that reaches it, by place; None where there is none."""
    closed: frozenset[int]
    """The gates that did not open on the way to it, by place."""
    after: "dict[tuple[bool, tuple[tuple[int, ...], ...]], Point | End]" = field(
        default_factory=dict
    )
    """By whether it opens, and who is late."""

    def behind(self) -> list[tuple[Stage, ...]]:
        """The stages behind it of the leaves that reach it."""
        reaching = [way.cohort for way in self.ways if way.reaches(self.place)]
        return [one.stages[one.places.index(self.place) + 1 :] for one in reaching]


@dataclass(frozen=True, eq=False, slots=True)
class End:
    """Nothing is waited for any more."""

    runs: tuple[StageRun, ...]
    """What there is to do, in the order of the first leaves."""

    @property
    def members(self) -> list[tuple[int, ...]]:
        """Return the indices of the leaves of each run."""
        return [run.part.members for run in self.runs]


class Outline:
    """The ways of the leaves of a step.

    A stage behind a closed gate does not run at all: no reduction, no ``combine``, no input that it
    needs. Whether it does is decided by the chains, and not by the leaves that have a gradient: so
    all ranks decide the same.

    Args:
        links: of the optimizer.
        cohorts: of all leaves that have a stage.
        chains: the places of each chain that a leaf has on any rank.
        shares: whether the optimizer keeps anything that belongs to no leaf.
        sharded: whether totals are summed over ranks, as those of DTensors.
    """

    def __init__(
        self,
        links: Links,
        cohorts: Sequence[Cohort],
        chains: Collection[tuple[int, ...]],
        *,
        shares: bool,
        sharded: bool,
    ) -> None:
        # Links are not kept: they have hyper-parameters.
        self._wheres, self._chains = [link.where for link in links], dict.fromkeys(chains)
        stages = self._stages = [link.stage for link in links]
        self._gates = [place for place, stage in enumerate(stages) if stage.gate is not None]
        self.cohorts = cohorts
        self.summing = [place for place, stage in enumerate(stages) if needs_total(stage)]
        """The places of the stages that need a total."""
        self.takes_inputs = any(stage.inputs for stage in stages)
        """Whether leaves are given anything beside their gradients."""
        ways = [_Passage(one, one.members, 0, 0, not one.has_gradients, False) for one in cohorts]
        self.start = self._at(0, tuple(ways), frozenset())
        stepped = [one for one in cohorts if one.has_gradients]
        waits = does_wait(stages, [one.places for one in stepped], shares=shares, sharded=sharded)
        self.plain = None if waits else End(tuple(map(_plain_run, stepped)))
        """What there is to do where a step waits for nothing but the totals of one run, which takes
        them itself; else None."""
        numbers = {place: number for number, place in enumerate(self.summing)}
        self._taken = [  # no dict: torch.compile hashes no part
            (run.part, [numbers[k] for k in run.part.places if k in numbers])
            for run in (() if self.plain is None else self.plain.runs)
        ]

    def taken(self, part: LeafPart, measured: Sequence[Any]) -> list[Any] | None:
        """Return those of the known totals that a run of a plain step takes; None for other parts.

        Args:
            part: of the run.
            measured: the totals of the first stages that need one.
        """
        for own, numbers in self._taken:
            if own is part:
                return [measured[k] for k in numbers if k < len(measured)]
        return None

    def after(
        self, point: Point, *, is_open: bool = True, late: tuple[tuple[int, ...], ...] = ()
    ) -> Point | End:
        """Return the next point or end, after a point.

        Args:
            point: that the step was at.
            is_open: whether it lets leaves through.
            late: for each entry of ``missing``, the leaves that kept something; empty for none.
        """
        found = point.after.get((is_open, late))
        if found is None:
            ways, closed = point.ways, point.closed
            if point.stage.gate is not None:
                ways = _through(point, is_open, point.stage.gate.holds, late)
                closed = closed if is_open else closed | {point.place}
            if len(point.after) >= _MOST:
                point.after.clear()
            found = point.after[is_open, late] = self._at(point.place + 1, ways, closed)
        return found

    def _at(self, place: int, ways: tuple[_Passage, ...], closed: frozenset[int]) -> Point | End:
        """The first point from a link on that is not behind closed gates."""
        for k in range(place, len(self._stages)):
            stage = self._stages[k]
            if stage.combine is None and not is_measured(stage):
                continue
            gates = [one for one in self._gates_before(k) if closed.isdisjoint(one)]
            if gates:
                last = dict.fromkeys(one[-1] if one else None for one in gates)
                return _point(k, stage, ways, (tuple(last), closed))
        return End(tuple(sorted(map(_run, filter(_runs, ways)), key=_first)))

    def _gates_before(self, place: int) -> list[tuple[int, ...]]:
        """The gates in front of a stage, in each chain that has it.

        Where no leaf has it, those of the leaves that it is meant for.
        """
        before = [gate for gate in self._gates if gate < place]
        chains = [chain for chain in self._chains if place in chain]
        if chains:
            return [tuple(gate for gate in before if gate in chain) for chain in chains]
        own = self._wheres[place]
        return [tuple(gate for gate in before if implies(own, self._wheres[gate]))]


def does_wait(
    stages: Collection[Stage],
    chains: Collection[tuple[int, ...]],
    *,
    shares: bool,
    sharded: bool = False,
) -> bool:
    """Return True if a step has to be decided before its first run.

    Args:
        stages: of all links.
        chains: the places of each chain of a leaf that is stepped.
        shares: whether the optimizer keeps anything that belongs to no leaf.
        sharded: whether totals are summed over ranks.
    """
    if shares or any(stage.inputs for stage in stages):
        return True
    return (sharded or len({*chains}) > 1) and any(map(needs_total, stages))


def _point(
    place: int,
    stage: Stage,
    ways: tuple[_Passage, ...],
    gates: tuple[tuple[int | None, ...], frozenset[int]],
) -> Point:
    parts: dict[tuple[int, tuple[int, ...]], tuple[_Passage, list[int]]] = {}
    for way in ways if needs_total(stage) else ():
        if way.reaches(place):
            key = way.start, way.cohort.places
            parts.setdefault(key, (way, []))[1].extend(way.members)
    found = [
        _part(way.cohort, way.start, way.cohort.places.index(place) + 1, sorted(members), before=1)
        for way, members in parts.values()
        if members
    ]
    missing = []
    for way in ways if stage.gate is not None and stage.gate.holds != "nothing" else ():
        if way.is_missing and place in way.cohort.places:
            at = way.cohort.places.index(place)
            missing.append((_gates(way.cohort).index(at), way.members))
    found.sort(key=lambda part: part.members[0])
    return Point(place, stage, tuple(found), tuple(missing), ways, *gates)


def _through(
    point: Point, is_open: bool, holds: str, late: tuple[tuple[int, ...], ...]
) -> tuple[_Passage, ...]:
    """The ways behind a gate."""
    made, more, place = [], [], point.place
    at_gate = iter(late)
    for way in point.ways:
        if way.reaches(place):
            stop = way.cohort.places.index(place) + 1
            made.append(way._replace(stop=stop, is_closed=not is_open))
            continue
        if late and way.is_missing and place in way.cohort.places:
            own, at = next(at_gate), way.cohort.places.index(place)
            kept = tuple(sorted({*way.members} - {*own}))
            made.append(way._replace(members=kept))
            if own:
                more.append(_Passage(way.cohort, own, at, at + 1, holds == "parameter", True))
            continue
        made.append(way)
    return *made, *more


def _runs(way: _Passage) -> bool:
    """Return True if any stage of leaves does."""
    return bool(way.members) and (way.stop > 0 or not way.is_closed)


def _plain_run(cohort: Cohort) -> StageRun:
    stop = len(cohort.stages)
    part = _part(cohort, 0, stop, cohort.members, before=stop)
    return StageRun(part, is_late=False, is_step=True, gates=())


def _run(way: _Passage) -> StageRun:
    cohort = way.cohort
    stop = way.stop if way.is_closed else len(cohort.stages)
    is_step = stop == len(cohort.stages)
    # A late leaf passes the gate at which it waited, be it only to be put back; at a later one that
    # is closed it waits again.
    passed = is_step or (way.is_late and stop == way.start + 1)
    gates = tuple(
        (k, passed or at < stop - 1)
        for k, at in enumerate(_gates(cohort))
        if way.start <= at < stop
    )
    return StageRun(_part(cohort, way.start, stop, way.members), way.is_late, is_step, gates)


def _part(
    cohort: Cohort, start: int, stop: int, members: Sequence[int], *, before: int = 0
) -> LeafPart:
    """Leaves at some stages; the last ``before`` of these are given no total."""
    stages, places = cohort.stages[start:stop], cohort.places[start:stop]
    given = zip(stages[: len(stages) - before], places, strict=False)
    totals = tuple(place for stage, place in given if is_measured(stage))
    gates = _gates(cohort)
    at_gates = tuple(map(cohort.places.__getitem__, gates))
    return LeafPart(start, stop, tuple(members), stages, places, gates, at_gates, totals)


def _gates(cohort: Cohort) -> tuple[int, ...]:
    """Return the positions of gates in the chain of leaves."""
    return tuple(at for at, stage in enumerate(cohort.stages) if stage.gate is not None)


def _first(run: StageRun) -> int:
    return run.part.members[0]
