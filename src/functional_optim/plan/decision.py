"""Decision of a step, before anything is written.

A Decision visits the points of a step in order: it computes totals and shared scalars, and asks the
gates. The result says which stages of which leaves run, and with which coefficients. Leaves with
the same stages are one run.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.dtensors import is_dtensor
from functional_optim.core.hyper import FIXED, is_plain
from functional_optim.core.links import Links
from functional_optim.core.local_shards import RankSums
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState
from functional_optim.kernels import Executor
from functional_optim.kernels.totals import add_in_order
from functional_optim.plan import reduction
from functional_optim.plan.item import Item
from functional_optim.plan.leaf_inputs import LeafInputs
from functional_optim.plan.points import End, LeafPart, Point
from functional_optim.plan.shared_numbers import as_numbers_of, combined, with_common_hypers
from functional_optim.plan.step_leaves import StepLeaf, StepLeaves
from functional_optim.plan.step_numbers import StepNumbers

Rows = Callable[["Decision", LeafPart, Sequence[Tensor]], "Sequence[Sequence[float]] | None"]
"""Function that returns what each leaf of a part adds to the totals of its last stage.

Arguments: the decision, the part, and the totals of the stages before. It returns None if each leaf
must be reduced alone.
"""


_NOTHING = End(())


class Decision:
    """Decision of one step: its totals, its shared scalars, its gates, and its runs.

    Args:
        links: of the optimizer, with the hyper-parameters of this step.
        executor: computes the totals.
        leaves: all parameters of the tree; frozen parameters may be omitted.
        shared: the shared scalars before the step.
        measured: the totals of the first stages that need a total, if other shards or ranks
            contribute to them: a vector for a stage with ``reduce``.
        extra: the inputs besides the gradients, by name; inputs per leaf are lists.
        rows: function that returns the addends of many leaves at once, or None if it cannot.
            Without this function, leaves are reduced one by one.
    """

    def __init__(
        self,
        links: Links,
        executor: Executor,
        leaves: StepLeaves,
        shared: Any,
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
        rows: Rows | None = None,
    ) -> None:
        self._outline = leaves.outline
        self._links = with_common_hypers(links, leaves.chains)
        self.executor = executor
        self._step = leaves
        self.leaves = leaves.leaves
        self.grads = leaves.grads
        """The gradient of each leaf; zeros for late leaves."""
        summing = self._outline.summing
        self._measured = tuple(measured)
        self._given = dict(zip(summing, measured, strict=False))
        """The known totals, by the index of the stage."""
        self._next = summing[len(measured)] if len(measured) < len(summing) else None
        """The index of the first stage whose total is not known."""
        self._extra = extra
        self.inputs: LeafInputs | None = None
        """The inputs of leaves; None if no stage takes inputs per leaf."""
        if self._outline.takes_inputs:
            self.inputs = LeafInputs(links, self.leaves, extra)
        self.numbers = StepNumbers(leaves, shared, len(links))
        self.shared = self.numbers.shared
        """The shared scalars of every link; after ``decide()``, those after the step."""
        self.opened: list[int] = []
        """The indices of the gates that opened."""
        self.end = _NOTHING
        """The runs, after ``decide()``: the same object for the same leaves and gates."""
        self._totals: dict[int, Tensor] = {}
        self._rows = rows

    def decide(self) -> "Decision":
        """Decide the step."""
        at: Point | End = self._outline.plain or self._outline.start
        while isinstance(at, Point):
            at = self._pass_point(at)
        self.end = at
        if self.inputs is not None:
            for run in at.runs:
                self.inputs.require(run.part)
        return self

    @property
    def stepped(self) -> list[StepLeaf]:
        """The leaves that the step may write to."""
        return self._step.stepped

    def total(self) -> Tensor:
        """Return what the leaves add to the total of the first stage whose total is not known.

        Return zero if that stage is after a closed gate.
        """
        point = self._first_unknown()
        if point is None:
            return self._zero_of_next()
        return _as_tensor(point.stage, self._total(point))

    def addends(self) -> tuple[list[Tensor], Tensor]:
        """Return each leaf's addend to the total, and a zero for leaves without an addend.

        The totals of all earlier stages must be known, so that no addend depends on another leaf.
        """
        point, zero = self._first_unknown(), self._zero_of_next()
        addends: dict[int, Tensor] = {}
        for part in () if point is None else point.parts:
            rows = self._rows_of(part)
            if rows is None:
                assert point is not None
                addends |= {k: self._summed(point, only=k) for k in part.members}
                continue
            found = torch.tensor(rows, dtype=torch.float64, device="cpu")
            found = found[:, 0] if zero.dim() == 0 else found
            addends |= dict(zip(part.members, found.unbind(), strict=True))
        every = sorted(k for one in self._outline.cohorts for k in one.members)
        return [addends.get(k, zero) for k in every], zero

    def _first_unknown(self) -> Point | None:
        """Return the point of the first unknown total; None if it is after a closed gate."""
        assert self._next is not None, "checked before"
        at = self._outline.start
        while isinstance(at, Point) and at.place < self._next:
            at = self._pass_point(at)
        return at if isinstance(at, Point) and at.place == self._next else None

    def _zero_of_next(self) -> Tensor:
        assert self._next is not None, "checked before"
        return reduction.zero_total(self._links[self._next].stage)

    def _pass_point(self, point: Point) -> Point | End:
        """Compute the total and shared scalars of a stage, ask its gate, return the next point."""
        stage, place = point.stage, point.place
        totals: Sequence[Any] = ()
        if place in self._outline.summing:
            given = self._given.get(place)
            total = self._total(point) if given is None else given
            if stage.reduce is None:
                self._totals[place] = _as_tensor(stage, total)
            else:  # shared scalars are on the CPU
                totals = total if isinstance(total, tuple) else as_numbers_of(total.cpu())
        if stage.combine is not None:
            hyper = self._links[place].hyper
            if not (FIXED.issuperset(map(type, hyper)) or is_plain(hyper)):
                at = self.numbers.latest_step(point.behind_gates)
                hyper = self.numbers.resolved(stage, hyper, at, at)
            made = combined(stage, self.shared[place], totals, hyper, self._extra)
            self.numbers.share(place, made)
        return self._outline.after(point) if stage.gate is None else self._pass_gate(point)

    def _pass_gate(self, point: Point) -> Point | End:
        """Return the next point after a gate, and add the late leaves that it lets through."""
        gate = point.stage.gate
        assert gate is not None
        is_open = gate.opens(self.shared[point.place])
        if is_open:
            self.opened.append(point.place)
        if not is_open and self.inputs is not None and gate.holds != "nothing":
            for behind in point.behind():
                self.inputs.refuse_held(point.stage, behind)
        late: tuple[tuple[int, ...], ...] = ()
        if is_open and point.missing:
            late = tuple([self._late_leaves(*one) for one in point.missing])
        if not any(late):
            return self._outline.after(point, is_open=is_open)
        grads = list(self.grads)
        for k in (k for own in late for k in own):
            grads[k] = torch.zeros_like(self.leaves[k].param)
        self.grads = grads
        return self._outline.after(point, is_open=is_open, late=late)

    def _late_leaves(self, number: int, members: Sequence[int]) -> tuple[int, ...]:
        """Return the leaves for which the gate with this number keeps earlier gradients."""
        return tuple([k for k in members if int(self.leaves[k].state.gates[number].held)])

    def _total(self, point: Point) -> Tensor | tuple[float, ...]:
        """Return the total of a stage over the leaves that reach it; see ``_ordered_total``."""
        total = self._ordered_total(point)
        return self._summed(point) if total is None else total

    def _summed(self, point: Point, only: int | None = None) -> Tensor:
        """Return the total of a stage, without a plan, over all leaves or over one leaf only."""
        total: Tensor | None = None
        sums = RankSums()
        for part in point.parts:
            if only is not None:
                if only not in part.members:
                    continue
                part = replace(part, members=(only,))  # noqa: PLW2901
            more = self.add_up(part, self.totals_of(part), sums)
            total = more if total is None else total + more.to(total.device)
        total = sums.reduced(total)
        return reduction.zero_total(point.stage) if total is None else total

    def _ordered_total(self, point: Point) -> Tensor | tuple[float, ...] | None:
        """Return a total that is summed in the order of the leaves.

        The total does not depend on how leaves are divided into parts, and not on which leaves are
        late. The result is None if there are no leaves, if all leaves are in one part without a
        plan, or if some leaves are shards or on an accelerator: there, torch chooses the order.
        """
        numbers: dict[int, Sequence[float]] = {}
        tensors: dict[int, Tensor] = {}
        for part in point.parts:
            rows = self._rows_of(part)
            if rows is not None:
                numbers.update(zip(part.members, rows, strict=True))
                continue
            is_alone = len(point.parts) == 1
            params = [self.leaves[k].param for k in part.members]
            if is_alone or not all(one.is_cpu and not is_dtensor(one) for one in params):
                return None
            own, scalars_of = self.totals_of(part), partial(self.numbers.scalars_of, part)
            for k, item in zip(part.members, self.items(part), strict=True):
                one = reduction.reduced(part.stages, self.executor, [item], own, scalars_of)
                tensors[k] = one.reshape(-1)
        if not tensors:
            columns = zip(*map(numbers.__getitem__, sorted(numbers)), strict=True)
            return tuple(map(add_in_order, columns)) or None
        like: Any = {"dtype": torch.float64, "device": "cpu"}
        tensors |= {k: torch.tensor(row, **like) for k, row in numbers.items()}
        ordered = map(tensors.__getitem__, sorted(tensors))
        total = functools.reduce(operator.add, ordered, torch.zeros((), **like))
        return total if point.stage.reduce is not None else total[0]

    def _rows_of(self, part: LeafPart) -> "Sequence[Sequence[float]] | None":
        """Return what each leaf of a part adds; None if each must be reduced alone."""
        if self._rows is None:
            return None
        if self.inputs is not None:
            self.inputs.require(part)
        return self._rows(self, part, self.totals_of(part) if part.totals else ())

    def add_up(
        self, part: LeafPart, totals: Sequence[Tensor], sums: RankSums | None = None
    ) -> Tensor:
        """Return what leaves add to the total of the last stage of a part, without a plan.

        ``sums`` collects what shards add; the caller reduces it over all ranks.
        """
        scalars_of = partial(self.numbers.scalars_of, part)
        items = self.items(part)
        return reduction.reduced(part.stages, self.executor, items, totals, scalars_of, sums)

    def totals_of(self, part: LeafPart) -> tuple[Tensor, ...]:
        """Return the totals that the stages of a part get."""
        plain = self._outline.plain
        taken = None if plain is None else self._outline.taken(part, self._measured)
        return tuple(map(self._totals.__getitem__, part.totals)) if taken is None else tuple(taken)

    def items(self, part: LeafPart) -> list[Item]:
        """Return the leaves of a part, with the state and the inputs of its stages only."""
        if self.inputs is not None:
            self.inputs.require(part)
        return [self._item(part, k) for k in part.members]

    def _item(self, part: LeafPart, member: int) -> Item:
        leaf, grad = self.leaves[member], self.grads[member]
        assert grad is not None
        states = tuple(map(leaf.state.stages.__getitem__, part.at))
        if self.inputs:
            states = self.inputs.put(member, part.stages, states)
        own = LeafState(leaf.state.step, states, leaf.state.gates)
        return Item(leaf.param, grad, own, self.numbers.hypers_at(part, member), leaf.name)


def _as_tensor(stage: Stage, total: Tensor | tuple[float, ...]) -> Tensor:
    """Return the total of a stage as a tensor: a vector for a stage with ``reduce``."""
    if isinstance(total, Tensor):
        return total
    made = total if stage.reduce is not None else total[0]
    return torch.tensor(made, dtype=torch.float64, device="cpu")
