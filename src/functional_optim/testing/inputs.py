"""Optimizers that take inputs beside the gradients, as the laws step them: with made-up ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from functional_optim.core.state import State
from functional_optim.optimizer import Optimizer
from functional_optim.plan.leaf_inputs import input_names

SCALE = -0.75
"""What inputs are of gradients: of every part of a tensor then, and of its real view, the same."""


@dataclass(frozen=True, eq=False, repr=False)
class Fed(Optimizer):
    """Optimizer whose inputs beside the gradients are made of these functions."""

    def update(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
        **hyper: Any,
    ) -> tuple[Any, State]:
        given = self._given(grads, extra)
        return super().update(params, grads, state, measured=measured, extra=given, **hyper)

    def update_(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
        **hyper: Any,
    ) -> None:
        given = self._given(grads, extra)
        super().update_(params, grads, state, measured=measured, extra=given, **hyper)

    def measure(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> Tensor:
        given = self._given(grads, extra)
        return super().measure(params, grads, state, measured=measured, extra=given)

    def _given(self, grads: Any, extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
        made = optree.tree_map(
            lambda grad: None if grad is None else SCALE * grad,
            grads,
            none_is_leaf=True,
            namespace=self.namespace,
        )
        return {**dict.fromkeys(input_names(self.links), made), **(extra or {})}


def fed(optimizer: Optimizer) -> Optimizer:
    """An optimizer whose leaves are given what its stages take; itself, where they take nothing.

    Args:
        optimizer: any.
    """
    if not input_names(optimizer.links):
        return optimizer
    return Fed(optimizer.links, optimizer.executor, optimizer.namespace, optimizer.overrides)
