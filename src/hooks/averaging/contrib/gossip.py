"""NoLoCo: an outer optimizer without all-reduce, over random pairs of ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functional_optim.engine.calls import disable_compile
from functional_optim.engine.tensors import is_dtensor, to_local
from hooks.averaging.contrib.pairs import RankPairs, partners
from hooks.averaging.model_averager import (
    RANGE,
    ModelAverager,
    Params,
    check_period,
    params_in,
    refuse_state,
    shard_coordinates,
)
from hooks.averaging.outer import check_shapes, wide_copy
from hooks.profiling import named_range
from sharding.transport.groups import resolve_group


class GossipModelAverager(ModelAverager):
    """Makes an outer step every ``period`` steps, on each rank with one random partner.

    With ``phi_r`` the *anchor* of rank ``r`` (at first equal on all ranks), ``theta_r`` its
    parameters after ``period`` local steps, ``q`` its current partner, and ``mean`` the mean over
    the two ranks:

        D_r     = theta_r - phi_r                     (what the steps changed)
        delta_r <- momentum delta_r + lr mean(D_r, D_q) - gamma (phi_r - mean(phi_r, phi_q))
        phi_r   <- phi_r + delta_r
        theta_r <- phi_r

    The last term pulls anchors together: they differ between ranks, but stay close. All ranks draw
    the same pairs for each outer step, from ``seed`` and the step's number. With an odd number of
    ranks, one rank steps alone, with its own values as the means. A rank waits for its partner
    only, and sends ``(D_r, phi_r)`` once, for any number of ranks.

    **Which gamma.** For an even number ``W`` of ranks with equal changes, the expected variance of
    anchors falls to 0 if and only if

        0 < gamma < 2 (1 - momentum^2) / (1 - momentum / (W - 1))

    (write the expectations of ``phi^2``, ``phi delta`` and ``delta^2`` after a step as a linear map
    of those before: at the bound, 1 is an eigenvalue). The constructor requires the bound for any
    ``W``: ``gamma < 2 (1 - momentum^2)``. With momentum 0 and gamma 1, both partners get the same
    anchor, up to rounding.

    Anchors of 16-bit parameters are stored and sent in float32. All arithmetic is in the order of
    group ranks, so both partners compute the same bits. For a DTensor, each rank has the anchor of
    its shard: the process group is that of the mesh dimension over which parameters are replicated.

    Args:
        params: parameters or parameter groups to average; at first equal on all ranks, as DDP makes
            them. Other parameters are not changed.
        period: the number of steps from one outer step to the next.
        lr: beta of the paper, for the mean change; at least 0.
        momentum: alpha of the paper, in [0, 1).
        gamma: the pull towards the partner, within the bounds above. The default equals ``lr``, as
            in the authors' code.
        warmup_steps: steps in which all ranks keep the same parameters (their gradients are
            averaged); the first period starts after them.
        process_group: of the ranks that draw partners; a DeviceMesh of one dimension; None for the
            world. Needs gloo for CPU tensors, for the messages of pairs.
        seed: of the pairs; equal on all ranks.

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
        ...         param += 1.0 + group.rank()  # local steps: 2 and 4 in a period
        ...         averager.average_parameters()
        ...     return round(param.item(), 4)
        >>> LocalWorld(2).run(trained)  # 0.7 times the mean of both
        [2.1, 2.1]

    Reference:
        Kolehmainen et al. 2025, NoLoCo (arXiv 2506.10911), its modified Nesterov momentum,
        for groups of two ranks. Signs as in the authors' code (jkolehm/noloco), which adds the
        change.
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
        check_period(period, warmup_steps)
        _check_rates(lr, momentum, gamma)
        members = resolve_group(process_group)
        super().__init__(members, warmup_steps)
        self.period = period
        """The number of steps from one outer step to the next."""
        self.lr, self.momentum, self.gamma = lr, momentum, gamma
        self.seed = seed
        """The seed of the pairs; equal on all ranks."""
        self._full_params = params_in(params)
        if not self._full_params:
            raise ValueError("params has no floating parameters: there is nothing to average")
        self._shards = shard_coordinates(self._full_params)
        self._anchors = [wide_copy(param) for param in self._params]
        self._deltas = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._pairs = RankPairs(members)

    @property
    def _params(self) -> list[Tensor]:
        """Return the parameters; for a DTensor, the shard that this rank has now."""
        return [to_local(param.detach()) for param in self._full_params]

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent, without headers."""
        return self._pairs.bytes_sent

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the current parameters to the anchors."""
        for anchor, param in zip(self._anchors, self._params, strict=True):
            anchor.copy_(param)

    @disable_compile
    @torch.no_grad()
    def average_parameters(self, params: Params = (), state: Sequence[Tensor] = ()) -> None:
        """Count a step; make an outer step if it is due.

        Args:
            params: ignored; the constructor got the parameters.
            state: must be empty.

        Raises:
            ValueError: ``state`` is not empty; a partner with other parameters, settings or steps.
            TransportError: names a missing partner. Nothing was changed, and the step does not
                count.
        """
        refuse_state(state)
        count = self.step + 1 - self.warmup_steps
        with named_range(RANGE):
            if count == 0:
                self.begin()
            elif count > 0 and count % self.period == 0:
                self._outer_step(count // self.period)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's anchors and momentum, and the step count."""
        return {**super().state_dict(), "anchors": self._anchors, "deltas": self._deltas}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict; the run continues bit for bit.

        Args:
            state_dict: of the averager of the same rank, with the same parameters.

        Raises:
            ValueError: the state dict does not fit; nothing is changed.
        """
        super().load_state_dict(state_dict)
        for own, saved in ((self._anchors, "anchors"), (self._deltas, "deltas")):
            for one, value in zip(own, state_dict[saved], strict=True):
                one.copy_(value)

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` can load a state dict."""
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
        torch.autograd.graph.increment_version([*filter(is_dtensor, self._full_params)])

    def _means(self, number: int, own: list[Tensor]) -> list[Tensor]:
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
