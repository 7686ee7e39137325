"""``.optim``: a torch-like optimizer over one rank's shards, and what it is given gradients by."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import with_own_step_hooks
from functional_optim.core.checks import check_count
from functional_optim.core.compiling import uncompiled
from sharding.zero.composed import ComposedShards, Given, Totals, gradients_of
from sharding.zero.group_plan import gradient_of, own_gradient_of
from sharding.zero.groups import vector_at
from sharding.zero.local_shard import LocalShard
from sharding.zero.local_shards import LocalShards, ShardStep


class ShardOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer over what one rank owns; ``ZeroRedundancyOptimizer.optim``.

    A parameter that the rank owns whole stands in the groups itself; of one that it owns a part of,
    a flat view of that part does. ``state`` has the very tensors of the state, so that writing in
    place is seen; other tensors put there are copied into them at the next step.

    Args:
        groups: this rank's part of every group, empty ones too.
        defaults: the options of all groups.
        shards: what is stepped.
        totals: adds up over ranks what a chain needs to know of all gradients.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
        shards: LocalShards,
        totals: Totals,
    ) -> None:
        self._shards = shards
        self._totals = totals
        self.composed: ComposedShards | None = None
        """What steps all shards, where numbers are kept for all parameters."""
        super().__init__([dict(group) for group in groups], defaults)
        if shards.recipes.keeps_numbers:
            self.composed = ComposedShards(shards.recipes, shards, self.show)
            self.composed.show_numbers(self.param_groups)
        self.complete()

    def complete(self) -> None:
        """State for all that is trainable by now."""
        self._shards.complete(self.param_groups)
        self.show(one for one in self._shards.every() if one.state and one.shown is None)

    def show(self, shards: Iterable[LocalShard]) -> None:
        """Let ``state`` have the state of these."""
        for one in shards:
            one.shown = one.entries(self._shards.chain_of(one, self.param_groups))
            self.state[one.tensor] = dict(one.shown)

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
        self.complete()
        self.adopt()
        if self.composed is not None:
            given = gradients_of(list(self._shards.every()))
            totals = self.composed.measured(self.param_groups, self.state, given, self._totals)
            self.step_by(given, totals)
            return loss
        every = self._shards.every()
        own = ((one, own_gradient_of(one)) for one in every)
        asked = [ShardStep(one, grad) for one, grad in own if grad is not None]
        measured: list[Tensor] = []
        for _ in range(self._shards.measured_stages):
            addends = self._shards.measures(asked, self.param_groups, measured)
            measured.append(self._totals(addends, 0))
        self._shards.step(asked, self.param_groups, measured)
        return loss

    def step_by(self, given: Given, measured: Sequence[Tensor]) -> None:
        """Step all shards, where numbers are kept for all parameters."""
        assert self.composed is not None
        self.composed.step(self.param_groups, self.state, given, measured)
        self.composed.show_numbers(self.param_groups)

    def step_at_once(self, asked: Sequence[ShardStep], measured: Sequence[Tensor]) -> None:
        """Step by the given gradients, as part of an iteration's account.

        Raises:
            RuntimeError: a shard that was stepped before in this iteration.
            ValueError: a total that is missing, or what does not fit.
        """
        shards, account = [one.shard for one in asked], self._shards.account
        account.check(shards)
        self.step_by(given_of(asked), measured)
        account.enter(shards)

    @property
    def local(self) -> "LocalSteps":
        """Optimizer over the owned ranges that is given its gradients, and reads no ``.grad``."""
        self.complete()
        self.adopt()
        return LocalSteps(self, self._shards)

    @uncompiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options and state of this shard in torch's form.

        Raises:
            ValueError: other groups, or a state that does not fit; nothing is changed then.
        """
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            if self.composed is not None:
                self.composed.check_numbers(self.param_groups)
            self.adopt()
        except Exception:
            self.state, self.param_groups = before
            raise
        if self.composed is not None:
            self.composed.take_numbers(self.param_groups)

    def adopt(self) -> None:
        """Take over what someone has put into ``state``.

        Raises:
            ValueError: it does not fit; nothing is taken over then.
        """
        read = []
        for one in self._shards.every():
            if one.shown is None:
                continue
            found, shown = self.state[one.tensor], one.shown
            if found.keys() == shown.keys():
                same = map(operator.is_, map(found.__getitem__, shown), shown.values())
                if all(same):
                    continue
            chain = self._shards.chain_of(one, self.param_groups)
            read.append((one, chain, one.read(chain, found)))
        for one, chain, state in read:
            one.write(chain, state)
        self.show(one for one, _, _ in read)


