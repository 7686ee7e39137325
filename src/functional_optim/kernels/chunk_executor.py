"""An executor that runs a kernel over chunks: leaves listed, cut and stepped in place."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from types import MappingProxyType

import torch
from torch import Tensor

from functional_optim._torch import (
    has_dispatch_mode,
    is_transforming,
)
from functional_optim.core.aliasing import copy_of
from functional_optim.core.capturing import check_not_captured
from functional_optim.core.leaf import Leaf, Scalars, Stepped, is_measured, on_device
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import map_state
from functional_optim.kernels.blocked import BLOCK_VARIABLE, block_elements
from functional_optim.kernels.bound_leaves import BoundLeaves
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import (
    Table,
    as_chunk,
    is_large,
    joined,
    tensors_of,
    why_not_pointwise,
    with_tensors,
)
from functional_optim.kernels.executor import Chunks, Executor, Wholes
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.free_variables import free_variables
from functional_optim.kernels.kernel import (
    BindParts,
    BindScalars,
    Call,
    JoiningKernel,
    Kernel,
    KernelError,
    ListingKernel,
)
from functional_optim.kernels.leaf_passes import in_passes
from functional_optim.kernels.pass_loops import explain_passes
from functional_optim.kernels.pieces import fit_a_piece, pieces_of
from functional_optim.kernels.plain_leaves import (
    are_plain,
    has_dispatch,
    is_followed,
    is_followed_tensor,
)
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.rounding import note_rounding
from functional_optim.kernels.stacked import StackedExecutor, why_not_stacked
from functional_optim.kernels.totals import added, hand_on_gradients
from functional_optim.kernels.validate import require_pointwise_stages

_LISTS = ForeachKernel(on_cpu=True)
"""Steps small leaves that no loop steps together."""

_TESTED: Cache[None] = Cache()
"""Chains that are pointwise, by their stages and dtypes."""


class ChunkExecutor(Executor):
    """Runs kernels over chunks; leaves that cannot be chunks go through the reference.

    Args:
        kernels: what steps a chunk: the first that supports it, or else the reference.
        joining: one of them that is asked to step leaves together, where they lie.
        listings: are asked to do so, one after the other, given lists of tensors.
        strict: raise KernelError where no kernel takes a chunk, and leave nothing to others.
        stacks: what steps chains that need whole tensors; None for one by one.
        on_device: whether it takes numbers that stand on the device: CUDA graphs may capture its
            steps then.
        stand_ins: as for every executor.
    """

    def __init__(
        self,
        *kernels: Kernel,
        joining: JoiningKernel | None = None,
        listings: Sequence[ListingKernel] = (),
        strict: bool = False,
        stacks: StackedExecutor | None = None,
        on_device: bool = False,
        stand_ins: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.kernels = kernels
        self._joining = joining
        self._listings = list(listings) if strict else [*listings, _LISTS]
        self.strict = strict
        self._stacks = stacks
        self._takes_device_scalars = on_device
        self.exact = all(kernel.exact for kernel in kernels)
        self.joins = joining is not None
        self._leaves = ReferenceExecutor(tries_pointwise=False)
        self.stand_ins = stand_ins

    def in_chunks(self, stages: Sequence[Stage]) -> Chunks | None:
        return None if why_not_pointwise(stages) else self

    def in_wholes(self, stages: Sequence[Stage]) -> Wholes | None:
        return None if self._stacks is None else self

    def bind_leaves(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], places: Sequence[Sequence[int]]
    ) -> BindParts:
        assert self._stacks is not None, "asked by in_wholes"
        one_by_one = BoundLeaves(self._stacks, stages, places).parts
        if self.joins and leaves[0].param.is_cpu:
            return in_passes(self.bind_table, stages, leaves, places, one_by_one)
        return one_by_one

    def taking(self, scalars: Scalars) -> Executor | None:
        return self if scalars is Scalars.HOST or self._takes_device_scalars else None

    def explain_leaves(
        self,
        stages: Sequence[Stage],
        name: str,
        like: Callable[[], Leaf] | None = None,
        elements: int = 0,
    ) -> str:
        made = self.joins and like and explain_passes(self.bind_table, stages, like, elements)
        stacked = self._stacks is not None and why_not_stacked(stages) is None
        stacks = "; those of one shape in stacks" if stacked else ""
        return made or f"one by one; {why_not_pointwise(stages)}{stacks}"

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        """The step in place, on copies; leaf by leaf where its operations are to be seen.

        So they are by autograd, torch.func, a dispatch mode, and tensors of other classes.
        """
        must_be_seen = any(map(is_followed, leaves)) or any(map(is_followed_tensor, measured))
        if must_be_seen or is_transforming() or has_dispatch_mode() or not are_plain(leaves):
            return self._leaves.update(stages, leaves, measured)
        copies = [
            leaf._replace(
                param=copy_of(leaf.param),
                states=tuple(map_state(copy_of, state) for state in leaf.states),
            )
            for leaf in leaves
        ]
        self.update_(stages, copies, measured)
        return [Stepped(leaf.param, leaf.states) for leaf in copies]

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        with torch.no_grad():
            self.require(stages, leaves)
            if any(map(has_dispatch, leaves)) and not self.strict:
                self._leaves.update_(stages, leaves, measured)
                return
            for leaf in {id(one.coefficients): one for one in leaves}.values():
                note_rounding(stages, leaf)
            if why_not_pointwise(stages):
                self._step_whole(stages, leaves, measured)
                return
            totals = self.totals(stages, leaves, measured)
            others: list[Leaf] = []
            calls: list[Call] = []
            for group in joined(stages, leaves, others):
                calls += self._bind_group(stages, group, totals)
            for call in calls:
                call()
            if others:
                (self._stacks or self._leaves).update_(stages, others, totals)

    def _step_whole(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        """Step leaves of a chain that needs its whole tensors."""
        if self._stacks is None or on_device(leaves):
            self._leaves.update_(stages, leaves, measured)
        else:
            self._stacks.update_(stages, leaves, self.totals(stages, leaves, measured))

    def _bind_group(
        self, stages: Sequence[Stage], group: Sequence[Leaf], totals: Sequence[Tensor]
    ) -> list[Call]:
        """Bind a step of leaves that share coefficients and dtypes, and lie in one order each.

        Args:
            stages: of the chain, all pointwise.
            group: the leaves.
            totals: the sum of each measured stage.
        """
        views = [view for view in map(as_chunk, group) if view is not None]
        # Of a single element, what it has per block looks like what it has per element.
        like = max(views, key=lambda view: view.param.numel())
        mark: list[Call] = [partial(_mark_changed, view) for view in views]
        if self._joining is not None:
            table = Table.of_tensors(list(map(tensors_of, views)))
            bound = self.bind_table(stages, like, table.elements)
            call = None if bound is None else bound(like.coefficients, table, totals)
            if call is not None:
                return [call, *mark]
        rows = list(map(tensors_of, group))
        is_listed = [self.may_list(stages, row) for row in rows]
        if sum(is_listed) == 1:
            is_listed = [False] * len(rows)
        calls = [
            self.bind_chunk(stages, view, totals)
            for view, one in zip(views, is_listed, strict=True)
            if not one
        ]
        if any(is_listed):
            columns = list(map(list, zip(*compress(rows, is_listed), strict=True)))
            calls.append(self.bind_lists(stages, like, columns, totals))
        return calls + mark

    def may_list(self, stages: Sequence[Stage], tensors: Sequence[Tensor]) -> bool:
        """Return True if a leaf with these tensors, parameter first, is stepped in a list."""
        param = tensors[0]
        if block_size_of(stages) > 1 or (param.is_cpu and is_large(param)):
            return False
        return len({(one.shape, one.stride()) for one in tensors}) == 1

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> BindScalars | None:
        """Bind such steps, for leaves with so many elements in all."""
        joining = self._joining
        if joining is None or not joining.is_for(like):
            return None
        return joining.bind_table(stages, like, elements)

    def bind_lists(
        self,
        stages: Sequence[Stage],
        like: Leaf,
        columns: Sequence[list[Tensor]],
        totals: Sequence[Tensor],
    ) -> Call:
        if like.param.is_cuda and like.scalars is Scalars.HOST:
            check_not_captured([like.param])
        for listing in self._listings:
            if listing.is_for(like):
                run = listing.bind_lists(stages, like, columns)
                if not isinstance(run, str):
                    return partial(run, totals)
        rows, calls = list(zip(*columns, strict=True)), []
        if not self.strict and any(one.is_for(like) for one in self._listings):
            self.validate(stages, like, totals)
            leaves = [with_tensors(like, row)._replace(entries=None) for row in rows]
            return partial(self._leaves.update_, stages, leaves, totals)
        for row in rows:
            chunk = as_chunk(with_tensors(like, row))
            assert chunk is not None, "it fills its memory"
            calls.append(self.bind_chunk(stages, chunk._replace(entries=None), totals))
        return partial(_in_turn, calls)

    def totals(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Tensor]:
        """The sums of all measured stages, those that are given and those to be taken here."""
        found = list(measured)
        for _ in range(sum(map(is_measured, stages)) - len(found)):
            found.append(self.measure(stages, leaves, found))
        return found

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Make sure that a kernel takes every leaf, before anything is written.

        Raises:
            KernelError: none does, and this executor is strict.
            ValueError: the environment variable of the blocks' size holds no positive number.
        """
        if BLOCK_VARIABLE in os.environ:
            block_elements(1)
        self._leaves.require(stages, leaves)
        for leaf in leaves if self.strict else ():
            # Its dtypes and coefficients matter here, not its size.
            empty = with_tensors(leaf, [tensor.new_empty(0) for tensor in tensors_of(leaf)])
            reasons = [_why_not(kernel, stages, empty) for kernel in self.kernels]
            reason = why_not_pointwise(stages) or (None if None in reasons else reasons[0])
            if reason is not None:
                raise KernelError(
                    f"the executor asked for cannot step {leaf.name!r}: {reason}; use "
                    "executor='auto', which takes the fastest one that can"
                )

    def bind_chunk(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> Call:
        """Bind a step of a chunk, by the first kernel that takes it, or else leaf by leaf."""
        if chunk.param.is_cuda and chunk.scalars is Scalars.HOST:
            check_not_captured([chunk.param])
        for kernel in self.kernels:
            if kernel.is_for(chunk):
                run = kernel.bind(stages, chunk)
                if not isinstance(run, str):
                    return partial(run, totals)
        self.validate(stages, chunk, totals)
        return partial(self._step_pieces, stages, chunk, totals)

    def _step_pieces(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> None:
        for piece in pieces_of(stages, chunk):
            self._leaves.update_(stages, [piece], totals)

    def validate(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> None:
        """Make sure, once, that leaves may be joined and cut where no kernel has looked.

        Raises:
            NotPointwiseError: the chain only says so.
        """
        dtypes = tuple(tensor.dtype for tensor in tensors_of(chunk))
        key = (tuple(stages), free_variables(stages).key, dtypes)
        if all(stage.granularity == 1 for stage in stages):
            _TESTED.get_or_make(key, lambda: require_pointwise_stages(stages, chunk, totals))

    def explain(self, stages: Sequence[Stage], chunk: Leaf, *, listed: bool = False) -> str:
        """Return the kernel of a chunk, or of small leaves with so many elements, and why."""
        reasons: list[str] = []
        for kernel in self._asked(chunk):
            reason = kernel.supports(stages, chunk)
            if reason is None:
                is_listed = listed and kernel is not self._joining
                by = self._by_lists(stages, chunk) if is_listed else None
                return "; ".join([by or kernel.explain(stages, chunk), *reasons])
            reasons.append(reason)
        return "; ".join(["reference", *dict.fromkeys(reasons)])

    def _by_lists(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        """Return the name of the kernel that steps small leaves in lists; None if there is none."""
        for listing in self._listings:
            if listing.is_for(chunk):
                run = listing.bind_lists(stages, chunk, [[one] for one in tensors_of(chunk)])
                if not isinstance(run, str):
                    return listing.called
        return None

    def _asked(self, chunk: Leaf) -> list[Kernel]:
        """The kernels that are for a chunk."""
        return [one for one in self.kernels if one.is_for(chunk)]

    def compile(self, stages: Sequence[Stage], chunk: Leaf) -> None:
        """Compile what steps a chunk: the first kernel that takes it, as it is asked for that."""
        any(kernel.supports(stages, chunk) is None for kernel in self._asked(chunk))

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        """The sum, block by block, so that no whole gradient is held beside the given ones."""
        wanted = [i for i, stage in enumerate(stages) if is_measured(stage)][len(measured)]
        if wanted and hand_on_gradients(stages[:wanted], leaves):
            return self._leaves.measure([stages[wanted]], leaves, ())
        if wanted == 0 or fit_a_piece(leaves) or why_not_pointwise(stages[: wanted + 1]):
            return self._leaves.measure(stages, leaves, measured)
        return added(  # leaf by leaf, as anyone adds up who is given what each leaf adds
            added(self._leaves.measure(stages, [one], measured) for one in pieces_of(stages, leaf))
            for leaf in leaves
        )


def _in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _why_not(kernel: Kernel, stages: Sequence[Stage], chunk: Leaf) -> str | None:
    """Return why a kernel does not step a chunk; None if it does."""
    if not kernel.is_for(chunk):
        return f"its kernels step no tensors on {chunk.param.device.type}"
    return kernel.supports(stages, chunk)


def _mark_changed(chunk: Leaf) -> None:
    """Tell autograd of what was written: not every kernel does, and it is the leaf's memory."""
    param, _, *states = tensors_of(chunk)
    written = [tensor for tensor in (param, *states) if not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)
