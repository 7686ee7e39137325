"""What one rank owns, its state, and how it is stepped: by ranges, in place."""

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad, check_measured
from functional_optim.frontends.recipe import Chain, Chains
from functional_optim.kernels import is_measured
from sharding.shard_plan import ShardPlan
from sharding.zero.account import Account
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.memory import Memory
from sharding.zero.params import Groups
from sharding.zero.range_plan import RangePlan, gradient_of
from sharding.zero.store import Piece, Request, Store, is_flat

Gradients = Mapping[str, Sequence[tuple[int, int, Tensor]]]
"""By path of a parameter: elements [start, stop) of it, laid flat, and their gradient."""


PLANS = 64
"""For how many sets of ranges plans are kept, beside those of what was prepared."""


class Prepared:
    """Requests that were checked, and how they are stepped, for as long as nothing is moved.

    Args:
        requests: to be stepped by these very gradients, once or at many steps.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = tuple(requests)
        self.plans: tuple[tuple[RangePlan, list[Tensor]], ...] = ()
        """What steps them, and by which gradients."""
        self.layout: object = None
        """What the plans hold for: where everything in the shard lies."""
        self._paths = tuple(dict.fromkeys(one.piece.path for one in self.requests))

    def __iter__(self) -> Iterator[str]:
        """The paths of the parameters, each once, as of gradients by path."""
        return iter(self._paths)


class Shard:
    """What one rank owns.

    Args:
        recipes: what steps each group.
        memory: where parameters are.
        plan: who owns what.
        rank: this rank.
    """

    def __init__(self, recipes: GroupRecipes, memory: Memory, plan: ShardPlan, rank: int) -> None:
        self.recipes = recipes
        self.recipe = recipes.whole
        self.account = Account()
        self._chains = Chains(recipes.of)
        self._memory = memory
        self._rank = rank
        self._lock = threading.RLock()
        self._plans: dict[Any, RangePlan] = {}
        self._layout = object()
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
        new = (piece for pieces in found.values() for piece in pieces)
        self._bare += [piece for piece in new if not self._is_frozen(piece)]

    def keys(self, path: str) -> list[Tensor]:
        """What stands in ``.optim`` for what the rank owns of a parameter."""
        return [piece.key for piece in self.pieces.get(path, [])]

    @property
    def measured_stages(self) -> int:
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
        self._forget_plans()
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
        self._forget_plans()
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
            self._forget_plans()
            self._empty = [store for store in self._empty if store.pieces[0].store is store]
            self._bare = [piece for piece in self._bare if piece.store is None]

    def _is_frozen(self, piece: Piece) -> bool:
        """Whether no stage acts on a piece: it is never stepped, and has no state."""
        return not self.recipes.of(piece.group).optimizer.links

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

    def of_pieces(self, pairs: Iterable[tuple[Piece, Tensor | None]]) -> Prepared:
        """Pieces that have a gradient, with it: of the whole parameter, or of the piece."""
        found = []
        for piece, grad in pairs:
            if isinstance(grad, Tensor) and grad.shape == piece.param.shape:
                check_grad(piece.param, grad, piece.path)
            elif grad is not None:
                self._check(piece, piece.start, piece.stop, grad)
            if grad is not None:
                found.append(Request(piece, piece.start, piece.stop, grad))
        return Prepared(found)

    def step(self, asked: Prepared, groups: Groups, measured: Sequence[Tensor] = ()) -> None:
        """Step ranges, in place. Everything is checked first.

        Raises:
            RuntimeError: a range that was stepped before in this iteration.
            ValueError: a total that is missing, or what does not fit.
        """
        with self._lock:
            check_measured(self.recipe.optimizer.stages, measured)
            if len(measured) < self.measured_stages:
                raise ValueError(
                    f"this chain needs {self.measured_stages} totals of all ranks' gradients, got "
                    f"{len(measured)}; make them with measure() and total()"
                )
            self.complete(groups)
            self.account.check(asked.requests)
            for plan, gradients in self._planned(asked, groups):
                plan.step(gradients, measured)
            self.account.enter(asked.requests)

    def measures(
        self, asked: Prepared, groups: Groups, measured: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """By path, the addend of the next total that the chain needs."""
        if not self.measured_stages:
            raise ValueError("this chain needs no total over all gradients: step_owned is enough")
        check_measured(self.recipe.optimizer.stages, measured, asked=1)
        found: dict[str, Tensor] = {}
        with self._lock, torch.no_grad():
            self.complete(groups)
            for plan, gradients in self._planned(asked, groups):
                found.update(plan.measures(gradients, measured))
        return found

    def _planned(
        self, asked: Prepared, groups: Groups
    ) -> tuple[tuple[RangePlan, list[Tensor]], ...]:
        """Plans that step by the options of now. Raises before anything is done."""
        if asked.layout is not self._layout:
            asked.plans = self._plans_for(asked.requests)
            asked.layout = self._layout
        for plan, _ in asked.plans:
            plan.fit(self.chain_for(plan.group, groups[plan.group], plan.device))
        return asked.plans

    def _plans_for(self, requests: Iterable[Request]) -> tuple[tuple[RangePlan, list[Tensor]], ...]:
        """Requests by the plan that steps them."""
        alike: dict[Any, list[Request]] = {}
        for one in requests:
            piece = one.piece
            if self._is_frozen(piece):
                continue
            self._check_grain(*one[:3])  # it may have other state than when it was prepared
            if one.start < one.stop or not (piece.store and piece.store.flat):
                alike.setdefault((piece.group, piece.key.device), []).append(one)
        found = []
        for own in alike.values():
            own.sort(key=_place_in_store)  # so that neighbours can be stepped as one
            key = tuple([one[:3] for one in own])
            if key not in self._plans:
                if len(self._plans) >= PLANS:
                    self._plans.clear()
                self._plans[key] = RangePlan(own, self._memory)
            homes = self._memory.homes
            gradients = [gradient_of(one, homes[one.piece.path]) for one in own]
            found.append((self._plans[key], gradients))
        return tuple(found)

    def _forget_plans(self) -> None:
        """Something lies elsewhere now, or is another's."""
        self._plans.clear()
        self._layout = object()


def _place_in_store(one: Request) -> int:
    return one.piece.offset + one.start - one.piece.start
