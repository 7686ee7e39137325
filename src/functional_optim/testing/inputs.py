"""Optimizers with inputs per leaf that are computed from the gradients, for the laws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from functional_optim.core.state import State
from functional_optim.optimizer import Optimizer
from functional_optim.plan.leaf_inputs import input_names

SCALE = -0.75
"""Factor from gradients to inputs. So inputs of a part, or of a real view, need no extra rule."""


@dataclass(frozen=True, eq=False, repr=False)
class Fed(Optimizer):
    """Optimizer whose inputs per leaf are multiples of the gradients."""

    def update(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Any, State]:
        return super().update(params, grads, state, extra=self._inputs(grads, extra), **options)

    def update_(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().update_(params, grads, state, extra=self._inputs(grads, extra), **options)

    def measure(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> Tensor:
        inputs = self._inputs(grads, extra)
        return super().measure(params, grads, state, measured=measured, extra=inputs)

    def _inputs(self, grads: Any, extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
        scaled = optree.tree_map(
            lambda grad: None if grad is None else SCALE * grad,
            grads,
            none_is_leaf=True,
            namespace=self.namespace,
        )
        return {**dict.fromkeys(input_names(self.links), scaled), **(extra or {})}


def fed(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with computed inputs per leaf; unchanged if no stage has inputs."""
    if not input_names(optimizer.links):
        return optimizer
    return Fed(optimizer.links, optimizer.executor, optimizer.namespace, optimizer.overrides)
