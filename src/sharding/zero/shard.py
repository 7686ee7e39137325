"""What one rank owns, its state, and how it is stepped: by ranges, in place, as few as can be."""

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import engine
from functional_optim.checks import check_grad, check_measured
from functional_optim.engine import Item
from functional_optim.executors import EXECUTORS, is_measured
from functional_optim.recipe import Chain, Chains, Recipe
from sharding.shard_plan import ShardPlan
from sharding.zero.account import Account
from sharding.zero.memory import Memory
from sharding.zero.params import Groups
from sharding.zero.runs import Batch, Runs, Slice
from sharding.zero.store import Piece, Request, Store, is_flat

Gradients = Mapping[str, Sequence[tuple[int, int, Tensor]]]
"""By path of a parameter: elements [start, stop) of it, laid flat, and their gradient."""


class Work(NamedTuple):
    """Requests of one group and device."""

    group: int
    device: str
    batch: Batch
    """Those that can be joined."""
    others: tuple[Request, ...]
    """Those that are stepped one by one."""


class Prepared:
    """Requests that were checked, and how they are stepped, for as long as nothing is moved.

    Args:
        requests: to be stepped by these very gradients, once or at many steps.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = tuple(requests)
        self.work: tuple[Work, ...] = ()
        self.layout: object = None
        """What the work holds for: the layout of the shard's runs."""
        self._paths = tuple(dict.fromkeys(one.piece.path for one in self.requests))

    def __iter__(self) -> Iterator[str]:
        """The paths of the parameters, each once, as of gradients by path."""
        return iter(self._paths)


