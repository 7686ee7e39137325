"""ExplicitGradients: a TorchOptimizer that gets gradients as arguments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_count, check_grad, check_measured
from functional_optim.core.dynamo import disable_compile
from functional_optim.frontends.group_steps import CurrentGroups
from functional_optim.frontends.torch_groups import params_of_groups
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.kernels import needs_total


class ExplicitGradients(TorchOptimizer):
    """TorchOptimizer whose steps get gradients as arguments, and do not read ``.grad``.

    Args:
        params: as for :class:`TorchOptimizer`.
        optimizer: an optimizer that needs no inputs besides gradients.

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
        """The parameters, group by group. Gradients are in the same order."""
        return params_of_groups(self.param_groups)

    @property
    def shared_entries(self) -> dict[str, Any]:
        """The shared scalars, which groups store together with their options."""
        return self._chains.shared_entries()

    @property
    def measured_stages(self) -> int:
        """Number of stages that need totals over all gradients."""
        return sum(map(needs_total, self.chain.stages))

    @disable_compile
    def step_by(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> None:
        """Run a step. ``.grad`` is neither read nor written.

        Args:
            gradients: a gradient for each of :attr:`params`, or None to skip the parameter.
            measured: the totals of measured stages, as for :meth:`Optimizer.update`.

        Raises:
            TypeError, ValueError: the number of gradients is wrong, or a gradient does not fit its
                parameter; nothing has changed.
        """
        if measured:
            check_measured(self.chain.stages, measured)
        self._lock.run(self._step_by, gradients, measured)

    @disable_compile
    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total that a stage needs.

        Args:
            gradients: as for :meth:`step_by`.
            measured: the totals of earlier stages.

        Returns:
            A float64 tensor on the CPU with one number for each parameter, or one row if the stage
            needs several totals. A parameter without a gradient has 0. The sum over all parts of a
            model is the next entry of ``measured``.

        Raises:
            ValueError: no further stage needs a total; or as for :meth:`step_by`.
        """
        check_measured(self.chain.stages, measured, asked=1)
        return self._lock.run(self._measure, gradients, measured)

    def _step_by(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> None:
        self._steps.prepare(self._current_groups(gradients), measured)()
        self._chains.write_shared(self.param_groups)

    def _measure(self, gradients: Sequence[Tensor | None], measured: Sequence[Tensor]) -> Tensor:
        by_id, zero = self._steps.addends(self._current_groups(gradients), measured)
        return torch.stack([by_id.get(id(one), zero).cpu() for one in self.params])

    def _current_groups(self, gradients: Sequence[Tensor | None]) -> CurrentGroups:
        groups = self._groups()
        every = self.params
        check_count(gradients, len(every))
        by_id = dict(zip(map(id, every), gradients, strict=True))
        for group in groups:
            # A step does not check frozen groups.
            pairs = zip(group.params, group.labels(), strict=True)
            for param, name in () if self._optimizer_of(group.number).stages else pairs:
                grad = by_id[id(param)]
                if grad is not None:
                    check_grad(param, grad, name)

        def gradients_of(params: list[Tensor]) -> list[Tensor | None]:
            return list(map(by_id.__getitem__, map(id, params)))

        return self._chains.current_groups(groups, self.state, self._leaf_states, gradients_of)
