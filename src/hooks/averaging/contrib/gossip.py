"""NoLoCo: an outer optimizer without any all-reduce, whose ranks meet in random pairs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functional_optim.core.compiling import uncompiled
from functional_optim.core.dtensors import is_sharded, local
from hooks.averaging.contrib.pairs import RankPairs, partners
from hooks.averaging.model_averager import (
    RANGE,
    ModelAverager,
    Params,
    check_steps,
    params_in,
    refuse_state,
    shards_in,
)
from hooks.averaging.outer import check_shapes, wide
from hooks.ranges import named_range
from sharding.transport.groups import resolved


class GossipModelAverager(ModelAverager):
    """Every ``period`` steps, each rank makes an outer step together with one random partner.

    With ``phi_r`` the *anchor* of rank ``r`` (which ranks have in common at first only),
    ``theta_r`` its parameters after ``period`` steps of its own, ``q`` its partner this time, and
    ``mean`` over the two:

        D_r     = theta_r - phi_r                     (what the steps changed)
        delta_r <- momentum delta_r + lr mean(D_r, D_q) - gamma (phi_r - mean(phi_r, phi_q))
        phi_r   <- phi_r + delta_r
        theta_r <- phi_r

    The last term pulls anchors together: they are never the same on all ranks, and never far apart.
    Partners are drawn anew each time, the same on all ranks, from ``seed`` and the number of the
    outer step; of an odd number of ranks, one makes its step alone, with itself as the mean. A
    rank waits for its partner only, and sends ``(D_r, phi_r)`` once, whatever the number of ranks.

    **Which gamma.** Of an even number ``W`` of ranks whose changes are the same, the expected
    variance of anchors falls to 0 if and only if

        0 < gamma < 2 (1 - momentum^2) / (1 - momentum / (W - 1))

    (write the expectations of ``phi^2``, ``phi delta`` and ``delta^2`` after a step as a linear map
    of those before: at the bound, 1 is an eigenvalue). What holds for any ``W`` is asked for:
    ``gamma < 2 (1 - momentum^2)``. With momentum 0 and gamma 1, partners leave with the same
    anchor, up to rounding.

    Anchors of 16-bit parameters are kept, and sent, in float32. All arithmetic is in the order of
    group ranks, so that partners have the bits of one another's means. Of a DTensor, each rank has
    the anchor of its shard: the process group is that of the dimension of a mesh over which
    parameters are replicated.

    Args:
        params: that are averaged, or parameter groups; equal on all ranks at first, as DDP makes
            them. Other parameters are left alone.
        period: the number of steps from one outer step to the next.
        lr: beta of the paper, of the mean change; from 0 on.
        momentum: alpha of the paper, in [0, 1).
        gamma: the pull towards the partner, within the bounds above. The authors' code has ``lr``
            here, and so has the default.
        warmup_steps: steps in which all ranks keep the same parameters (their gradients are
            averaged); the first period begins after them.
        process_group: of the ranks that draw partners; a DeviceMesh of one dimension; None for the
            world. It needs gloo for CPU tensors, by which pairs exchange theirs.
        seed: of the pairs; the same on all ranks.

    Raises:
        TypeError: ``process_group`` is something else.
        ValueError: a period below 1, a negative ``warmup_steps``, ``lr``, ``momentum`` or ``gamma``
            out of bounds, no parameters, a group without gloo.

    Example::

        >>> from sharding.transport.local import LocalWorld
        >>> def trained(group):
        ...     param = torch.zeros(1)
        ...     averager = GossipModelAverager([param], period=2, momentum=0.0, process_group=group)
        ...     for _ in range(2):
        ...         param += 1.0 + group.rank()  # a step of its own: 2 and 4 in a period
        ...         averager.average_parameters()
        ...     return round(param.item(), 4)
        >>> LocalWorld(2).run(trained)  # 0.7 times the mean of both
        [2.1, 2.1]

    Reference:
        Kolehmainen et al. 2025, NoLoCo (arXiv 2506.10911), its modified Nesterov momentum,
        for groups of two ranks. Signs are those of the code that the authors published
        (jkolehm/noloco), in which the change is added.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        period: int = 50,
        *,
        lr: float = 0.7,
        momentum: float = 0.5,
        gamma: float = 0.7,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
    ) -> None:
        check_steps(period, warmup_steps)
        _check_rates(lr, momentum, gamma)
        members = resolved(process_group)
        super().__init__(members, warmup_steps)
        self.period = period
        """The number of steps from one outer step to the next."""
        self.lr, self.momentum, self.gamma = lr, momentum, gamma
        self.seed = seed
        """Of the pairs; the same on all ranks."""
        self._given = params_in(params)
        if not self._given:
            raise ValueError("params has no floating parameters: there is nothing to average")
        self._shards = shards_in(self._given)
        self._anchors = [wide(param) for param in self._params]
        self._deltas = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._pairs = RankPairs(members)

    @property
    def _params(self) -> list[Tensor]:
        """Return the parameters; of a DTensor, the shard that this rank holds now."""
        return [local(param.detach()) for param in self._given]

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent, headers not counted."""
        return self._pairs.bytes_sent

    @torch.no_grad()
    def begin(self) -> None:
        """Take the parameters of now as anchors."""
        for anchor, param in zip(self._anchors, self._params, strict=True):
            anchor.copy_(param)

    @uncompiled
    @torch.no_grad()
    def average_parameters(self, params: Params = (), state: Sequence[Tensor] = ()) -> None:
        """Account for a step; make an outer step if it is due.

        Args:
            params: looked at no further: what is averaged was said at construction.
            state: must be empty.

        Raises:
            ValueError: further tensors; a partner with other parameters, settings or steps.
            TransportError: a partner that did not come, by its number. Nothing was changed, and the
                step does not count.
        """
        refuse_state(state)
        made = self.step + 1 - self.warmup_steps
        with named_range(RANGE):
            if made == 0:
                self.begin()
            elif made > 0 and made % self.period == 0:
                self._outer_step(made // self.period)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """This rank's anchors and momentum, and the count of steps."""
        return {**super().state_dict(), "anchors": self._anchors, "deltas": self._deltas}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, bit for bit.

        Args:
            state_dict: of the averager of the same rank, with the same parameters.

        Raises:
            ValueError: of others; nothing is changed.
        """
        super().load_state_dict(state_dict)
        for own, saved in ((self._anchors, "anchors"), (self._deltas, "deltas")):
            for one, value in zip(own, state_dict[saved], strict=True):
                one.copy_(value)

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check a state dict, as all averagers do."""
        super().check(state_dict)
        self.check_has(state_dict, "anchors", "deltas")
        check_shapes("anchors", state_dict["anchors"], self._anchors)
        check_shapes("deltas", state_dict["deltas"], self._deltas)

    def _outer_step(self, number: int) -> None:
        changes = [
            param.to(anchor.dtype) - anchor
            for param, anchor in zip(self._params, self._anchors, strict=True)
        ]
        means = self._means(number, [*changes, *self._anchors])
        count = len(changes)
        for param, anchor, delta, change, center in zip(
            self._params, self._anchors, self._deltas, means[:count], means[count:], strict=True
        ):
            delta.mul_(self.momentum).add_(change, alpha=self.lr)
            delta.sub_(anchor - center, alpha=self.gamma)
            anchor.add_(delta)
            param.copy_(anchor)
        # Autograd counts the versions of a DTensor and of its shard separately.
        torch.autograd.graph.increment_version([*filter(is_sharded, self._given)])

    def _means(self, number: int, own: list[Tensor]) -> list[Tensor]:
        """Over this rank and its partner."""
        mark = (number, self.seed, self.period, self.lr, self.momentum, self.gamma, self._shards)
        found = partners(self.process_group.size(), number, self.seed)
        return self._pairs.means(found, own, mark=mark)


def _check_rates(lr: float, momentum: float, gamma: float) -> None:
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be a finite number >= 0, got {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be a number from 0 on and below 1, got {momentum}")
    bound = 2 * (1 - momentum**2)
    if not 0 < gamma < bound:
        raise ValueError(
            f"gamma must be a number above 0 and below 2 (1 - momentum^2) = {bound:g}, or ranks "
            f"drift apart, got {gamma} with momentum {momentum}"
        )
