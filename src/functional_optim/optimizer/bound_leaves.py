"""BoundLeaves: bound parameters as the leaves of a step, in whole buffers or one by one."""

from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.leaf import PLAIN
from functional_optim.core.links import Links
from functional_optim.core.overrides import NO_CHAIN, LeafChain
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.kernels import Chunks, Executor, is_measured
from functional_optim.optimizer.bound_buffer import BoundBuffer
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.guard import mask_of
from functional_optim.plan.planned_runs import PreparedStep, step_inputs
from functional_optim.plan.planned_steps import PlannedSteps
from functional_optim.plan.step_leaves import StepLeaf, StepLeaves

_DENSE, _LAYOUT = {torch.strided}, attrgetter("layout")


class BoundLeaves:
    """Whole buffers, and all parameters that are in none of them, as the leaves of a step.

    Args:
        buffers: to be stepped as one leaf each; full (:attr:`BoundBuffer.is_full`).
        layout: of the parameters.
        params, names, states: all parameters, their names, and their states.
        groups: for each parameter, the number of its chain.
        views: for each parameter, its view of the gradient buffers.
    """

    def __init__(
        self,
        executor: Executor,
        buffers: Sequence[BoundBuffer],
        layout: FlatLayout,
        params: Sequence[Tensor],
        names: Sequence[str],
        states: Sequence[LeafState],
        groups: Sequence[int],
        views: Sequence[Tensor],
    ) -> None:
        self._layout, self._views, self._buffers = layout, views, buffers
        self._indices = [[one.index for one in buffer.segments] for buffer in buffers]
        inside = {k for own in self._indices for k in own}
        self._members = [[params[k] for k in own] for own in self._indices]
        """The parameters in each buffer."""
        flat = {id(buffer.buffer) for buffer in buffers}
        self._others = [one.data for one in layout.buffers if id(one) not in flat]
        """The memory of all other buffers of the layout."""
        self.all_changed = [*chain.from_iterable(self._members), *self._others]
        """Result of :meth:`changed` if no gradient is missing."""
        self._alone = [k for k in range(len(params)) if k not in inside]
        self.firsts = [*(own[0] for own in self._indices), *self._alone]
        """For each leaf, the index of its first parameter."""
        self._numbers = [groups[k] for k in self.firsts]
        leaves = [(one.param, one.name) for one in (buffer.whole for buffer in buffers)]
        leaves += [(params[k], names[k]) for k in self._alone]
        own = [LeafState(buffer.counts, buffer.whole.states) for buffer in buffers]
        own += [states[k] for k in self._alone]
        self.leaves = [
            StepLeaf(k, param, state, NO_CHAIN, name)
            for k, ((param, name), state) in enumerate(zip(leaves, own, strict=True))
        ]
        """The leaves, without their chains. The step count of a buffer has all counts in it."""
        counted = [tensor for one in own for tensor in (*state_tensors(one.stages), one.step)]
        self._tensors = [*(param for param, _ in leaves), *counted]
        self._is_complex = any(params[k].is_complex() for k in inside)
        alone = map(views.__getitem__, self._alone)
        self.own: list[Tensor | None] = [*(buffer.gradient for buffer in buffers), *alone]
        """The gradients in the buffers: of each leaf, the one in the layout's memory."""
        self.steps = PlannedSteps(executor, self._numbers, may_begin=True)
        """Planned steps of these leaves."""

    def gradients(self, given: list[Tensor | None]) -> list[Tensor | None] | None:
        """Return the gradient of each leaf, or None for a leaf without one.

        The result is None if the buffers do not contain the gradients. Gradients are copied there
        if they have other layouts than the parameters or are complex, and on an accelerator, since
        the step of many small tensors takes longer than the copy.
        """
        if not self._buffers:
            return None
        found: list[Tensor | None] = [buffer.gradient for buffer in self._buffers]
        present, inside = mask_of(given), given
        if present is not None:
            inside = given.copy()
            for number, own in enumerate(self._indices):
                missing = [k for k in own if not present[k]]
                if len(missing) == len(own):
                    found[number] = None
                    for k in own:
                        inside[k] = self._views[k]
        if not self._layout.gradients_in_place(inside):
            if self._may_be_read(inside) or not self.have_one_count():
                return None
            for k, leaf in zip(self._alone, self.leaves[len(found) :], strict=True):
                if given[k] is not None:
                    check_grad(leaf.param, given[k], leaf.name)
            self._layout.gather(inside)
        return [*found, *map(given.__getitem__, self._alone)]

    def _may_be_read(self, grads: list[Tensor | None]) -> bool:
        """Return True if gradients outside of the buffers can be read fast, or cannot be copied."""
        first = self._views[self.firsts[0]]
        if first.is_cpu and not self._is_complex and self._layout.gradients_alike(grads):
            return True
        are_plain = PLAIN.issuperset(map(type, grads))
        return not (are_plain and _DENSE.issuperset(map(_LAYOUT, grads)))

    def changed(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return tensors in the memory of the stepped leaves that a plan does not know."""
        own = compress(self._members, (one is not None for one in grads[: len(self._members)]))
        is_any = any(one is not None for one in grads)
        return [*chain.from_iterable(own), *(self._others if is_any else ())]

    def have_one_count(self) -> bool:
        """Return True if the parameters of each buffer have the same step count."""
        return all(len(set(buffer.step_counts())) < 2 for buffer in self._buffers)

    def prepare(
        self,
        links: Links,
        chains: Sequence[LeafChain],
        grads: list[Tensor | None],
        measured: Sequence[Tensor],
    ) -> PreparedStep | None:
        """Return a validated step, ready to run; None if the step counts in a buffer differ."""
        steps = self.steps
        given = step_inputs((links, chains, self._tensors, grads, (), measured, {}))
        step = steps.prepare(given)
        if step is None and self.have_one_count():
            for leaf, grad in zip(self.leaves, grads, strict=True):
                if grad is not None:
                    check_grad(leaf.param, grad, leaf.name)
            pairs = zip(self.leaves, self._numbers, strict=True)
            leaves = [leaf._replace(chain=chains[number]) for leaf, number in pairs]
            numbers = self._numbers
            every = StepLeaves.of(links, leaves, grads, shares=False, groups=numbers, chains=chains)
            steps.plan(self._tensors, every)
            step = steps.prepare(given)
        return step


def whole_buffers(
    stages: Sequence[Stage],
    by_chunks: Chunks | None,
    buffers: Sequence[BoundBuffer],
    *,
    all_in: bool,
) -> list[BoundBuffer]:
    """Return the buffers that are stepped as one leaf each.

    ``all_in`` is True if all parameters are in buffers.
    """
    if by_chunks is None:
        return []
    # A buffer and its parameters have different bits in two cases: torch's kernels round the last
    # 16-bit elements of a tensor in another way, and a norm of 64-bit elements depends on how they
    # are divided.
    has_total = any(map(is_measured, stages))
    sizes = {1, 2, 4, 8}
    if by_chunks.exact:
        sizes = {4} if has_total else {4, 8}
    flat = [one for one in buffers if one.is_full and one.buffer.dtype.itemsize in sizes]
    is_all = all_in and len(flat) == len(buffers)
    return flat if is_all or not has_total else []  # one call makes all totals
