"""Joint step of the local shards of one group, on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from functional_optim.core.initial import Fields
from functional_optim.frontends.recipe import GroupChain
from functional_optim.kernels import EXECUTORS
from functional_optim.plan import PlannedLeaves, engine, reduction
from functional_optim.plan.item import Item
from sharding.zero.local_shard import LocalShard


class GroupPlan:
    """A step of certain local shards, for as long as these keep their memory and their state.

    Args:
        shards: of one group, on one type of device.
    """

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self.group = shards[0].group
        """The number of their parameter group."""
        self.device = shards[0].device
        self._shards = shards
        alike = {(one.tensor.shape, one.tensor.dtype, one.fields): one for one in shards}
        self._alike = list(alike.values())
        self._chain: GroupChain | None = None
        self._fields: list[Fields] = []
        self._items: list[Item] = []
        self._plan: PlannedLeaves | None = None

    def fit(self, chain: GroupChain) -> None:
        """Step by this chain from now on.

        Raises:
            ValueError: it asks for state that was not made.
        """
        before, self._chain = self._chain, None
        if chain is not before:
            fields = [one.fitted(chain) for one in self._alike]
            same = before is not None and before._replace(hypers=()) == chain._replace(hypers=())
            if not same or fields != self._fields:
                self._items, self._plan = [_item(one, chain) for one in self._shards], None
            self._fields = fields
        self._chain = chain
        if self._plan is None:
            for one in self._shards:
                one.begin_anew(chain)

    def prepared(self, gradients: list[Tensor], measured: Sequence[Tensor]) -> Callable[[], object]:
        """Return the call that steps all shards in place; all errors are raised now.

        Args:
            gradients: as :func:`gradient_of` gives them.
            measured: the totals of measured stages.
        """
        chain = self._chain
        assert chain is not None
        if self._plan is not None:
            steps = self._plan.prepared(gradients, [chain.hypers], measured)
            if steps is not None:
                return steps.make
        self._check(gradients)  # a plan that takes them has seen to it
        executor, items = EXECUTORS[chain.executor], self._given(gradients)
        make = engine.prepared(chain.stages, executor, items, measured)

        def step() -> None:
            make()
            self._plan = PlannedLeaves(chain.stages, executor, items, [0] * len(items))

        return step

    def measures(
        self, gradients: Sequence[Tensor], measured: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """By path, what shards add to the next total that the chain needs."""
        assert self._chain is not None
        self._check(gradients)
        by_path: dict[str, list[Item]] = {}
        for item in self._given(gradients):
            by_path.setdefault(item.name, []).append(item)
        stages, executor = self._chain.stages, EXECUTORS[self._chain.executor]
        return {
            path: reduction.measure(stages, executor, items, measured)
            for path, items in by_path.items()
        }

    def _check(self, gradients: Sequence[Tensor]) -> None:
        """Gradients that belong to the shards.

        Raises:
            TypeError, ValueError: one does not fit.
        """
        for one, grad in zip(self._shards, gradients, strict=True):
            check_grad(one.tensor, grad, one.path)

    def _given(self, gradients: Sequence[Tensor]) -> list[Item]:
        """The leaves with these gradients, and the hyper-parameters of now."""
        assert self._chain is not None
        hypers = self._chain.hypers
        return [
            item._replace(grad=grad, hypers=hypers)
            for item, grad in zip(self._items, gradients, strict=True)
        ]


def _item(one: LocalShard, chain: GroupChain) -> Item:
    """A shard as a leaf. In the place of the gradient stands what is there anyway."""
    tensor = one.tensor.detach()
    return Item(tensor, tensor, one.state_for(chain), chain.hypers, one.path)


def gradient_of(one: LocalShard, given: Any) -> Tensor:
    """A gradient of all of the parameter, or of the shard, as the shard itself lies.

    Raises:
        RuntimeError: a sparse one, for a part.
        TypeError, ValueError: it does not fit.
    """
    grad = _as_shard(one, given) if isinstance(given, Tensor) else given
    check_grad(one.tensor, grad, one.path)
    return grad.detach() if grad.requires_grad else grad


def own_gradient_of(one: LocalShard) -> Tensor | None:
    """Return the parameter's ``.grad``, which torch has seen to fit, as the shard lies; or None.

    Raises:
        RuntimeError: a sparse one, for a part.
    """
    grad = one.param.grad
    if grad is None:
        return None
    own = grad if one.whole else _as_shard(one, grad)
    return own.detach() if own.requires_grad else own


def _as_shard(one: LocalShard, grad: Tensor) -> Tensor:
    param = one.param
    in_shape = grad.shape == param.shape
    if one.whole:
        flat = not in_shape and grad.dim() == 1 and grad.numel() == one.numel
        return grad.reshape(param.shape) if flat else grad
    if not in_shape:
        return grad
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {one.path!r} is sparse, and the parameter is cut between ranks; "
            "take a policy that leaves parameters whole, or dense gradients"
        )
    return grad.reshape(-1)[one.start : one.stop]
