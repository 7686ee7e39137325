"""OpaqueOptimizer: an optimizer class without a functional equivalent, as a LocalOptimizer."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.modules import step_without_global_hooks
from functional_optim.core.checks import check_count
from functional_optim.core.format import format_value
from functional_optim.frontends.torch_groups import params_of_groups

_GRADS = threading.RLock()
"""Lock on ``.grad`` during a step, since several optimizers may have the same parameters."""


class OpaqueRecipe(NamedTuple):
    """An optimizer class without a functional equivalent, with its arguments."""

    make: Callable[..., Any]
    """The class, or a function that returns an optimizer. Its first argument is the parameters or
    parameter groups."""
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    defaults: Mapping[str, Any] = {}
    """Empty: only the class knows its defaults."""


class OpaqueOptimizer:
    """A local optimizer that writes gradients to ``.grad``, and calls ``step`` of another class."""

    def __init__(self, recipe: OpaqueRecipe, groups: Sequence[dict[str, Any]]) -> None:
        self._params: list[Tensor] = [
            one[1] if isinstance(one, tuple) else one for group in groups for one in group["params"]
        ]
        alone = len(groups) == 1 and list(groups[0]) == ["params"]
        given = groups[0]["params"] if alone else list(groups)
        self._inner = recipe.make(given, *recipe.args, **recipe.options)
        if not callable(getattr(self._inner, "step", None)):
            raise TypeError(
                f"{format_value(recipe.make)} must make an optimizer with step(), it made "
                f"{format_value(self._inner)}"
            )
        own = params_of_groups(self.param_groups)
        if sorted(map(id, own)) == sorted(map(id, self._params)):
            self._params = own  # the class may have divided the groups

    measured_stages = 0
    state_keys: Collection[str] = ()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer; empty if it has none."""
        found: list[dict[str, Any]] = getattr(self._inner, "param_groups", [])
        return found

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group; in the given order if the class has other parameters."""
        return list(self._params)

    def step_by(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> None:
        """Write gradients to ``.grad``, step, and restore ``.grad``."""
        if measured:
            self.measure(gradients)
        check_count(gradients, len(self._params))
        with _GRADS:
            before = [param.grad for param in self._params]
            try:
                for param, grad in zip(self._params, gradients, strict=True):
                    param.grad = grad
                if isinstance(self._inner, torch.optim.Optimizer):
                    # The front-end is an optimizer too, and calls the global hooks itself.
                    step_without_global_hooks(self._inner)
                else:
                    self._inner.step()
            finally:
                for param, grad in zip(self._params, before, strict=True):
                    param.grad = grad

    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Raise ValueError: only chains have totals."""
        raise ValueError(
            f"{type(self._inner).__name__} is not a chain, so it has no totals; do not call measure"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        found: dict[str, Any] = self._inner.state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer."""
        self._inner.load_state_dict(state_dict)
