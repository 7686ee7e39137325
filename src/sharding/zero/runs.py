"""Neighbouring ranges joined: one kernel call steps whatever lies side by side.

What can be joined depends on where parameters, state and gradients lie, which is mostly the same at
every step: so it is found out once, and used again as long as it holds.
"""

from collections.abc import Sequence
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import engine
from functional_optim.executors import EXECUTORS, LaneExecutor, Leaf
from functional_optim.executors.lanes import why_not_pointwise
from functional_optim.state import LeafState
from sharding.zero.memory import SMALL, adjoins, joined
from sharding.zero.recipe import Chain
from sharding.zero.store import Piece, Store

PACK = 1 << 20
"""Most elements that are copied together."""
KEPT = 256
"""How many ways of joining are remembered."""


class Slice(NamedTuple):
    """Elements of a piece that are to be stepped, and their gradient; both in one dimension."""

    piece: Piece
    start: int
    """Counted in the store of the piece."""
    param: Tensor
    grad: Tensor
    step: int
    """Steps made before."""

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.start + self.param.numel()


class Run:
    """Slices that are stepped by one call.

    Args:
        slices: neighbours in their store, in order.
        places: which of the slices at hand they are.
        used: which state the options of now use.
    """

    def __init__(self, slices: Sequence[Slice], places: Sequence[int], used: Any) -> None:
        first = slices[0]
        store = _store(first)
        params = [one.param for one in slices]
        self.places = tuple(places)
        self.apart = not _lie_together(params)
        """Whether parameters are copied together for the step, and back."""
        self.params = params if self.apart else [joined(params)]
        self.states = store.cut(used, first.start, slices[-1].stop)
        more = f" and {len(slices) - 1} more" if len(slices) > 1 else ""
        self.name = first.piece.path + more
        self._memo: tuple[Any, dict[str, Any]] = (None, {})

    def leaf(self, slices: Sequence[Slice], chain: Chain, made: tuple[Any, Any]) -> Leaf:
        """The lane of this step.

        Args:
            slices: those at hand.
            chain: that steps them.
            made: hyper-parameters and coefficients of this step.
        """
        grads = [slices[place].grad for place in self.places]
        param = torch.cat(self.params) if self.apart else self.params[0]
        if self._memo[0] is not chain.hypers:
            self._memo = (chain.hypers, {})
        step = slices[self.places[0]].step + 1.0
        grad = joined(grads) if _lie_together(grads) else torch.cat(grads)
        return Leaf(param, grad, self.states, made[1], self.name, made[0], step, self._memo[1])

    def write(self, leaf: Leaf) -> None:
        """Bring a stepped lane to the parameters, where they were copied for it."""
        if self.apart:
            pieces = list(leaf.param.split([param.numel() for param in self.params]))
            torch._foreach_copy_(self.params, pieces)


class Runs:
    """Ways of joining slices, remembered."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Run]] = {}

    def forget(self) -> None:
        """Something lies elsewhere now."""
        self._known.clear()

    def step(self, chain: Chain, slices: Sequence[Slice], totals: Sequence[Tensor]) -> None:
        """Step slices of one group and device, by as few calls as can be."""
        executor = EXECUTORS[chain.executor]
        if not isinstance(executor, LaneExecutor) or why_not_pointwise(chain.stages):
            items = [_item(one, chain) for one in slices]
            engine.update_(chain.stages, executor, items, totals)
            return
        made = {
            step: engine.coefficients_at(chain.stages, chain.hypers, step + 1.0)
            for step in {one.step for one in slices}
        }
        runs = self._of(slices, chain, exact=executor.exact)
        with torch.no_grad():
            leaves = [run.leaf(slices, chain, made[slices[run.places[0]].step]) for run in runs]
            executor.require(chain.stages, leaves)
            for run, leaf in zip(runs, leaves, strict=True):
                if leaf.param.numel():
                    executor.step_lane(chain.stages, leaf, totals)
                    run.write(leaf)

    def items(self, chain: Chain, slices: Sequence[Slice]) -> list[engine.Item]:
        """Slices as the engine takes them, one by one."""
        return [_item(one, chain) for one in slices]

    def _of(self, slices: Sequence[Slice], chain: Chain, *, exact: bool) -> list[Run]:
        used = [_store(one).used(chain) for one in slices]
        signature = (
            exact,
            tuple(used),
            tuple(
                (id(one.piece), one.start, one.param.numel(), one.step - slices[0].step)
                for one in slices
            ),
            tuple(adjoins(one.grad, other.grad) for one, other in pairwise(slices)),
        )
        found = self._known.get(signature)
        if found is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            found = self._known[signature] = [
                Run([slices[place] for place in places], places, used[places[0]])
                for places in _places(slices, exact=exact)
            ]
        return found


def _places(slices: Sequence[Slice], *, exact: bool) -> list[list[int]]:
    """Which slices go together: neighbours whose gradients are neighbours, or small enough."""
    numbers: dict[int, int] = {}
    for one in slices:
        numbers.setdefault(id(one.piece.store), len(numbers))
    order = sorted(
        range(len(slices)), key=lambda at: (numbers[id(slices[at].piece.store)], slices[at].start)
    )
    runs: list[list[int]] = []
    for place in order:
        if runs and _joins([slices[at] for at in runs[-1]], slices[place], exact=exact):
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _joins(run: Sequence[Slice], one: Slice, *, exact: bool) -> bool:
    """Whether a slice is stepped together with those before it."""
    last = run[-1]
    if not _adjacent(last, one):
        return False
    # torch's kernels for 16-bit floats round the last elements of a tensor, past its last whole
    # vector, in another way: there, a parameter is stepped alone, as in one process.
    if exact and one.param.dtype.itemsize <= 2:
        return False
    beside = adjoins(last.param, one.param) and adjoins(last.grad, one.grad)
    copied = not (_lie_together([a.param for a in run]) and _lie_together([a.grad for a in run]))
    if beside and not copied:
        return True
    held = sum(other.param.numel() for other in run)
    small = one.param.numel() < SMALL and all(other.param.numel() < SMALL for other in run)
    return small and held + one.param.numel() <= PACK


def _adjacent(one: Slice, other: Slice) -> bool:
    """Whether two slices are neighbours in their store, and at the same step."""
    store = _store(one)
    return (
        other.piece.store is store
        and store.flat
        and one.stop == other.start
        and one.step == other.step
    )


def _lie_together(tensors: Sequence[Tensor]) -> bool:
    return all(starmap(adjoins, pairwise(tensors)))


def _store(one: Slice) -> Store:
    assert one.piece.store is not None, "made before"
    return one.piece.store


def _item(one: Slice, chain: Chain) -> engine.Item:
    """A slice alone; its step count is its piece's, and is counted by that."""
    store = _store(one)
    states = store.cut(store.used(chain), one.start, one.stop)
    state = LeafState(torch.tensor(one.step, dtype=torch.int64, device="cpu"), states)
    return engine.Item(one.param, one.grad, state, chain.hypers, one.piece.path)
