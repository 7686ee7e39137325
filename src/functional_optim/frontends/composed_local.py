"""A local optimizer whose leaves differ in their chains, or that keeps what belongs to no leaf."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.checks import check_count, check_grad, check_measured
from functional_optim.core.compiling import uncompiled
from functional_optim.core.one_at_a_time import StepLock, one_at_a_time
from functional_optim.frontends.recipe import ComposedRecipe
from functional_optim.frontends.torch_composed import ComposedGroups
from functional_optim.frontends.torch_flat import Group
from functional_optim.frontends.torch_groups import options_of, params_of_groups
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.kernels import needs_total
from functional_optim.optimizer import Optimizer


class _Given(TorchOptimizer):
    """Groups with a chain each, stepped by given gradients, group by group."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
        super().__init__([dict(group) for group in groups], optimizer)
        self.params = params_of_groups(self.param_groups)

    @property
    def _chains(self) -> ComposedGroups:
        assert self._composed is not None, "of a ComposedRecipe"
        return self._composed

    @property
    def numbers(self) -> dict[str, Any]:
        """Entries of groups that are no options."""
        return self._chains.numbers()

    @uncompiled
    def step_by(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> None:
        """Make a step; ``.grad`` is neither read nor written."""
        given = self._by_parameter(gradients)
        self._lock.alone(self._step_by, given, measured)

    @uncompiled
    def measure(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> Tensor:
        """Return each parameter's addend to the next total: a number, or a row of several."""
        check_measured(self.chain.stages, measured, asked=1)
        given = self._by_parameter(gradients)
        return self._lock.alone(self._measure, given, measured)

    def _by_parameter(self, gradients: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        check_count(gradients, len(self.params))
        return dict(zip(map(id, self.params), gradients, strict=True))

    def _step_by(self, given: Mapping[int, Tensor | None], measured: Sequence[Tensor]) -> None:
        groups = self._groups()
        self._check(groups, given)
        self._chains.step(
            groups, self.state, self._leaf_state, partial(_given_to, given), {}, measured
        )
        self._chains.show(self.param_groups)

    def _measure(self, given: Mapping[int, Tensor | None], measured: Sequence[Tensor]) -> Tensor:
        groups, chains = self._groups(), self._chains
        self._check(groups, given)
        by_id, nothing = chains.addends(
            groups, self.state, self._leaf_state, partial(_given_to, given), measured
        )
        return torch.stack([by_id.get(id(one), nothing).cpu() for one in self.params])

    def _check(self, groups: Sequence[Group], given: Mapping[int, Tensor | None]) -> None:
        """Gradients of frozen parameters are looked at, too."""
        for group in groups:
            for param, name in group.every():
                grad = given[id(param)]
                if grad is not None:
                    check_grad(param, grad, name)


def _given_to(given: Mapping[int, Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of parameters, by their identity."""
    return [given[id(one)] for one in params]


class ComposedLocal:
    """A local optimizer by an optimizer of optimizers: groups are divided, so each has one chain.

    Gradients are in the order of ``params``: group by group, after the division. Numbers that
    belong to no parameter are the same functions of the same totals wherever they are made, so all
    parts of a model that are given the same totals agree on them.

    Args:
        recipe: of the optimizer.
        groups: of parameters, or pairs of a name and a parameter.

    Raises:
        TypeError: a stage that needs inputs beside the gradients.
        ValueError: a parameter on which no rule acts; an option out of bounds.
    """

    def __init__(self, recipe: ComposedRecipe, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lock = StepLock()
        require_gradients_alone(recipe.optimizer, "an optimizer that is given its gradients")
        first = next(one for group in groups for one in group["params"])
        param = first[1] if isinstance(first, tuple) else first
        device = param.device.type if isinstance(param, Tensor) else "cpu"
        self._inner = _Given(groups, recipe.made({}, device))
        self.param_groups: list[dict[str, Any]] = []
        self._take_over()

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group as in ``param_groups``."""
        return list(self._inner.params)

    @property
    def measured_stages(self) -> int:
        """Number of stages of the optimizer that need totals over all gradients."""
        return sum(map(needs_total, self._inner.chain.stages))

    @one_at_a_time
    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Make a step, by the current options."""
        self._hand_on()
        self._inner.step_by(gradients, measured)

    @one_at_a_time
    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total; a row of several, where needed."""
        self._hand_on()
        return self._inner.measure(gradients, measured)

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Options and state, as a TorchOptimizer of the same optimizer writes them."""
        self._hand_on()
        return self._inner.state_dict()

    @one_at_a_time
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state of a TorchOptimizer of the same optimizer."""
        self._inner.load_state_dict(state_dict)
        self._take_over()

    def _hand_on(self) -> None:
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(options_of(own))

    def _take_over(self) -> None:
        """Show the options; numbers that are none stay where they are kept."""
        numbers = self._inner.numbers
        self.param_groups[:] = [
            {key: value for key, value in group.items() if key not in numbers}
            for group in self._inner.param_groups
        ]
