"""A TorchOptimizer that is given its gradients, in place of reading them from ``.grad``."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_count, check_grad, check_measured
from functional_optim.core.compiling import uncompiled
from functional_optim.frontends.group_steps import GroupsNow
from functional_optim.frontends.group_tensors import Group
from functional_optim.frontends.torch_groups import params_of_groups
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.kernels import needs_total


class ExplicitGradients(TorchOptimizer):
    """torch's groups and state dicts, and steps by given gradients.

    Args:
        params: as for :class:`TorchOptimizer`.
        optimizer: any that needs nothing beside gradients.

    Example::

        >>> from functional_optim import sgd
        >>> weight = torch.ones(2)
        >>> optimizer = ExplicitGradients([weight], sgd(lr=0.5))
        >>> optimizer.step_by([torch.ones(2)])
        >>> weight
        tensor([0.5000, 0.5000])
    """

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group: the order of all gradients."""
        return params_of_groups(self.param_groups)

    @property
    def numbers(self) -> dict[str, Any]:
        """Entries of groups that are no options: numbers that belong to no parameter."""
        return self._chains.numbers()

    @property
    def measured_stages(self) -> int:
        """Number of stages that need totals over all gradients."""
        return sum(map(needs_total, self.chain.stages))

    @uncompiled
    def step_by(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> None:
        """Make a step; ``.grad`` is neither read nor written.

        Args:
            gradients: one for each of :attr:`params`; None leaves a parameter alone.
            measured: totals of stages that need one, as for :meth:`Optimizer.update`.

        Raises:
            TypeError, ValueError: another number of gradients than of parameters, or one that does
                not fit; nothing is changed then.
        """
        if measured:
            check_measured(self.chain.stages, measured)
        self._lock.alone(self._step_by, gradients, measured)

    @uncompiled
    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total that a stage needs.

        Args:
            gradients: as for :meth:`step_by`.
            measured: the totals before the one that is asked for.

        Returns:
            For each parameter one float64 number, or a row where the stage needs several totals,
            on the CPU; 0 for one without a gradient. Their sum, over all parts of a model, is the
            next entry of ``measured``.

        Raises:
            ValueError: no stage needs a total more; or as for :meth:`step_by`.
        """
        check_measured(self.chain.stages, measured, asked=1)
        return self._lock.alone(self._measure, gradients, measured)

    def _step_by(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> None:
        self._steps.prepared(self._now(gradients), measured)()
        self._chains.show(self.param_groups)

    def _measure(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> Tensor:
        by_id, nothing = self._steps.addends(self._now(gradients), measured)
        return torch.stack([by_id.get(id(one), nothing).cpu() for one in self.params])

    def _now(self, gradients: Sequence[Tensor | None]) -> GroupsNow:
        groups = self._groups()
        every = params_of_groups(self.param_groups)
        check_count(gradients, len(every))
        for group in groups:
            if not self._optimizer_of(group.number).stages:  # no step looks at these
                _check(group, dict(zip(map(id, every), gradients, strict=True)))
        given = partial(_taken, every, gradients)
        return self._chains.now(groups, self.state, self._leaf_state, given)


def _check(group: Group, gradients: Mapping[int, Tensor | None]) -> None:
    """Make sure that the gradients of a group belong to its parameters.

    Args:
        group: of parameters.
        gradients: by the identity of their parameters.

    Raises:
        TypeError, ValueError: one does not.
    """
    for param, name in group.every():
        grad = gradients[id(param)]
        if grad is not None:
            check_grad(param, grad, name)


def _taken(
    every: Sequence[Tensor], gradients: Sequence[Tensor | None], params: list[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of some parameters.

    Args:
        every: all parameters.
        gradients: of all.
        params: those.
    """
    if len(params) == len(every) and all(map(is_, params, every)):
        return list(gradients)
    by_id = dict(zip(map(id, every), gradients, strict=True))
    return list(map(by_id.__getitem__, map(id, params)))
