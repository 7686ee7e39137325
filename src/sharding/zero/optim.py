"""``.optim``: one rank's shard as a torch.optim.Optimizer."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from functional_optim._torch import load_state_dict_hooks, with_own_step_hooks
from functional_optim.core.compiling import uncompiled
from functional_optim.frontends.torch_groups import options_of
from sharding.zero.composed import ComposedShards
from sharding.zero.shard_steps import ShardSteps

Totals = Callable[[Mapping[str, Tensor], int], Tensor]
"""From the addends of this rank's parameters, by path, to their total over all ranks: of numbers,
for 0, or of rows of so many."""


class ShardOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer over what one rank owns; ``ZeroRedundancyOptimizer.optim``.

    A parameter that the rank owns whole stands in the groups itself; of one that it owns a part of,
    a flat view of that part does. ``state`` has the very tensors of the state. Options are those of
    the groups of the whole optimizer.

    Args:
        local: steps the shard.
        defaults: the options of all groups.
        totals: adds up over ranks what a chain needs to know of all gradients; a method, which does
            not keep its owner, and so all parameters, alive.
    """

    def __init__(self, local: ShardSteps, defaults: Mapping[str, Any], totals: Totals) -> None:
        self._local = local
        self._totals = WeakMethod(totals)
        # A copy: torch adds to it. The one group that torch wants is not taken.
        super().__init__([{"params": []}], dict(defaults))

    @property
    def local(self) -> ShardSteps:
        """Return the local optimizer of the shard, whose steps are given gradients."""
        return self._local

    @property
    def composed(self) -> ComposedShards | None:
        """Return the steps of all shards at once; None if each group is stepped alone."""
        return self._local.composed

    @property
    def state(self) -> Any:
        """Dicts of state as torch has them, by what stands in the groups."""
        return self._local.owned.states

    @state.setter
    def state(self, value: Any) -> None:
        """Take other dicts; torch's constructor has none."""
        if value:
            self._local.owned.states = value
            self._local.owned.link()

    @property
    def param_groups(self) -> list[Any]:
        """The rank's part of each group, empty ones too."""
        return self._local.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Take the options of other groups."""
        for own, given in zip(self._local.param_groups, value, strict=False):
            own.update(options_of(given))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group: all ranks have to add it together.

        Raises:
            RuntimeError: always, once the optimizer is made.
        """
        if param_group["params"]:
            raise RuntimeError(
                "this is the optimizer over one rank's shard: call add_param_group() of the "
                "ZeroRedundancyOptimizer, on all ranks"
            )

    @with_own_step_hooks  # ZeroRedundancyOptimizer.step calls those of all optimizers
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every owned range whose parameter has a gradient.

        Parameters are not made whole on the other ranks: that is ``ZeroRedundancyOptimizer.step``.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self._local
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

    @uncompiled
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state of this shard in torch's form.

        Raises:
            ValueError: other groups, or a state that does not fit; nothing is changed then.
        """
        given: Any = state_dict
        before, after = load_state_dict_hooks(self)
        for hook in before:
            given = hook(self, given) or given
        self._local.load_state_dict(given)
        for hook in after:
            hook(self)
