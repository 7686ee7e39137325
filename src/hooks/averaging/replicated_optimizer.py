"""The inner steps of stacked replicas: each by its own gradients and with its own state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_optim import LeafState, Optimizer, State
from functional_optim.core.brief import brief
from functional_optim.core.chain import require_gradients_alone, require_nothing_shared
from hooks.averaging.over_replicas import OverReplicas, at_once, slice_of, stacked

Named = dict[str, Tensor]


class ReplicatedOptimizer:
    """Steps stacked parameters by the pure ``update`` of an optimizer, for each replica alone.

        x_k, s_k <- update(x_k, g_k, s_k)        for each replica k

    A rule sees one replica's tensors: norms, and rules for matrices, are those of that replica.
    All replicas make the same number of steps, so a leaf has one count of them, and coefficients
    are computed once. Rules that work element by element give the bits of ranks; those with
    sums over elements or products of matrices do with ``over=one_by_one``.

    Args:
        params: by name, each of shape (count, ...): :attr:`ReplicatedModel.params`. They are
            stepped in place.
        optimizer: any, by any rule.
        over: :func:`~hooks.averaging.at_once` or :func:`~hooks.averaging.one_by_one`.

    Attributes:
        state: as ``optimizer.init`` makes it, with counts of steps that are shared, and all other
            tensors of shape (count, ...). It may be saved, and set to what was saved.

    Raises:
        TypeError: ``optimizer`` is none, or its stages keep numbers that belong to no leaf, or take
            inputs beside the gradients.
        ValueError: no parameters, or what ``optimizer.init`` refuses.

    Example::

        >>> from functional_optim import adamw
        >>> params = {"weight": torch.ones(2, 3)}
        >>> inner = ReplicatedOptimizer(params, adamw(lr=0.5, weight_decay=0.0))
        >>> inner.step({"weight": torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, 1.0]])})
        >>> params["weight"]
        tensor([[0.5000, 0.5000, 0.5000],
                [1.5000, 1.0000, 0.5000]])
        >>> inner.state.leaves["weight"].step
        tensor(1)
    """

    def __init__(
        self, params: Mapping[str, Tensor], optimizer: Optimizer, *, over: OverReplicas = at_once
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an Optimizer, such as adamw(), got {brief(optimizer)}"
            )
        require_nothing_shared(optimizer, "ReplicatedOptimizer")
        require_gradients_alone(optimizer, "ReplicatedOptimizer")
        if not params:
            raise ValueError("params has no parameters: there is nothing to step")
        self._params = dict(params)
        self._over = over
        self.optimizer = optimizer.using(executor="reference")  # the one that torch.func takes
        """The optimizer of each replica."""
        self.state = self._init()

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None], **hyper: Any) -> None:
        """One step of all replicas.

        Args:
            grads: by name, each of the shape of its parameter; None, or left out, where there is
                none in any replica.
            hyper: hyper-parameters for this step only, such as ``lr``.

        Raises:
            TypeError, ValueError: what ``optimizer.update`` refuses, or a name that is no
                parameter's; nothing is changed.
        """
        unknown = sorted(grads.keys() - self._params.keys())
        if unknown:
            raise ValueError(f"there are gradients for {unknown}, which are no parameters here")
        steps = {name: leaf.step for name, leaf in self.state.leaves.items()}

        def of_one(params: Named, given: Named, stages: Mapping[str, Any]) -> Any:
            state = State({name: LeafState(steps[name], stages[name]) for name in params})
            found = {name: given.get(name) for name in params}
            params, state = self.optimizer.update(params, found, state, **hyper)
            return (
                {name: params[name] for name in given},
                {name: state.leaves[name].stages for name in given},
            )

        params = {name: param.detach() for name, param in self._params.items()}
        given = {name: grad for name, grad in grads.items() if grad is not None}
        stages = {name: leaf.stages for name, leaf in self.state.leaves.items()}
        if not given:
            return
        stepped, after = self._over(of_one)(params, given, stages)
        leaves = dict(self.state.leaves)
        for name, value in stepped.items():
            self._params[name].copy_(value)
            leaves[name] = LeafState(steps[name] + 1, after[name])
        self.state = State(leaves)

    def _init(self) -> State:
        params = {name: param.detach() for name, param in self._params.items()}
        count = len(next(iter(params.values())))
        states = [self.optimizer.init(slice_of(params, number)) for number in range(count)]
        stages = stacked(*({n: leaf.stages for n, leaf in one.leaves.items()} for one in states))
        steps = {name: leaf.step for name, leaf in states[0].leaves.items()}
        return State({name: LeafState(steps[name], stages[name]) for name in params})
