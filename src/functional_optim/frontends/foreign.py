"""An optimizer class that we know nothing of, stepped by gradients that it is given."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import step_without_global_hooks
from functional_optim.core.brief import brief
from functional_optim.core.checks import check_count
from functional_optim.frontends.torch_groups import params_of_groups

_GRADS = threading.RLock()
"""Held while gradients of some optimizer stand in ``.grad``: parameters may be in several."""


class ForeignOptimizer:
    """A local optimizer by any class that reads ``.grad``.

    Args:
        make: takes parameters, or groups of them, first, then ``args`` and ``options``.
        groups: of parameters.
        args: for ``make``.
        options: for ``make``, by name.

    Raises:
        TypeError: it makes something that cannot step.

    Example::

        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> local = ForeignOptimizer(torch.optim.SGD, [{"params": [weight]}], (), {"lr": 0.5})
        >>> local.step([torch.ones(2)])
        >>> weight.detach(), weight.grad
        (tensor([0.5000, 0.5000]), None)
    """

    def __init__(
        self,
        make: Callable[..., Any],
        groups: Sequence[dict[str, Any]],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        self._params: list[Tensor] = [
            one[1] if isinstance(one, tuple) else one for group in groups for one in group["params"]
        ]
        alone = len(groups) == 1 and list(groups[0]) == ["params"]
        self._inner = make(groups[0]["params"] if alone else list(groups), *args, **options)
        if not callable(getattr(self._inner, "step", None)):
            raise TypeError(
                f"{brief(make)} must make an optimizer with step(), it made {brief(self._inner)}"
            )
        own = params_of_groups(self.param_groups)
        if sorted(map(id, own)) == sorted(map(id, self._params)):
            self._params = own  # a class may divide the groups that it is given

    measured_stages = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its own; none where the class keeps none."""
        found: list[dict[str, Any]] = getattr(self._inner, "param_groups", [])
        return found

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group; as they were given if the class groups others."""
        return list(self._params)

    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Step by gradients in ``.grad``, and put back what was there before."""
        if measured:
            self.measure(gradients)
        check_count(gradients, len(self._params))
        with _GRADS:
            before = [param.grad for param in self._params]
            try:
                for param, grad in zip(self._params, gradients, strict=True):
                    param.grad = grad
                self._step()
            finally:
                for param, grad in zip(self._params, before, strict=True):
                    param.grad = grad

    def _step(self) -> None:
        if isinstance(self._inner, torch.optim.Optimizer):
            step_without_global_hooks(self._inner)  # who calls this is an optimizer, too
        else:
            self._inner.step()

    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """A class that is not a chain has no totals that others could have a part in.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{type(self._inner).__name__} is no chain, so it measures nothing")

    def state_dict(self) -> dict[str, Any]:
        """Its own."""
        found: dict[str, Any] = self._inner.state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """By its own method."""
        self._inner.load_state_dict(state_dict)
