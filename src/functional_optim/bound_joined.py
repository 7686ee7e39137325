"""Steps by gradients that lie anywhere: each is read where autograd left it, all in one call.

Nothing is copied and nothing is gathered. What lies in the flat buffers is known by tables of
pointers, made once for each set of parameters that have a gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.bound_buffer import BoundBuffer
from functional_optim.bound_work import At
from functional_optim.executors import LaneExecutor, Leaf
from functional_optim.executors.exact.program import Table
from functional_optim.executors.lanes import tensors_of
from functional_optim.plan.gradients import GradientAddresses
from functional_optim.stage import Stage, grain_of

LEAST = 1 << 14
"""Elements of a buffer from which it is stepped so: fewer are copied in less time."""
MASKS = 8
"""For how many sets of missing gradients tables are kept."""


class _Work(NamedTuple):
    """Some parameters of a buffer, at one step."""

    buffer: BoundBuffer
    like: Leaf
    table: Table
    parts: list[slice]
    """Which segments of the buffer they are."""


class _Present:
    """The parameters of a buffer that have a gradient, for one mask.

    Args:
        buffer: of the parameters.
        views: for each parameter of the layout, a gradient as its buffer would hold it.
        members: the places of the segments.
        written: what steps write to: gradients that lie there are not read there.
    """

    def __init__(
        self,
        buffer: BoundBuffer,
        views: Sequence[Tensor | None],
        members: Sequence[int],
        written: list[Tensor],
    ) -> None:
        self.members = list(members)
        found = [views[buffer.segments[k].index] for k in self.members]
        self._gradients = GradientAddresses([one for one in found if one is not None], written)

    def addresses(self, mine: list[Any]) -> "list[int] | bytes | None":
        """Where gradients lie; None where one is not as its parameter, or in what is written."""
        return self._gradients.of(mine)


class JoinedSteps:
    """Steps the buffers of a bound optimizer by separate gradients.

    Args:
        stages: of the chain.
        buffers: all of them; none where parameters are not to be stepped so.
        views: for each parameter, a gradient as its buffer would hold it.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        buffers: Sequence[BoundBuffer],
        views: Sequence[Tensor | None],
    ) -> None:
        self._stages, self._buffers, self._views = stages, buffers, views
        self._written = [tensor for one in buffers for tensor in one.written]
        self._grain = grain_of(stages)
        self._long = all(one.buffer.data.numel() >= LEAST for one in buffers)
        self._on_cpu = all(one.buffer.data.is_cpu for one in buffers)
        self._present: list[dict[tuple[int, ...], _Present]] = [{} for _ in buffers]
        self._rows = [self._rows_of(one) for one in buffers] if self.may else []
        self._tables: dict[Any, Table] = {}

    @property
    def may(self) -> bool:
        """Whether such steps are worth while."""
        return bool(self._buffers) and self._long and self._on_cpu

    def _rows_of(self, buffer: BoundBuffer) -> list[list[int]]:
        """For each segment its length, and where each of its tensors begins."""
        whole = tensors_of(buffer.whole)
        count = buffer.whole.param.numel()
        steps = [
            (one.data_ptr(), one.element_size(), 1 if one.numel() == count else self._grain)
            for one in whole
        ]
        return [
            [one.numel, *(start + one.offset // per * size for start, size, per in steps)]
            for one in buffer.segments
        ]

    def make(
        self,
        executor: LaneExecutor,
        given: Sequence[Any],
        hypers: Sequence[tuple[Any, ...]],
        at: At,
        *,
        plain: bool,
    ) -> bool:
        """A step of all parameters that have a gradient.

        Args:
            executor: that steps them.
            given: a gradient or None for each parameter.
            hypers: of each parameter.
            at: gives coefficients.
            plain: whether hyper-parameters are plain numbers, the same at each step.

        Returns:
            Whether it was made; otherwise nothing was changed.
        """
        if not self.may:
            return False
        with torch.no_grad():
            return self._is_made(executor, given, hypers, at, plain)

    def _is_made(
        self,
        executor: LaneExecutor,
        given: Sequence[Any],
        hypers: Sequence[tuple[Any, ...]],
        at: At,
        plain: bool,
    ) -> bool:
        work: list[_Work] = []
        for number, buffer in enumerate(self._buffers):
            found = self._work(number, buffer, given, hypers[buffer.segments[0].index], at, plain)
            if found is None:
                return False
            work += found
        if not all(executor.is_cut_freely(self._stages, one.like) for one in work):
            return False
        for one in work:
            done = executor.step_table(self._stages, one.like, one.table, ())
            assert done, "it takes them"
            one.buffer.advance(one.parts)
        return True

    def _work(
        self,
        number: int,
        buffer: BoundBuffer,
        given: Sequence[Any],
        own: tuple[Any, ...],
        at: At,
        plain: bool,
    ) -> list[_Work] | None:
        """What there is to be done in one buffer; None where it cannot be done so."""
        mine = [given[one.index] for one in buffer.segments]
        present = self._present_of(number, buffer, mine)
        if len(present.members) < len(mine):
            mine = [mine[k] for k in present.members]
        addresses = present.addresses(mine)
        if addresses is None:
            return None
        groups = buffer.groups(present.members)
        made = []
        for step, members in groups:
            table = self._table(number, members)
            pointers = addresses
            if len(groups) > 1:
                every = dict(zip(present.members, _numbers(addresses), strict=True))
                pointers = [every[k] for k in members]
            resolved, coefficients = at(own, step, buffer.count(members[0]))
            memo = buffer.memo(own) if plain and len(groups) == 1 else None
            memo = {} if memo is None else memo  # what takes all of them is asked only once
            like = buffer.whole._replace(
                coefficients=coefficients, hypers=resolved, step=step, memo=memo
            )
            work = _Work(buffer, like, table.by(pointers), _slices(members))
            made.append(work)
        return made

    def _present_of(self, number: int, buffer: BoundBuffer, mine: Sequence[Any]) -> _Present:
        members: tuple[int, ...] = ()  # all
        if type(None) in map(type, mine):
            members = tuple(k for k, grad in enumerate(mine) if grad is not None)
        known = self._present[number]
        key = members or (-1,) * (len(mine) > 0 and mine[0] is not None)
        if key not in known:
            if len(known) >= MASKS:
                known.clear()
            every = members or range(len(mine) if key else 0)
            known[key] = _Present(buffer, self._views, every, self._written)
        return known[key]

    def _table(self, number: int, members: Sequence[int]) -> Table:
        rows = self._rows[number]
        key = (number, None if len(members) == len(rows) else tuple(members))
        if key not in self._tables:
            if len(self._tables) >= MASKS * len(self._buffers):
                self._tables.clear()
            mine = [rows[k] for k in members]
            self._tables[key] = Table.of(
                [row[0] for row in mine], [one for row in mine for one in row[1:]]
            )
        return self._tables[key]


def _numbers(addresses: "list[int] | bytes") -> list[int]:
    return list(memoryview(addresses).cast("q")) if isinstance(addresses, bytes) else addresses


def _slices(members: Sequence[int]) -> list[slice]:
    """Whole numbers in order, as slices."""
    if members and members[-1] - members[0] == len(members) - 1:
        return [slice(members[0], members[-1] + 1)]
    found: list[slice] = []
    for k in members:
        if found and found[-1].stop == k:
            found[-1] = slice(found[-1].start, k + 1)
        else:
            found.append(slice(k, k + 1))
    return found
