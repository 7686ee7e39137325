"""StepPlan: what a step of certain leaves does, found out once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import engine
from functional_optim.checks import check_grad
from functional_optim.engine import Item, coefficients_at
from functional_optim.executors import Executor, Leaf, is_measured
from functional_optim.hyper import is_plain
from functional_optim.places import DTYPE, SHAPE, Places
from functional_optim.plan.chunks import Chunk, chunks_of, state_of
from functional_optim.plan.packs import packs_of
from functional_optim.stage import Stage
from functional_optim.state import LeafState
from functional_optim.unbroken import unbroken

_Call = Callable[[], object]


class _Numbers(NamedTuple):
    """What is new for a chunk at each step."""

    addresses: list[int] | bytes
    """Of its gradients."""
    step: float
    """Which step it is, from 1."""
    hypers: tuple[Any, ...]
    coefficients: tuple[Any, ...]


class StepPlan:
    """A step of certain leaves: as few calls of a kernel as can be, and other leaves one by one.

    It is made of leaves that were checked. At each step it looks at what may have changed since:
    where tensors lie and what they are like, the step counts, the gradients, and the choices among
    the hyper-parameters. Numbers may be new at each step.

    Args:
        stages: of the chain.
        executor: that steps them.
        items: the leaves. Their gradients are not kept.
        groups: for each, the number of the group whose hyper-parameters it has.
        counted: whether this counts the steps of the leaves. Where a leaf is a part of something
            that has made a step once all of its parts have, whoever knows that counts.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        executor: Executor,
        items: Sequence[Item],
        groups: Sequence[int],
        *,
        counted: bool = True,
    ) -> None:
        self._stages, self._executor, self._counted = stages, executor, counted
        self._is_measured = any(map(is_measured, stages))
        with torch.no_grad():
            self._chunks = chunks_of(stages, executor, items, groups)
        # In the gradient's place stands what is there anyway.
        self._items = [item._replace(grad=item.param) for item in items]
        self._groups = list(groups)
        known = {place for chunk in self._chunks for place in chunk.members}
        self._others = [place for place in range(len(items)) if place not in known]
        self._apart = Alike([one for k in self._others for one in state_of(items[k])])
        self._places = Places([one for k in sorted(known) for one in state_of(items[k])])
        self._written = [one for k in sorted(known) for one in state_of(items[k])]

    def make(
        self,
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor] = (),
    ) -> bool:
        """The step.

        Args:
            gradients: one for each leaf.
            hypers: of each group, checked.
            measured: the totals of measured stages, where other processes have a part in them.

        Returns:
            Whether it was made; otherwise nothing was changed, and another plan is needed.

        Raises:
            TypeError, ValueError, RuntimeError: a gradient that does not fit; nothing was changed.
        """
        if not self._holds():
            return False
        calls, others = self._bound(gradients, hypers, measured)
        if others:  # they may be refused: nothing is written before
            self._step_others(others, gradients, hypers, measured)
        for chunk, call in calls:
            call()
            if self._counted:
                chunk.counts.advance()
        return True

    def _step_others(
        self,
        places: Sequence[int],
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor],
    ) -> None:
        """Step leaves that no kernel takes where they lie."""
        items = [
            self._items[k]._replace(grad=gradients[k], hypers=hypers[self._groups[k]])
            for k in places
        ]
        for item in items:
            check_grad(item.param, item.grad, item.name)
        if not self._counted:
            items = [item._replace(state=uncounted(item.state)) for item in items]
        engine.update_(self._stages, self._executor, items, measured)

    def _bound(
        self,
        gradients: list[Tensor],
        hypers: Sequence[tuple[Any, ...]],
        measured: Sequence[Tensor],
    ) -> tuple[list[tuple[Chunk, _Call]], list[int]]:
        """The calls of kernels, and the places of leaves that none of them steps."""
        everything = list(range(len(self._items)))
        if self._is_measured and self._others:
            return [], everything  # their sums are taken together
        numbers = [self._numbers_of(chunk, gradients, hypers) for chunk in self._chunks]
        if self._is_measured:
            if None in numbers:
                return [], everything
            measured = self._totals(numbers, gradients, measured)
        calls: list[tuple[Chunk, _Call]] = []
        others = self._others
        for chunk, found in zip(self._chunks, numbers, strict=True):
            if found is not None:
                call = self._call(chunk, found, measured)
                if call is None:
                    call = self._by_packs(chunk, found, gradients, measured)
                calls.append((chunk, call))
            else:
                others = sorted([*others, *chunk.members])
        return calls, others

    def _numbers_of(
        self, chunk: Chunk, gradients: list[Tensor], hypers: Sequence[tuple[Any, ...]]
    ) -> _Numbers | None:
        """What is new for a chunk; None where its gradients are none for a kernel."""
        addresses = chunk.gradients.of(chunk.own(gradients))
        if addresses is None:
            return None
        own = hypers[chunk.group]
        if own is not chunk.hypers:
            chunk.hypers, chunk.plain = own, all(map(is_plain, own))
        step = chunk.made + 1.0
        resolved, coefficients = coefficients_at(self._stages, own, step, plain=chunk.plain)
        return _Numbers(addresses, step, resolved, coefficients)

    def _totals(
        self,
        numbers: Sequence[_Numbers | None],
        gradients: list[Tensor],
        measured: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """The totals of measured stages."""
        coefficients: dict[int, tuple[Any, ...]] = {}
        for chunk, found in zip(self._chunks, numbers, strict=True):
            assert found is not None
            coefficients.update(dict.fromkeys(chunk.members, found.coefficients))
        leaves = [
            Leaf(item.param, gradients[k], item.state.stages, coefficients[k], item.name)
            for k, item in enumerate(self._items)
        ]
        with torch.no_grad():
            return self._chunks[0].executor.totals(self._stages, leaves, measured)

    def _call(self, chunk: Chunk, found: _Numbers, totals: Sequence[Tensor]) -> _Call | None:
        """What steps a chunk; None where no kernel does."""
        table = chunk.table.by(found.addresses)
        call = None if chunk.feed is None else chunk.feed(found.coefficients, table, totals)
        if call is None:
            like = chunk.like._replace(
                hypers=found.hypers, coefficients=found.coefficients, step=found.step
            )
            chunk.feed = chunk.executor.bind(self._stages, like, table.elements)
            call = None if chunk.feed is None else chunk.feed(found.coefficients, table, totals)
        return call

    def _by_packs(
        self, chunk: Chunk, found: _Numbers, gradients: list[Tensor], totals: Sequence[Tensor]
    ) -> _Call:
        """What steps a chunk that no kernel takes as it lies.

        Raises:
            KernelError: the executor asked for does not step it.
        """
        stages, executor = self._stages, chunk.executor
        if chunk.packs is None:
            items = [self._items[place] for place in chunk.members]
            chunk.packs = packs_of(executor, stages, items)
        packs, own = chunk.packs, chunk.own(gradients)
        executor.require(stages, [pack.take(*found[1:]) for pack in packs])

        def step() -> None:
            with torch.no_grad():
                for pack in packs:
                    pack.step(executor, stages, own, totals)

        return partial(unbroken, step)

    def _holds(self) -> bool:
        """Whether leaves are what they were; autograd is told that those of chunks are written to.

        What was not stepped yet has no plan: its state is made anew before its first step.
        """
        for chunk in self._chunks:
            chunk.made = chunk.counts.common() or 0
            if not chunk.made:
                return False
        if self._others and not self._others_hold():
            return False
        if not self._written:
            return True
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            return self._places.hold(self._written, change=True)

    def _others_hold(self) -> bool:
        started = all(int(self._items[k].state.step) for k in self._others)
        return started and self._apart.hold()


def uncounted(state: LeafState) -> LeafState:
    """The same state, with a step count of its own: a step of it counts for nobody else."""
    return state._replace(step=state.step.clone())


class Alike:
    """Whether tensors have the shapes and dtypes that they had.

    Args:
        tensors: to be looked at.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._shapes, self._dtypes = self._now()

    def hold(self) -> bool:
        """Whether they have."""
        return (self._shapes, self._dtypes) == self._now()

    def _now(self) -> tuple[list[torch.Size], list[torch.dtype]]:
        return list(map(SHAPE, self._tensors)), list(map(DTYPE, self._tensors))
