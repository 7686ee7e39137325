"""Chunks of a plan: leaves that are stepped together, by positions in a list of tensors."""

from collections.abc import Sequence
from functools import partial
from itertools import compress, islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import without_grad
from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import Scalars
from functional_optim.core.named_tuples import from_fields
from functional_optim.core.stage import Stage, same_coefficients
from functional_optim.core.stage_contract import checked_coefficients
from functional_optim.kernels import Chunks, Leaf
from functional_optim.kernels.chunks import (
    Table,
    flatten_dense,
    tensors_of,
    with_tensors,
)
from functional_optim.kernels.kernel import BindScalars, Part
from functional_optim.plan.item import (
    StepScalars,
    coefficients_at,
    coefficients_error,
    step_scalars,
)
from functional_optim.plan.leaf_positions import LeafPositions

_table = from_fields(Table)

UNBOUND = StepScalars((), (), 0.0)
"""Stand-in for the coefficients of a step that is not known yet."""


class Chunk:
    """Leaves with the same hyper-parameters, step count, dtypes and device.

    Args:
        executor: that binds kernels.
        members: the indices of the leaves among the leaves of the plan.
        rows: of all leaves of the plan.
        group: the group whose hyper-parameters the leaves have.
        tensors: the list of a step. They are not kept.
        pointers: the bytes of the pointers to all tensors, leaf by leaf.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: Chunks,
        members: Sequence[int],
        rows: Sequence[LeafPositions],
        group: int,
        tensors: Sequence[Tensor],
        pointers: slice,
    ) -> None:
        self.members, self.group, self.executor = members, group, executor
        self._stages, self._pointers = stages, pointers
        self._rows = [rows[k] for k in members]
        self.steps = [row.step for row in self._rows]
        """The positions of the step counts."""
        first = self._rows[0].leaf(tensors, UNBOUND)
        few = [one.new_empty(1) for one in tensors_of(first)]
        self._like = with_tensors(first, few)._replace(entries={})
        """A leaf of one element, with the dtypes and the device of the leaves."""
        self._plain: tuple[Any, ...] | None = None
        self._required: tuple[Any, ...] | None = None
        self._prepare(tensors)

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        """Prepare the kernels for the layouts of the leaves."""
        raise NotImplementedError

    def scalars_at(self, hypers: tuple[Any, ...], step: float) -> StepScalars:
        """Return the hyper-parameters and coefficients of a step."""
        plain = hypers is self._plain or all(map(is_plain, hypers))
        # Tensors and schedules must not be kept alive.
        self._plain = hypers if plain else None
        if not plain:
            return StepScalars(*coefficients_at(self._stages, hypers, step), step)
        made = []
        stages = self._stages
        for stage, own in zip(stages, hypers, strict=True):  # a comprehension is one more call
            of = stage.coefficients
            try:
                one = own if of is same_coefficients else of(step, own)
            except ArithmeticError as error:
                raise coefficients_error(stage, step, own, error) from error
            if not hasattr(one, "_fields"):  # without a call in each step
                checked_coefficients(stage, one)
            made.append(one)
        return step_scalars((hypers, tuple(made), step, Scalars.HOST))

    def _like_at(self, made: StepScalars) -> Leaf:
        """Return a leaf of one element, with the coefficients of a step."""
        param, grad, states, _, name, _, _, entries, _ = self._like
        numbers = made.coefficients, name, made.hypers, made.step
        return Leaf(param, grad, states, *numbers, entries, made.scalars)

    def bind(
        self, tensors: list[Tensor], made: StepScalars, pointers: bytes, totals: Sequence[Tensor]
    ) -> Sequence[Part] | None:
        """Bind a step: calls, each with the leaves that it steps; None if a leaf has no kernel."""
        raise NotImplementedError

    def _require(self, leaves: Sequence[Leaf]) -> None:
        """Raise an error if the executor cannot step leaves with these hyper-parameters."""
        hypers = leaves[0].hypers
        self.executor.require_kernels(self._stages, leaves)
        self._required = hypers if hypers is self._plain else None


class PointwiseChunk(Chunk):
    """Leaves of a pointwise chain, or of a chain that works on blocks of elements."""

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        lengths = [tensors[row.param].numel() for row in self._rows]
        by_table = self.executor.joins and self._like.param.is_cpu
        self._table = Table.of(lengths, ()) if by_table else None
        """The lengths of the leaves, if a kernel may take a table of pointers; else None."""
        longest = self._rows[lengths.index(max(lengths))]
        self._longest = _ChunkGetter(longest, longest.leaf(tensors, UNBOUND))
        self._listing: _Listing | None = None
        """How the leaves are stepped without a table, once that has happened."""
        self._bound: tuple[BindScalars | None, BindScalars | None] = None, None
        """The kernel that takes pointers, bound to the latest static coefficients, and to those
        before, which may come again: an accumulation starts, and continues."""
        self._retry = 0.0
        """The step from which a kernel that refused the pointers is tried again."""

    def bind(
        self, tensors: list[Tensor], made: StepScalars, pointers: bytes, totals: Sequence[Tensor]
    ) -> Sequence[Part] | None:
        if self._table is not None:
            table = _table((*self._table[:3], pointers[self._pointers]))
            last, other = self._bound
            call = None if last is None else last(made.coefficients, table, totals)
            if call is None and other is not None:
                last, other = self._bound = other, last
                call = last(made.coefficients, table, totals)
            if call is None and (last is not None or made.step >= self._retry):
                like = self._longest.chunk(tensors, made, None)
                bound = self.executor.bind_table(self._stages, like, table.elements)
                call = None if bound is None else bound(made.coefficients, table, totals)
                if bound is not None:
                    self._bound = bound, last
                elif not isinstance(made.step, Tensor):
                    self._retry = 1.25 * made.step
            if call is not None:
                return [(self.members, call)]
        return self._parts(tensors, made, totals)

    def _parts(
        self, tensors: list[Tensor], made: StepScalars, totals: Sequence[Tensor]
    ) -> Sequence[Part]:
        """Bind a step without a table."""
        with torch.no_grad():
            if made.hypers is not self._required:
                self._require([self._like_at(made)])
            if (listing := self._listing) is None:
                leaves = [row.leaf(tensors, made) for row in self._rows]
                listing = _Listing(self._stages, self.executor, self.members, self._rows, leaves)
                self._listing = listing
            parts: list[Part] = []
            for k, getter in listing.alone:
                one = getter.chunk(tensors, made, getter.entries)
                parts.append(((k,), self.executor.bind_chunk(self._stages, one, totals)))
            if listing.columns:
                columns = [list(column(tensors)[:-1]) for column in listing.columns]
                like = self._like_at(made)
                call = self.executor.bind_lists(self._stages, like, columns, totals)
                parts.append((listing.listed, call))
            if len(parts) > 1:  # the caller turns autograd off
                return parts
            members, call = parts[0]
            return [(members, partial(without_grad, call))]


class _Listing:
    """Division of leaves into those that are stepped as lists, and those that are stepped alone."""

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: Chunks,
        members: Sequence[int],
        rows: Sequence[LeafPositions],
        leaves: Sequence[Leaf],
    ) -> None:
        listed = [executor.may_list(stages, tensors_of(one)) for one in leaves]
        if sum(listed) == 1:
            listed = [False] * len(leaves)
        own = [row.all for row in compress(rows, listed)]
        self.columns = [itemgetter(*one, one[0]) for one in zip(*own, strict=True)]
        """Return all parameters, all gradients, and so on, of the leaves that are stepped as lists;
        the first one twice, because ``itemgetter`` with one index returns no list."""
        self.listed = list(compress(members, listed))
        self.alone = [
            (k, _ChunkGetter(row, leaf))
            for k, row, leaf, one in zip(members, rows, leaves, listed, strict=True)
            if not one
        ]
        """All other leaves, which are stepped one by one."""


class _ChunkGetter:
    """Getter of a leaf from a list of tensors, as a chunk of memory."""

    def __init__(self, row: LeafPositions, leaf: Leaf) -> None:
        tensors = tensors_of(leaf)
        self._get = itemgetter(*row.all)
        self._is_flat = all(one.dim() == 1 for one in tensors)
        self._name = row.name
        self._kinds = [
            (
                getattr(type(state), "_make", tuple),
                [len(one) if isinstance(one, list) else None for one in state],
            )
            for state in leaf.states
        ]
        """The class of each stage's state, and for each field the length of a list, or None."""
        self.entries: dict[Any, Any] = {}
        """Entries that kernels cache for the leaf."""

    def chunk(
        self, tensors: Sequence[Tensor], made: StepScalars, entries: dict[Any, Any] | None
    ) -> Leaf:
        """Return the leaf of a step as a chunk of memory."""
        param, grad, *rest = self._get(tensors)
        if not self._is_flat:
            param, grad, *rest = map(flatten_dense, (param, grad, *rest))
        states: list[Any] = []
        left = iter(rest)
        for kind, fields in self._kinds:
            values: list[Any] = []
            for length in fields:  # a comprehension would be one more Python call
                one = next(left) if length is None else list(islice(left, length))
                values.append(one)
            states.append(kind(values))
        own = tuple(states)
        numbers = made.coefficients, self._name, made.hypers, made.step
        return Leaf(param, grad, own, *numbers, entries, made.scalars)


class WholeChunk(Chunk):
    """Leaves of a chain that needs whole tensors: stacks of one shape, and single leaves.

    The tensors of the leaves are plain, contiguous, and on one device.
    """

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        pairs = [(tensors[row.param], row) for row in self._rows]
        self._kinds = list({(one.shape, one.dtype): row for one, row in pairs}.values())
        """A leaf of each shape."""
        leaves = [row.leaf(tensors, UNBOUND) for row in self._rows]
        positions = [row.all for row in self._rows]
        self._bind = self.executor.bind_leaves(self._stages, leaves, positions)

    def bind(
        self, tensors: list[Tensor], made: StepScalars, pointers: bytes, totals: Sequence[Tensor]
    ) -> Sequence[Part] | None:
        if made.hypers is not self._required:
            self._require([row.leaf(tensors, made) for row in self._kinds])
        like = self._like_at(made)
        parts = without_grad(self._bind, tensors, like, totals, pointers[self._pointers])
        if parts is None:
            return None
        index = self.members.__getitem__
        if len(parts) == 1:
            parts = [(places, partial(without_grad, call)) for places, call in parts]
        return [(list(map(index, places)), call) for places, call in parts]
