"""Neighbouring ranges joined: one kernel call steps whatever lies side by side.

What can be joined depends on where parameters, state and gradients lie, which is mostly the same at
every step: so it is found out once, and used again as long as it holds.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import engine
from functional_optim.executors import EXECUTORS, LaneExecutor, Leaf
from functional_optim.executors.exact.program import Table
from functional_optim.executors.lanes import why_not_pointwise
from functional_optim.recipe import Chain
from functional_optim.state import LeafState, state_tensors
from sharding.zero.memory import SMALL, adjoins, joined
from sharding.zero.store import Piece, Store, Used

Made = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Hyper-parameters and coefficients of every stage, for one step."""

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

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.start + self.param.numel()

    @property
    def step(self) -> int:
        """Steps made before."""
        return int(self.piece.step)


class Batch:
    """Slices of one group and device, for as long as they and their gradients lie where they do.

    Args:
        slices: in any order.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = tuple(slices)
        stores = {id(one.piece.store): _store(one) for one in slices}
        self._stores = tuple(stores.values())
        self.layout = (
            tuple((id(one.piece), one.start, one.param.numel()) for one in slices),
            tuple(adjoins(one.grad, other.grad) for one, other in pairwise(slices)),
        )
        """What the ways of joining them depend on."""
        self.dense = all(one.grad.is_contiguous() for one in slices)
        """Whether the elements of each gradient lie end to end."""
        self._grads: dict[tuple[int, ...], list[Tensor]] = {}

    def mark_changed(self) -> None:
        """Tell autograd that the state of all slices was written to."""
        for store in self._stores:
            store.mark_changed()

    def used(self, chain: Chain) -> tuple[Used, ...]:
        """Which state a chain uses, store by store.

        Raises:
            ValueError: it asks for what was not made.
        """
        return tuple(store.used(chain) for store in self._stores)

    def gradient(self, places: tuple[int, ...]) -> Tensor:
        """The gradients of some of the slices, as one, whose elements lie end to end."""
        if places not in self._grads:
            grads = [self.slices[place].grad for place in places]
            self._grads[places] = [joined(grads)] if _lie_together(grads) else grads
        found = self._grads[places]
        return found[0] if len(found) == 1 and found[0].is_contiguous() else torch.cat(found)


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

    def leaf(self, batch: Batch, chain: Chain, step: float, made: Made) -> Leaf:
        """The lane of this step.

        Args:
            batch: with the slices at hand.
            chain: that steps them.
            step: its number.
            made: hyper-parameters and coefficients of this step.
        """
        param = torch.cat(self.params) if self.apart else self.params[0]
        if self._memo[0] is not chain.hypers:
            self._memo = (chain.hypers, {})
        grad = batch.gradient(self.places)
        return Leaf(param, grad, self.states, made[1], self.name, made[0], step, self._memo[1])

    def write(self, leaf: Leaf) -> None:
        """Bring a stepped lane to the parameters, where they were copied for it."""
        if self.apart:
            pieces = list(leaf.param.split([param.numel() for param in self.params]))
            torch._foreach_copy_(self.params, pieces)


class _Group(NamedTuple):
    """Slices that one call steps where they lie."""

    places: list[int]
    """Which of the slices at hand they are."""
    longest: Run
    """The longest of them alone: of a single element, what it has per block looks like what it has
    per element."""
    table: Table


def _group(slices: Sequence[Slice], places: list[int], chain: Chain) -> _Group:
    runs = [Run([slices[at]], [at], _store(slices[at]).used(chain)) for at in places]
    tensors = [
        [run.params[0], slices[run.places[0]].grad, *state_tensors(run.states)] for run in runs
    ]
    longest = max(runs, key=lambda run: run.params[0].numel())
    return _Group(places, longest, Table.of_tensors(tensors))


def _apart(steps: Sequence[int]) -> tuple[int, ...]:
    """How far the step counts are from the first; nothing where they are one."""
    return tuple(step - steps[0] for step in steps) if len(set(steps)) > 1 else ()


class Runs:
    """Ways of joining slices, remembered."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Run]] = {}
        self._joined: dict[Any, list[_Group]] = {}
        self._made: tuple[Chain | None, dict[int, Made]] = (None, {})
        self.layout = object()
        """Another one whenever something lies elsewhere than before."""

    def forget(self) -> None:
        """Something lies elsewhere now."""
        self._known.clear()
        self._joined.clear()
        self.layout = object()

    def step(self, chain: Chain, batch: Batch, totals: Sequence[Tensor]) -> None:
        """Step a batch by as few calls as can be."""
        executor = EXECUTORS[chain.executor]
        if not isinstance(executor, LaneExecutor) or why_not_pointwise(chain.stages):
            engine.update_(chain.stages, executor, self.items(chain, batch.slices), totals)
            return
        steps = [one.step for one in batch.slices]
        made = self._coefficients(chain, set(steps))
        if not self._step_joined(chain, executor, batch, steps, made, totals):
            self._step_runs(chain, executor, batch, steps, made, totals)
        batch.mark_changed()

    def _step_runs(
        self,
        chain: Chain,
        executor: LaneExecutor,
        batch: Batch,
        steps: Sequence[int],
        made: Mapping[int, Made],
        totals: Sequence[Tensor],
    ) -> None:
        """Step neighbours together, run by run."""
        runs = self._of(batch, steps, chain, exact=executor.exact)
        with torch.no_grad():
            leaves = []
            for run in runs:
                step = steps[run.places[0]]
                leaves.append(run.leaf(batch, chain, step + 1.0, made[step]))
            executor.require(chain.stages, leaves)
            for run, leaf in zip(runs, leaves, strict=True):
                if leaf.param.numel():
                    executor.step_lane(chain.stages, leaf, totals)
                    run.write(leaf)

    def _step_joined(
        self,
        chain: Chain,
        executor: LaneExecutor,
        batch: Batch,
        steps: Sequence[int],
        made: Mapping[int, Made],
        totals: Sequence[Tensor],
    ) -> bool:
        """Step slices where they lie, all that are at the same step in one call.

        Returns:
            Whether that was done; if not, nothing was changed.
        """
        slices = batch.slices
        if not slices or not batch.dense or not all(_store(one).flat for one in slices):
            return False
        work = []
        for group in self._groups(batch, steps, chain):
            step = steps[group.places[0]]
            like = group.longest.leaf(batch, chain, step + 1.0, made[step])
            if not executor.is_cut_freely(chain.stages, like):
                return False
            grads = [slices[at].grad.data_ptr() for at in group.places]
            work.append((like, group.table.by(grads)))
        with torch.no_grad():
            for place, (like, table) in enumerate(work):
                if not executor.step_table(chain.stages, like, table, totals):
                    assert place == 0, "a kernel takes all of them, or none"
                    return False
        return True

    def _groups(self, batch: Batch, steps: Sequence[int], chain: Chain) -> list[_Group]:
        """Slices that are stepped by one call, wherever they lie."""
        signature = (batch.used(chain), batch.layout[0], _apart(steps))
        found = self._joined.get(signature)
        if found is None:
            if len(self._joined) >= KEPT:
                self._joined.clear()
            alike: dict[Any, list[int]] = {}
            for place, one in enumerate(batch.slices):
                key = (steps[place], one.param.dtype, one.grad.dtype)
                alike.setdefault(key, []).append(place)
            found = self._joined[signature] = [
                _group(batch.slices, places, chain) for places in alike.values()
            ]
        return found

    def items(self, chain: Chain, slices: Sequence[Slice]) -> list[engine.Item]:
        """Slices as the engine takes them, one by one."""
        return [_item(one, chain) for one in slices]

    def _coefficients(self, chain: Chain, steps: set[int]) -> dict[int, Made]:
        """Hyper-parameters and coefficients by the steps made before; the last ones are kept."""
        known = self._made[1] if self._made[0] is chain else {}
        found = {
            step: known[step]
            if step in known
            else engine.coefficients_at(chain.stages, chain.hypers, step + 1.0)
            for step in steps
        }
        self._made = (chain, found)
        return found

    def _of(self, batch: Batch, steps: Sequence[int], chain: Chain, *, exact: bool) -> list[Run]:
        slices = batch.slices
        signature = (exact, batch.used(chain), batch.layout, _apart(steps))
        found = self._known.get(signature)
        if found is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            found = self._known[signature] = [
                Run([slices[at] for at in places], places, _store(slices[places[0]]).used(chain))
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
