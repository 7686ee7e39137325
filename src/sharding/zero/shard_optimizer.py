"""Optimizer over the shard of one rank, as a torch.optim.Optimizer: ``.optim`` of ZeRO."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from functional_optim._torch import load_state_dict_hooks, with_own_step_hooks
from functional_optim.core.dynamo import disable_compile
from functional_optim.frontends.torch_groups import options_of
from sharding.zero.shard_steps import ShardSteps

Totals = Callable[[Mapping[str, Tensor], int], Tensor]
"""Function of the addends of this rank's parameters, by path, and of the number of elements of an
addend, 0 for scalars. It returns the total over all ranks."""


class ShardOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer over the shard of one rank; ``ZeroRedundancyOptimizer.optim``.

    Its groups have the parameters that the rank owns as a whole, and flat views of the ranges that
    the rank owns of other parameters. ``state`` has the tensors of the state, without copies.
    Options are those of the groups of the whole optimizer.

    Args:
        local: steps the shard.
        defaults: the options of all groups.
        totals: bound method that sums addends over ranks. Only a weak reference is kept, so that
            the parameters of its object can be freed.
    """

    def __init__(self, local: ShardSteps, defaults: Mapping[str, Any], totals: Totals) -> None:
        self.local = local
        """The steps of the shards."""
        self._totals = WeakMethod(totals)
        # torch adds to the defaults, so it gets a copy. It needs a group, which is not used.
        super().__init__([{"params": []}], dict(defaults))

    @property
    def state(self) -> Any:
        """Dicts of state as torch has them, by the tensors in the groups."""
        return self.local.owned.states

    @state.setter
    def state(self, value: Any) -> None:
        """Replace the dicts of state, except by the empty one of torch's constructor."""
        if value:
            given, states = dict(value), self.state
            states.clear()
            states.update(given)

    @property
    def param_groups(self) -> list[Any]:
        """The rank's part of each group; some may be empty."""
        return self.local.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Copy the options of other groups."""
        for own, given in zip(self.local.param_groups, value, strict=False):
            own.update(options_of(given))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError after the constructor: all ranks have to add a group together."""
        if param_group["params"]:
            raise RuntimeError(
                "this is the optimizer over one rank's shard: call add_param_group() of the "
                "ZeroRedundancyOptimizer, on all ranks"
            )

    @with_own_step_hooks  # ZeroRedundancyOptimizer.step calls the global hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every owned range whose parameter has a gradient.

        Other ranks do not get the new values; ``ZeroRedundancyOptimizer.step`` gathers them.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.

        Returns:
            The result of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self.local
        measured: list[Tensor] = []
        for _ in range(local.measured_stages):
            measured.append(self._total(*local.addends(local.own_gradients, measured)))
        local.step_every(local.own_gradients, measured)
        return loss

    def _total(self, addends: Mapping[str, Tensor], numbers: int) -> Tensor:
        method = self._totals()
        if method is None:
            raise RuntimeError(
                "the ZeroRedundancyOptimizer of this shard is gone, and without it gradients are "
                "not summed over ranks; keep it"
            )
        return method(addends, numbers)

    @disable_compile
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load options and state of this shard. If that raises, nothing has changed."""
        load_with_hooks(self, state_dict, self.local.load_state_dict)


def load_with_hooks(
    optimizer: torch.optim.Optimizer, state_dict: Any, load: Callable[[Any], None]
) -> None:
    """Load a state dict, and call the hooks of an optimizer before and afterwards."""
    before, after = load_state_dict_hooks(optimizer)
    for hook in before:
        state_dict = hook(optimizer, state_dict) or state_dict
    load(state_dict)
    for hook in after:
        hook(optimizer)
