"""A TorchOptimizer that is given its gradients, in place of reading them from ``.grad``."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_count, check_grad, check_measured
from functional_optim.core.compiling import uncompiled
from functional_optim.frontends.torch_flat import FlatGroups
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.kernels import EXECUTORS, in_place, is_measured
from functional_optim.optimizer import Optimizer
from functional_optim.plan import reduction
from functional_optim.plan.item import Item


class GivenGradients(TorchOptimizer):
    """Parameters in flat buffers, torch's groups and state dicts, and steps by given gradients.

    Args:
        params: as for :class:`TorchOptimizer`.
        optimizer: the chain.

    Example::

        >>> from functional_optim import sgd
        >>> weight = torch.ones(2)
        >>> optimizer = GivenGradients([weight], sgd(lr=0.5))
        >>> optimizer.step_by([torch.ones(2)])
        >>> weight
        tensor([0.5000, 0.5000])
    """

    def __init__(self, params: Iterable[Any], optimizer: Optimizer) -> None:
        super().__init__(params, optimizer, flat=True)

    @property
    def measured_stages(self) -> int:
        """Number of stages of the chain that need a total over all gradients."""
        return sum(map(is_measured, self.chain.stages))

    @uncompiled
    def step_by(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> None:
        """Make a step; ``.grad`` is neither read nor written.

        Args:
            gradients: one for each parameter, group by group; None leaves a parameter alone.
            measured: totals of the chain's measured stages, as for :meth:`Optimizer.update`.

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
        """Return each parameter's addend to the total that a measured stage needs.

        Args:
            gradients: as for :meth:`step_by`.
            measured: totals of the measured stages before the one that is asked for.

        Returns:
            One float64 number for each parameter, on the CPU; 0 for one without a gradient. Their
            sum, over all parts of a model, is the next entry of ``measured``.

        Raises:
            ValueError: the chain has no such stage; or as for :meth:`step_by`.
        """
        check_measured(self.chain.stages, measured, asked=1)
        return self._lock.alone(self._measure, gradients, measured)

    def _step_by(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> None:
        assert isinstance(self._flat, FlatGroups)
        groups = self._groups()
        check_count(gradients, sum(len(group.params) for group in groups))
        self._flat.step(groups, self.state, gradients, measured)

    def _measure(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> Tensor:
        stages, groups = self.chain.stages, self._groups()
        params = [param for group in groups for param in group.params]
        check_count(gradients, len(params))
        given = dict(zip(map(id, params), gradients, strict=True))
        executor = EXECUTORS[in_place(self.chain.executor, params, stages)]
        addends = []
        with torch.no_grad():
            for group in groups:
                for param, name in group.every():
                    grad, addend = given[id(param)], 0.0
                    if grad is not None:
                        check_grad(param, grad, name)
                        state = self._leaf_state(group, param, name)
                        item = Item(param, grad, state, group.hypers, name)
                        addend = reduction.measure(stages, executor, [item], measured).item()
                    addends.append(addend)
        return torch.tensor(addends, dtype=torch.float64, device="cpu")
