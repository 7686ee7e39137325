"""KernelExecutor: the reference, with kernels that step the leaves of plans."""

import os
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.leaf import Leaf, Scalars, Stepped, is_measured
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.chunks import (
    as_chunk,
    is_differentiated,
    is_large,
    tensors_of,
    why_not_pointwise,
    with_tensors,
)
from functional_optim.kernels.executor import Chunks
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.free_variables import free_variables
from functional_optim.kernels.kernel import (
    BindParts,
    BindScalars,
    Call,
    Kernel,
    KernelError,
    ListKernel,
    TableKernel,
)
from functional_optim.kernels.leaf_binder import LeafBinder
from functional_optim.kernels.leaf_passes import bind_in_passes
from functional_optim.kernels.passes import explain_passes
from functional_optim.kernels.pieces import PIECE_VARIABLE, cut_chunk, piece_elements
from functional_optim.kernels.pointwise_check import check_pointwise_stages
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.stacks import why_not_stacked

_LISTS = ForeachKernel(cpu_only=True)
"""Steps small leaves on the CPU, if no compiled loop steps them."""

_TESTED: Cache[None] = Cache()
"""Stages and dtypes of chains that were found to be pointwise."""


class KernelExecutor(ReferenceExecutor):
    """Executor whose kernels step the leaves of plans. Without a plan it is the reference.

    Args:
        kernels: a chunk is stepped by the first kernel that supports it, or by the reference if
            none does.
        joining: one of the kernels, which may step many leaves in one call, by their addresses.
        listings: kernels that can step lists of leaves. The first that supports the list is used.
        strict: True to raise KernelError if no kernel can step a leaf.
        stacks: True to step chains that need whole tensors by programs, and leaves of one shape in
            stacks; False to step them by the reference.
        on_device: True if coefficients may be 0-d tensors on the device. CUDA graphs may then
            capture the steps.
        devices: as for every executor.
    """

    takes_dtensors = False

    def __init__(
        self,
        *kernels: Kernel,
        joining: TableKernel | None = None,
        listings: Sequence[ListKernel] = (),
        strict: bool = False,
        stacks: bool = False,
        on_device: bool = False,
        devices: frozenset[str] = frozenset(),
    ) -> None:
        self.kernels = kernels
        self._table_kernel = joining
        self._list_kernels = list(listings) if strict else [*listings, _LISTS]
        self.strict = strict
        self._stacks = stacks
        self._takes_device_scalars = on_device
        self.exact = all(kernel.exact for kernel in kernels)
        self.joins = joining is not None
        self.devices = devices

    def in_chunks(self, stages: Sequence[Stage]) -> Chunks | None:
        return None if why_not_pointwise(stages) else self

    def in_whole_leaves(self, stages: Sequence[Stage]) -> Chunks | None:
        return self if self._stacks else None

    def bind_leaves(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], places: Sequence[Sequence[int]]
    ) -> BindParts:
        one_by_one = LeafBinder(stages, places).bind
        if self.joins and leaves[0].param.is_cpu:
            return bind_in_passes(self.bind_table, stages, leaves, places, one_by_one)
        return one_by_one

    def taking(self, scalars: Scalars) -> "KernelExecutor | None":
        return self if scalars is Scalars.HOST or self._takes_device_scalars else None

    def explain_leaves(
        self,
        stages: Sequence[Stage],
        name: str,
        like: Callable[[], Leaf] | None = None,
        elements: int = 0,
    ) -> str:
        made = self.joins and like and explain_passes(self.bind_table, stages, like, elements)
        stacked = self._stacks and why_not_stacked(stages) is None
        stacks = "; those of one shape in stacks" if stacked else ""
        if self.strict:
            return f"no kernel, so a step raises an error: {why_not_pointwise(stages)}"
        return made or f"one by one; {why_not_pointwise(stages)}{stacks}"

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        if any(map(is_differentiated, leaves)):
            return super().update(stages, leaves, measured)
        if self.strict:
            self.require_kernels(stages, leaves)
        return super().update(stages, leaves, self.totals(stages, leaves, measured))

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        super().update_(stages, leaves, self.totals(stages, leaves, measured))

    def may_list(self, stages: Sequence[Stage], tensors: Sequence[Tensor]) -> bool:
        """Return True if a leaf with these tensors, parameter first, is stepped in a list."""
        param = tensors[0]
        if param.is_cpu and is_large(param):
            return False
        if block_size_of(stages) > 1:
            return param.is_cpu
        return len({one.shape for one in tensors}) == 1

    def bind_table(self, stages: Sequence[Stage], like: Leaf, elements: int) -> BindScalars | None:
        kernel = self._table_kernel
        if kernel is None or not kernel.is_for(like):
            return None
        return kernel.bind_table(stages, like, elements)

    def bind_lists(
        self,
        stages: Sequence[Stage],
        like: Leaf,
        columns: Sequence[list[Tensor]],
        totals: Sequence[Tensor],
    ) -> Call:
        if like.param.is_cuda and like.scalars is Scalars.HOST:
            check_not_captured([like.param])
        for kernel in self._list_kernels:
            if kernel.is_for(like):
                run = kernel.bind_lists(stages, like, columns)
                if not isinstance(run, str):
                    return partial(run, totals)
        calls = []
        for row in zip(*columns, strict=True):
            chunk = as_chunk(with_tensors(like, row))
            assert chunk is not None, "listed leaves are dense"
            calls.append(self.bind_chunk(stages, chunk._replace(entries=None), totals))
        return partial(_run_all, calls)

    def totals(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Tensor]:
        found = list(measured)
        for _ in range(sum(map(is_measured, stages)) - len(found)):
            found.append(self.measure(stages, leaves, found))
        return found

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Check that every leaf can be stepped, before anything is written.

        Raises:
            KernelError: the executor is strict, and no kernel can step a leaf.
            RuntimeError: as for :class:`ReferenceExecutor`.
            ValueError: the environment variable for the size of pieces is not a positive number.
        """
        self.require_kernels(stages, leaves)
        super().require(stages, leaves)

    def require_kernels(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        if PIECE_VARIABLE in os.environ:
            piece_elements()
        for leaf in leaves if self.strict else ():
            reason = self._refusal(stages, leaf)
            if reason is not None:
                raise KernelError(
                    f"the executor asked for cannot step {leaf.name!r}: {reason}; use "
                    "executor='auto', which takes the fastest one that can"
                )
        if why_not_pointwise(stages):
            super().require(stages, leaves)

    def _refusal(self, stages: Sequence[Stage], leaf: Leaf) -> str | None:
        """Return the reason why no kernel can step a leaf, or None."""
        # The result depends on the dtypes and coefficients of a leaf, not on its size.
        empty = with_tensors(leaf, [tensor.new_empty(0) for tensor in tensors_of(leaf)])
        reasons = [_unsupported_reason(kernel, stages, empty) for kernel in self.kernels]
        return why_not_pointwise(stages) or (None if None in reasons else reasons[0])

    def bind_chunk(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> Call:
        """Bind a step of a chunk by the first kernel that can, or else by the reference."""
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
        block_size = block_size_of(stages)
        most = piece_elements(block_size, chunk.param.device.type)
        for piece in cut_chunk(tensors_of(chunk), block_size, most):
            super().update_(stages, [with_tensors(chunk, piece)], totals)

    def validate(self, stages: Sequence[Stage], chunk: Leaf, totals: Sequence[Tensor]) -> None:
        """Check once that a chain is pointwise, if no kernel has checked it.

        Raises:
            NotPointwiseError: the chain is not pointwise, but its stages say so.
        """
        dtypes = tuple(tensor.dtype for tensor in tensors_of(chunk))
        key = (tuple(stages), free_variables(stages).key, dtypes)
        _TESTED.get_or_make(key, lambda: check_pointwise_stages(stages, chunk, totals))

    def explain(self, stages: Sequence[Stage], chunk: Leaf, *, listed: bool = False) -> str:
        reasons: list[str] = []
        for kernel in self._kernels_for(chunk):
            reason = kernel.supports(stages, chunk)
            if reason is None:
                is_listed = listed and kernel is not self._table_kernel
                by = self._list_kernel_name(stages, chunk) if is_listed else None
                return "; ".join([by or kernel.explain(stages, chunk), *reasons])
            reasons.append(reason)
        if self.strict:
            return f"no kernel, so a step raises an error: {self._refusal(stages, chunk)}"
        return "; ".join(["reference", *dict.fromkeys(reasons)])

    def _list_kernel_name(self, stages: Sequence[Stage], chunk: Leaf) -> str | None:
        """Return the name of the kernel that steps small leaves in lists; None if there is none."""
        for kernel in self._list_kernels:
            if kernel.is_for(chunk):
                run = kernel.bind_lists(stages, chunk, [[one] for one in tensors_of(chunk)])
                if not isinstance(run, str):
                    return kernel.name
        return None

    def _kernels_for(self, chunk: Leaf) -> list[Kernel]:
        return [one for one in self.kernels if one.is_for(chunk)]

    def compile(self, stages: Sequence[Stage], chunk: Leaf) -> None:
        # A kernel compiles a chain to find out if it supports the chain.
        any(kernel.supports(stages, chunk) is None for kernel in self._kernels_for(chunk))


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _unsupported_reason(kernel: Kernel, stages: Sequence[Stage], chunk: Leaf) -> str | None:
    if not kernel.is_for(chunk):
        return f"its kernels step no tensors on {chunk.param.device.type}"
    return kernel.supports(stages, chunk)
