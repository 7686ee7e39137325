"""Points of a step: the stages at which it waits, and the runs that follow from them.

Points and runs depend on the stages, on the missing gradients, and on the gates that open, never on
other values. So they are computed once for the same leaves, and looked up in later steps.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from functional_optim.core.leaf import is_measured, needs_total
from functional_optim.core.links import Links
from functional_optim.core.selectors import implies
from functional_optim.core.stage import Stage

_MOST = 16
"""Number of successors that a point keeps: late leaves may differ in each step."""


class Cohort(NamedTuple):
    """Leaves with the same stages. Either all of them have a gradient, or none."""

    places: tuple[int, ...]
    """The indices of their stages among all links."""
    stages: tuple[Stage, ...]
    members: tuple[int, ...]
    """The indices of the leaves among the leaves of the step, in order."""
    has_gradients: bool


@dataclass(frozen=True, eq=False, slots=True)
class LeafPart:
    """Leaves with the same chain, and some stages of that chain, in order."""

    at: tuple[int, ...]
    """The indices of these stages in the chain."""
    members: tuple[int, ...]
    """The indices of the leaves among the leaves of the step, in order."""
    stages: tuple[Stage, ...]
    """The stages."""
    places: tuple[int, ...]
    """The indices of these stages among all links."""
    gates: tuple[int, ...]
    """The indices of all gates of the chain among its stages."""
    gate_places: tuple[int, ...]
    """The indices of these gates among all links."""
    totals: tuple[int, ...]
    """The indices, among all links, of the measured stages whose totals these stages get."""


@dataclass(frozen=True, eq=False, slots=True)
class StageRun:
    """Leaves and stages that run in one call of an executor."""

    part: LeafPart
    is_step: bool
    """True if the run includes the last stage, so that the step counts increase."""
    gates: tuple[tuple[int, bool, bool], ...]
    """The gates in the run: the number of each, True if the leaves pass it, and True if the stages
    before it run. They do not run for late leaves at the gates at which these waited."""


class _Passage(NamedTuple):
    """Leaves, and how far they have got in their chain."""

    cohort: Cohort
    members: tuple[int, ...]
    start: int
    stop: int
    """The index after the last stage that runs, once it is known."""
    is_closed: bool
    is_late: bool = False
    """True if the leaves have no gradient, and continue with the gradient that a gate kept."""
    restored: tuple[int, ...] = ()
    """Of leaves without a gradient, the indices of the gates that restore the parameter. These
    stages run before stage ``start``. The leaves may still wait at later gates."""

    def waits_at(self, place: int, closed: frozenset[int]) -> bool:
        """Return True if the gate of a link may have kept something of these leaves.

        The leaves have no gradient, no gate gave them an earlier one, and none of their gates
        before this one is closed.
        """
        if self.cohort.has_gradients or self.is_late or place not in self.cohort.places:
            return False
        return closed.isdisjoint(self.cohort.places[: self.cohort.places.index(place)])

    def reaches(self, place: int) -> bool:
        """Return True if the leaves reach the stage of a link."""
        return not self.is_closed and place in self.cohort.places

    def stages_to(self, stop: int) -> tuple[int, ...]:
        """Return the indices of the stages that run, before stage ``stop``."""
        return *self.restored, *range(self.start, stop)


@dataclass(eq=False, slots=True)
class Point:
    """Stage at which a step waits: for a total, for shared scalars, or at a gate."""

    place: int
    """The index of the stage among all links."""
    stage: Stage
    parts: tuple[LeafPart, ...]
    """The leaves that reach the stage, with their stages up to this one, ordered by first leaf."""
    missing: tuple[tuple[int, tuple[int, ...]], ...]
    """Leaves without gradients for which this gate may have kept a gradient: the number of the gate
    in their chain, and the leaves."""
    ways: tuple[_Passage, ...]
    behind_gates: tuple[int | None, ...]
    """For each chain with this stage, the index of the last gate before it, or None."""
    closed: frozenset[int]
    """The indices of the gates before it that did not open."""
    after: "dict[tuple[bool, tuple[tuple[int, ...], ...]], Point | End]" = field(
        default_factory=dict
    )
    """The next point or End, by the state of the gate and by the late leaves."""

    def behind(self) -> list[tuple[Stage, ...]]:
        """Return the stages after this point, for each cohort that has it."""
        reaching = [way.cohort for way in self.ways if way.reaches(self.place)]
        return [one.stages[one.places.index(self.place) + 1 :] for one in reaching]


@dataclass(frozen=True, eq=False, slots=True)
class End:
    """End of a Decision: the step waits for nothing more."""

    runs: tuple[StageRun, ...]
    """The runs of the step, ordered by first leaf."""

    @property
    def members(self) -> list[tuple[int, ...]]:
        """Return the indices of the leaves of each run."""
        return [run.part.members for run in self.runs]


class Outline:
    """Points of the steps of certain leaves.

    A stage after a closed gate does not run at all: no reduction, no ``combine``, no required
    input. This depends on the chains, and not on the leaves that have a gradient. So all ranks
    decide the same.

    Args:
        cohorts: of all leaves that have a stage.
        chains: for each chain of a leaf on any rank, the indices of its links.
        shares: True if the optimizer has shared scalars.
        sharded: True if totals are summed over ranks, as for DTensors.
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
        """The indices of the stages that need a total."""
        self.takes_inputs = any(stage.inputs for stage in stages)
        """True if a stage takes inputs per leaf."""
        ways = [_Passage(one, one.members, 0, 0, not one.has_gradients) for one in cohorts]
        self.start = self._at(0, tuple(ways), frozenset())
        stepped = [one for one in cohorts if one.has_gradients]
        waits = does_wait(stages, [one.places for one in stepped], shares=shares, sharded=sharded)
        self.plain = None if waits else End(tuple(map(_plain_run, stepped)))
        """The runs of a plain step, which computes its totals in its runs; None for other steps."""
        numbers = {place: number for number, place in enumerate(self.summing)}
        self._taken = [  # no dict: torch.compile hashes no part
            (run.part, [numbers[k] for k in run.part.places if k in numbers])
            for run in (() if self.plain is None else self.plain.runs)
        ]

    def taken(self, part: LeafPart, measured: Sequence[Any]) -> list[Any] | None:
        """Return the known totals that a run of a plain step needs; None for other parts."""
        for own, numbers in self._taken:
            if own is part:
                return [measured[k] for k in numbers if k < len(measured)]
        return None

    def after(
        self, point: Point, *, is_open: bool = True, late: tuple[tuple[int, ...], ...] = ()
    ) -> Point | End:
        """Return the next point or end, after a point, which is a closed gate unless ``is_open``.

        ``late`` has for each entry of ``missing`` the leaves for which the gate kept a gradient; it
        is empty if there are none.
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
        """Return the first point from a link on that is not after a closed gate; else the End."""
        for k in range(place, len(self._stages)):
            stage = self._stages[k]
            if stage.combine is None and not is_measured(stage):
                continue
            gates = [one for one in self._gates_before(k) if closed.isdisjoint(one)]
            if gates:
                last = dict.fromkeys(one[-1] if one else None for one in gates)
                return _point(k, stage, ways, (tuple(last), closed))
        return End(tuple(sorted([_run(way) for way in ways if _runs(way)], key=_first)))

    def _gates_before(self, place: int) -> list[tuple[int, ...]]:
        """Return the gates before a stage, for each chain with this stage.

        If no leaf has the stage, return the gates that select all of its leaves.
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
    """Return True if a step needs a Decision before its first run.

    ``chains`` has the indices of the links for each chain of a stepped leaf; ``sharded`` is True if
    totals are summed over ranks, as for DTensors.
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
    parts: dict[tuple[tuple[int, ...], ...], tuple[_Passage, list[int]]] = {}
    for way in ways if needs_total(stage) else ():
        if way.reaches(place):
            at = way.stages_to(way.cohort.places.index(place) + 1)
            parts.setdefault((at, way.cohort.places), (way, []))[1].extend(way.members)
    found = [
        _part(way.cohort, at, sorted(members), before=1)
        for (at, _), (way, members) in parts.items()
        if members
    ]
    missing = []
    for way in ways if stage.gate is not None and stage.gate.holds != "nothing" else ():
        if way.waits_at(place, gates[1]):
            number = _gates(way.cohort).index(way.cohort.places.index(place))
            missing.append((number, way.members))
    found.sort(key=lambda part: part.members[0])
    return Point(place, stage, tuple(found), tuple(missing), ways, *gates)


def _through(
    point: Point, is_open: bool, holds: str, late: tuple[tuple[int, ...], ...]
) -> tuple[_Passage, ...]:
    """Return the passages after a gate."""
    made, more, place = [], [], point.place
    at_gate = iter(late)
    for way in point.ways:
        if way.reaches(place):
            stop = way.cohort.places.index(place) + 1
            made.append(way._replace(stop=stop, is_closed=not is_open))
            continue
        if late and way.waits_at(place, point.closed):
            own, at = next(at_gate), way.cohort.places.index(place)
            kept = tuple(sorted({*way.members} - {*own}))
            made.append(way._replace(members=kept))
            late_way = way._replace(members=own)
            if own and holds == "parameter":
                more.append(late_way._replace(restored=(*way.restored, at)))
            elif own:
                more.append(late_way._replace(start=at, stop=at + 1, is_closed=False, is_late=True))
            continue
        made.append(way)
    return *made, *more


def _runs(way: _Passage) -> bool:
    """Return True if any stage of these leaves runs."""
    return bool(way.members) and (way.stop > 0 or not way.is_closed or bool(way.restored))


def _plain_run(cohort: Cohort) -> StageRun:
    stop = len(cohort.stages)
    part = _part(cohort, tuple(range(stop)), cohort.members, before=stop)
    return StageRun(part, is_step=True, gates=())


def _run(way: _Passage) -> StageRun:
    cohort = way.cohort
    at = way.stages_to(way.stop if way.is_closed else len(cohort.stages))
    last = at[-1]
    is_step = last == len(cohort.stages) - 1
    # Late leaves pass the gates at which they waited. They may wait again at a later closed gate.
    waited = (*way.restored, way.start) if way.is_late else way.restored
    gates = tuple(
        (k, is_step or one < last or one in waited, one not in waited)
        for k, one in enumerate(_gates(cohort))
        if one in at
    )
    return StageRun(_part(cohort, at, way.members), is_step, gates)


def _part(
    cohort: Cohort, at: tuple[int, ...], members: Sequence[int], *, before: int = 0
) -> LeafPart:
    """Return leaves at some stages. The last ``before`` stages get no total."""
    stages = tuple(map(cohort.stages.__getitem__, at))
    places = tuple(map(cohort.places.__getitem__, at))
    given = zip(stages[: len(stages) - before], places, strict=False)
    totals = tuple(place for stage, place in given if is_measured(stage))
    gates = _gates(cohort)
    at_gates = tuple(map(cohort.places.__getitem__, gates))
    return LeafPart(at, tuple(members), stages, places, gates, at_gates, totals)


def _gates(cohort: Cohort) -> tuple[int, ...]:
    """Return the indices of the gates in the chain of leaves."""
    return tuple(at for at, stage in enumerate(cohort.stages) if stage.gate is not None)


def _first(run: StageRun) -> int:
    return run.part.members[0]