class LocalSteps:
    """A :class:`~functional_optim.frontends.local_optimizer.LocalOptimizer` over a rank's shards.

    It is given the gradients of what stands in ``param_groups``, group by group: for a part of a
    parameter, that of the whole parameter, or of the part in one dimension.

    Args:
        optim: over the shards, whose state is complete; its groups are those of now.
        shards: what is stepped.

    Example::

        >>> import torch
        >>> import torch.distributed as dist
        >>> from functional_optim import sgd
        >>> from sharding import ZeroRedundancyOptimizer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> local = ZeroRedundancyOptimizer([weight], sgd(lr=0.5)).optim.local
        >>> local.step([torch.ones(2)])
        >>> weight.tolist()
        [0.5, 0.5]
        >>> dist.destroy_process_group()
    """

    def __init__(self, optim: ShardOptimizer, shards: LocalShards) -> None:
        self._optim, self._shards = optim, shards
        by_tensor = {id(one.tensor): one for one in shards.every()}
        self.shards: list[LocalShard] = [
            by_tensor[id(tensor)] for group in self.param_groups for tensor in group["params"]
        ]
        """What stands in the groups."""
        self._first: dict[str, int] = {}
        """By path, where the first shard of each parameter stands."""
        for place, one in enumerate(self.shards):
            self._first.setdefault(one.path, place)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups as in torch: options may be changed between steps."""
        return self._optim.param_groups

    @property
    def params(self) -> list[Tensor]:
        """Return the parameters of the groups, group by group."""
        return [one.tensor for one in self.shards]

    @property
    def measured_stages(self) -> int:
        """Number of totals over the gradients of all ranks that a step needs."""
        composed = self._optim.composed
        return self._shards.measured_stages if composed is None else len(composed.totals)

    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Make a step; ``.grad`` is neither read nor written.

        Raises:
            TypeError, ValueError: a gradient or an option that does not fit, a total that is
                missing; nothing is changed then.
        """
        asked = self._asked(gradients)
        if self._optim.composed is None:
            self._shards.step(asked, self.param_groups, measured)
        else:
            self._optim.step_by(given_of(asked), measured)

    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total, in float64, at its first shard.

        A row for each, where a stage needs several.
        """
        asked, composed = self._asked(gradients), self._optim.composed
        if composed is not None:
            groups, states = self.param_groups, self._optim.state
            addends = composed.addends(groups, states, given_of(asked), measured)
            by_shard = {id(shard): added for shard, added in addends}
            nothing = torch.zeros_like(addends[0][1]) if addends else torch.zeros(())
            rows = [by_shard.get(id(one), nothing) for one in self.shards]
            return torch.stack([one.to("cpu", torch.float64) for one in rows])
        found = self._shards.measures(asked, self.param_groups, measured)
        return vector_at(found, self._first, len(self.shards))

    def state_dict(self) -> dict[str, Any]:
        """Options and state of the shards in torch's form."""
        return self._optim.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state of these shards; all of it, or nothing where that raises."""
        self._optim.load_state_dict(dict(state_dict))

    def _asked(self, gradients: Sequence[Tensor | None]) -> list[ShardStep]:
        check_count(gradients, len(self.shards))
        pairs = zip(self.shards, gradients, strict=True)
        return [ShardStep(one, gradient_of(one, grad)) for one, grad in pairs if grad is not None]


def given_of(asked: Sequence[ShardStep]) -> dict[int, Tensor | None]:
    """Gradients by the identity of what they are of."""
    return {id(one.shard.tensor): one.grad for one in asked}