class Shard:
    """What one rank owns.

    Args:
        recipe: what steps it.
        memory: where parameters are.
        plan: who owns what.
        rank: this rank.
    """

    def __init__(self, recipe: Recipe, memory: Memory, plan: ShardPlan, rank: int) -> None:
        self.recipe = recipe
        self.account = Account()
        self._chains = Chains(recipe)
        self._memory = memory
        self._rank = rank
        self._lock = threading.RLock()
        self._runs = Runs()
        self.pieces: dict[str, list[Piece]] = {}
        self._bare: list[Piece] = []  # without state: not trainable so far
        self._empty: list[Store] = []  # with state for options only, which are off
        self.extend(plan)

    def extend(self, plan: ShardPlan) -> None:
        """Pieces of the parameters that a plan has more than before."""
        found: dict[str, list[Piece]] = {}
        for one in plan.owned(self._rank):
            if one.path not in self.pieces:
                home = self._memory.homes[one.path]
                key = home.param
                if not one.whole:
                    assert home.flat is not None, "checked when the plan was"
                    key = home.flat[one.start : one.stop]
                group = plan.specs[one.parameter].group
                piece = Piece(one.path, one.start, one.stop, one.whole, group, home.param, key)
                found.setdefault(one.path, []).append(piece)
        self.pieces.update(found)
        self._bare += [piece for pieces in found.values() for piece in pieces]

    def keys(self, path: str) -> list[Tensor]:
        """What stands in ``.optim`` for what the rank owns of a parameter."""
        return [piece.key for piece in self.pieces.get(path, [])]

    @property
    def measured(self) -> int:
        """How many sums over all gradients the chain needs."""
        return sum(map(is_measured, self.recipe.optimizer.stages))

    def every(self) -> Iterable[Piece]:
        """All pieces."""
        return (piece for pieces in self.pieces.values() for piece in pieces)

    def chain_of(self, piece: Piece, groups: Groups) -> Chain:
        """What steps a piece, by its group's options of now."""
        return self._chains.of(piece.group, groups[piece.group], piece.key.device.type)

    def check_options(self, number: int, group: Mapping[str, Any]) -> None:
        """See whether a group's options make a chain.

        Raises:
            TypeError, ValueError: they do not.
        """
        for kind in {param.device.type for param in group["params"]}:
            self.chain_for(number, group, kind)

    def chain_for(self, number: int, group: Mapping[str, Any], device: str) -> Chain:
        """The chain for a group's options, on a type of device."""
        return self._chains.of(number, group, device)

    def moved(self) -> None:
        """Parameters have other memory: the views of what is cut follow."""
        self._runs.forget()
        for piece in self.every():
            if not piece.whole:
                flat = self._memory.homes[piece.path].flat
                assert flat is not None
                piece.key.data = flat[piece.start : piece.stop]

    def remake(self, groups: Groups, wanted: Container[str]) -> None:
        """New state where options of these groups ask for another, and for the paths wanted."""
        for store in self._stores():
            if store.misfit(self.chain_of(store.pieces[0], groups)):
                self._drop(store)
        self.complete(groups, wanted)

    def _stores(self) -> list[Store]:
        stores = {id(one.store): one.store for one in self.every() if one.store is not None}
        return list(stores.values())

    def _drop(self, store: Store) -> None:
        self._runs.forget()
        self._bare += store.pieces
        for piece in store.pieces:
            piece.store = None
            piece.step.zero_()

    def complete(self, groups: Groups, wanted: Container[str] = ()) -> None:
        """State for every piece that is trainable, has a gradient or is wanted, and has none.

        What has none because an option was off gets it when the option is on, as in torch.
        """
        for store in [one for one in self._empty if one.pieces[0].store is one]:
            if store.misfit(self.chain_of(store.pieces[0], groups)):
                self._drop(store)
        alike: dict[Any, list[Piece]] = {}
        for piece in self._bare:
            if piece.wants_state or piece.path in wanted or self._of_all(piece):
                chain = self.chain_of(piece, groups)
                home = self._memory.homes[piece.path]
                alone = None if is_flat(chain, home) else piece
                key = (piece.group, piece.key.dtype, piece.key.device, alone)
                alike.setdefault(key, []).append(piece)
        for pieces in alike.values():
            pieces.sort(key=self._place)
            homes = [self._memory.homes[piece.path] for piece in pieces]
            store = Store(self.chain_of(pieces[0], groups), pieces, homes)
            if store.is_empty:
                self._empty.append(store)
        if alike:
            self._runs.forget()
            self._empty = [store for store in self._empty if store.pieces[0].store is store]
            self._bare = [piece for piece in self._bare if piece.store is None]

    def _of_all(self, piece: Piece) -> bool:
        """Whether a piece has state though it is not trained: so has it in torch's class."""
        known = piece.key.is_floating_point() or piece.key.is_complex()
        return self.recipe.form.frozen and known

    def _place(self, piece: Piece) -> tuple[int, int]:
        home = self._memory.homes[piece.path]
        return (-1 if home.buffer is None else home.buffer, home.offset + piece.start)

    def prepared(self, gradients: Gradients) -> Prepared:
        """Ranges, each within one that this rank owns.

        Raises:
            ValueError: one that is not, or has a gradient that does not fit.
        """
        found = []
        for path, ranges in gradients.items():
            pieces = self.pieces.get(path, [])
            for start, stop, grad in ranges:
                piece = next((one for one in pieces if one.holds(start, stop)), None)
                if piece is None:
                    own = ", ".join(f"[{one.start}, {one.stop})" for one in pieces) or "nothing"
                    raise ValueError(
                        f"elements [{start}, {stop}) of {path!r} are not this rank's to step: of "
                        f"that parameter it owns {own}"
                    )
                found.append(Request(piece, start, stop, grad))
                self._check(*found[-1])
        return Prepared(found)

    def _check(self, piece: Piece, start: int, stop: int, grad: Any) -> None:
        param = self._memory.homes[piece.path].param
        if isinstance(grad, Tensor) and grad.dim() == 1 and grad.shape != param.shape:
            if grad.numel() != stop - start:
                raise ValueError(
                    f"the gradient of elements [{start}, {stop}) of {piece.path!r} must have "
                    f"{stop - start} elements, got {grad.numel()}"
                )
            check_grad(param.detach().new_empty(0), grad[:0], piece.path)
        elif stop - start == param.numel():
            check_grad(param, grad, piece.path)
        else:
            raise ValueError(
                f"the gradient of elements [{start}, {stop}) of {piece.path!r} must be a tensor of "
                f"{stop - start} elements in one dimension"
            )
        self._check_grain(piece, start, stop)

    def _check_grain(self, piece: Piece, start: int, stop: int) -> None:
        unit = 1 if piece.store is None else piece.store.grain
        ends = stop == piece.stop or (stop - piece.start) % unit == 0
        if (start - piece.start) % unit or not ends:
            raise ValueError(
                f"{piece.path!r} can be stepped in parts that begin at multiples of {unit} "
                f"elements, got [{start}, {stop})"
            )

    def of_grads(self) -> Prepared:
        """Every piece whose parameter has a gradient, with it."""
        found = []
        for path, pieces in self.pieces.items():
            param = self._memory.homes[path].param
            if param.grad is not None:
                check_grad(param, param.grad, path)
                found += [Request(one, one.start, one.stop, param.grad) for one in pieces]
        return Prepared(found)

    def step(self, asked: Prepared, groups: Groups, measured: Sequence[Tensor] = ()) -> None:
        """Step ranges, in place. Everything is checked first.

        Raises:
            RuntimeError: a range that was stepped before in this iteration.
            ValueError: a total that is missing, or what does not fit.
        """
        with self._lock:
            check_measured(self.recipe.optimizer.stages, measured)
            if len(measured) < self.measured:
                raise ValueError(
                    f"this chain needs {self.measured} totals over the gradients of all ranks, got "
                    f"{len(measured)}; make them with measure() and total()"
                )
            self.complete(groups)
            self.account.check(asked.requests)
            for chain, batch, items in self._chained(asked, groups):
                if items:
                    engine.update_(chain.stages, EXECUTORS[chain.executor], items, measured)
                if batch.slices:
                    self._runs.step(chain, batch, measured)
            self.account.enter(asked.requests)

    def measures(
        self, asked: Prepared, groups: Groups, measured: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """By path, the addend of the next total that the chain needs."""
        if not self.measured:
            raise ValueError("this chain needs no total over all gradients: step_owned is enough")
        check_measured(self.recipe.optimizer.stages, measured, asked=1)
        by_path: dict[str, list[Request]] = {}
        for one in asked.requests:
            by_path.setdefault(one.piece.path, []).append(one)
        found: dict[str, Tensor] = {}
        with self._lock, torch.no_grad():
            self.complete(groups)
            for path, own in by_path.items():
                for chain, batch, items in self._chained(Prepared(own), groups):
                    every = [*items, *self._runs.items(chain, batch.slices)]
                    executor = EXECUTORS[chain.executor]
                    found[path] = engine.measure(chain.stages, executor, every, measured)
        return found

    def _chained(self, asked: Prepared, groups: Groups) -> list[tuple[Chain, Batch, list[Item]]]:
        """What there is to do, with the chains of now. Raises before anything is done."""
        if asked.layout is not self._runs.layout:
            asked.work = self._work(asked)
            asked.layout = self._runs.layout
        found = []
        for group, device, batch, others in asked.work:
            chain = self.chain_for(group, groups[group], device)
            batch.used(chain)
            found.append((chain, batch, [self._item(one, chain) for one in others]))
        return found

    def _work(self, asked: Prepared) -> tuple[Work, ...]:
        """Requests by the chain that steps them."""
        found: dict[tuple[int, torch.device], tuple[list[Slice], list[Request]]] = {}
        for one in asked.requests:
            self._check_grain(*one[:3])  # it may have other state than when it was prepared
            slices, others = found.setdefault((one.piece.group, one.piece.key.device), ([], []))
            slice_ = self._slice(one)
            if slice_ is None:
                others.append(one)
            else:
                slices.append(slice_)
        return tuple(
            Work(group, device.type, Batch(slices), tuple(others))
            for (group, device), (slices, others) in found.items()
        )

    def _slice(self, one: Request) -> Slice | None:
        """A request as a slice; None where its elements do not lie in one dimension."""
        piece, store = one.piece, one.piece.store
        assert store is not None, "completed before"
        home = self._memory.homes[piece.path]
        grad = self._flat_gradient(one)
        # A complex parameter is seen as its real view: that is the engine's work.
        if not store.flat or grad is None or grad.is_complex():
            return None
        assert home.flat is not None
        start = piece.offset + one.start - piece.start
        return Slice(piece, start, home.flat[one.start : one.stop], grad)

    def _item(self, one: Request, chain: Chain) -> Item:
        """A request that is stepped alone."""
        piece, store = one.piece, one.piece.store
        assert store is not None, "completed before"
        if (one.start, one.stop) != (piece.start, piece.stop):
            raise ValueError(
                f"{piece.path!r} lies in another order than its shape, or keeps a state that "
                "cannot be cut, so all that this rank owns of it is stepped at once: "
                f"[{piece.start}, {piece.stop}), got [{one.start}, {one.stop})"
            )
        state = store.shaped(piece, chain)
        state = state._replace(step=state.step.clone())
        if piece.whole:
            param = self._memory.homes[piece.path].param
            # A flat one is of a bucket, and dense; a sparse one cannot be reshaped.
            of_bucket = one.grad.dim() == 1 and one.grad.shape != param.shape
            grad = one.grad.reshape(param.shape) if of_bucket else one.grad
            return Item(param.detach(), grad.detach(), state, chain.hypers, piece.path)
        flat = self._flat_gradient(one)
        assert flat is not None
        return Item(piece.key, flat, state, chain.hypers, piece.path)

    def _flat_gradient(self, one: Request) -> Tensor | None:
        """The gradient in the order in which the elements lie in memory; None where it is not."""
        param, grad = self._memory.homes[one.piece.path].param, one.grad.detach()
        if grad.layout != torch.strided:
            if not one.piece.whole:
                raise RuntimeError(
                    f"the gradient of {one.piece.path!r} is sparse, and the parameter is cut "
                    "between ranks; take a policy that leaves parameters whole, or dense gradients"
                )
            return None
        grad = grad.resolve_conj().resolve_neg()
        if grad.shape != param.shape:
            return grad if param.is_contiguous() else None
        if param.is_contiguous() and (grad.is_contiguous() or not one.piece.whole):
            flat = grad.reshape(-1)
        elif (
            grad.stride() == param.stride() and self._memory.homes[one.piece.path].flat is not None
        ):
            flat = grad.as_strided((grad.numel(),), (1,))
        else:
            return None
        return flat[one.start : one.stop]
