"""Ranges that are stepped together: leaves of the engine, and the plan that steps them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.state import LeafState
from functional_optim.frontends.recipe import Chain
from functional_optim.kernels import EXECUTORS
from functional_optim.plan import StepPlan, engine, uncounted
from functional_optim.plan.engine import Item
from sharding.zero.memory import Home, Memory
from sharding.zero.store import Piece, Request, Store


class RangePlan:
    """How ranges of one group, on one device, are stepped: for as long as nothing is moved.

    A range is a leaf like any other. How many steps it has made is counted by its piece, once all
    of that was stepped.

    Args:
        requests: the ranges; their gradients are not kept.
        memory: where parameters are.

    Raises:
        ValueError: a part of what can only be stepped as a whole.
    """

    def __init__(self, requests: Sequence[Request], memory: Memory) -> None:
        first = requests[0].piece
        self.group = first.group
        """The number of their parameter group."""
        self.device = first.key.device.type
        self._ranges = [(one.piece, one.start, one.stop) for one in requests]
        self._homes = [memory.homes[one.piece.path] for one in requests]
        for one, home in zip(requests, self._homes, strict=True):
            _check_cut(one, home)
        self._stores = list({id(one.piece.store): _store(one.piece) for one in requests}.values())
        self._chain: Chain | None = None
        self._fields: Any = None
        self._items: list[Item] = []
        self._plan: StepPlan | None = None

    def fit(self, chain: Chain) -> None:
        """Step by this chain from now on.

        Raises:
            ValueError: it asks for state that was not made.
        """
        before, self._chain = self._chain, None
        if chain is not before:
            fields = [store.fields(chain) for store in self._stores]
            same = before is not None and before._replace(hypers=()) == chain._replace(hypers=())
            if not same or fields != self._fields:
                self._items, self._plan = self._leaves(chain), None
            self._fields = fields
        self._chain = chain

    def items(self, gradients: Sequence[Tensor]) -> list[Item]:
        """The ranges as the engine steps them, with these gradients; nobody counts those steps."""
        assert self._chain is not None
        hypers = self._chain.hypers
        return [
            item._replace(grad=grad, hypers=hypers, state=uncounted(item.state))
            for item, grad in zip(self._items, gradients, strict=True)
        ]

    def step(self, gradients: list[Tensor], measured: Sequence[Tensor]) -> None:
        """Step all of them, in place.

        Args:
            gradients: as :func:`gradient_of` gives them.
            measured: the totals of measured stages.
        """
        chain = self._chain
        assert chain is not None
        if self._plan is not None and self._plan.make(gradients, [chain.hypers], measured):
            return
        executor, items = EXECUTORS[chain.executor], self.items(gradients)
        engine.update_(chain.stages, executor, items, measured)
        counted = [
            item._replace(state=known.state) for item, known in zip(items, self._items, strict=True)
        ]
        self._plan = StepPlan(chain.stages, executor, counted, [0] * len(items), counted=False)

    def measures(
        self, gradients: Sequence[Tensor], measured: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """By path, what ranges add to the next total that the chain needs."""
        assert self._chain is not None
        by_path: dict[str, list[Item]] = {}
        for item in self.items(gradients):
            by_path.setdefault(item.name, []).append(item)
        stages, executor = self._chain.stages, EXECUTORS[self._chain.executor]
        return {
            path: engine.measure(stages, executor, items, measured)
            for path, items in by_path.items()
        }

    def _leaves(self, chain: Chain) -> list[Item]:
        """The ranges as leaves. In the place of the gradient stands what is there anyway."""
        found = []
        for (piece, start, stop), home in zip(self._ranges, self._homes, strict=True):
            store = _store(piece)
            if (start, stop) == (piece.start, piece.stop):
                param, state = piece.key.detach(), store.shaped(piece, chain)
            else:
                assert home.flat is not None, "checked before"
                param = home.flat[start:stop]
                state = LeafState(piece.step, store.cut(piece, chain, start, stop))
            found.append(Item(param, param, state, chain.hypers, piece.path))
        return found


def gradient_of(one: Request, home: Home) -> Tensor:
    """The gradient of a range as the range itself lies: for a whole parameter, in its shape.

    Raises:
        RuntimeError: a sparse one, for a part.
    """
    piece, grad, param = one.piece, one.grad, home.param
    if grad.requires_grad:
        grad = grad.detach()
    in_shape = grad.shape == param.shape
    if piece.whole and (one.start, one.stop) == (piece.start, piece.stop):
        return grad if in_shape else grad.reshape(param.shape)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {piece.path!r} is sparse, and the parameter is cut between ranks; "
            "take a policy that leaves parameters whole, or dense gradients"
        )
    return grad.reshape(-1)[one.start : one.stop] if in_shape else grad


def _check_cut(one: Request, home: Home) -> None:
    piece = one.piece
    in_order = _store(piece).flat and home.param.is_contiguous()
    if not in_order and (one.start, one.stop) != (piece.start, piece.stop):
        raise ValueError(
            f"{piece.path!r} lies in another order than its shape, or keeps a state that cannot be "
            "cut, so all that this rank owns of it is stepped at once: "
            f"[{piece.start}, {piece.stop}), got [{one.start}, {one.stop})"
        )


def _store(piece: Piece) -> Store:
    assert piece.store is not None, "completed before"
    return piece.store
