"""Averagers: after some steps, parameters become their mean over a group of ranks."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functional_optim.engine.calls import disable_compile
from functional_optim.engine.messages import format_value
from functional_optim.engine.tensors import is_dtensor, to_local
from hooks.averaging.model_averager import (
    RANGE,
    InFlight,
    ModelAverager,
    Params,
    params_in,
    shard_coordinates,
)
from hooks.averaging.period_groups import period_groups
from hooks.averaging.rank_means import RankMeans
from hooks.averaging.schedule import AveragingSchedule
from hooks.profiling import named_range
from sharding.transport.groups import resolve_group


class ScheduledModelAverager(ModelAverager):
    """Averages parameters over ranks after the steps of a schedule.

    After a step that is due, every parameter ``x`` of rank ``r`` becomes

        x_r <- (((x_0 + x_1) + x_2) + ...) / W

    over the ``W`` ranks of this level's group, in the order of ranks. Parameters keep their
    storage, so views of them (DDP's buckets, flat buffers) stay valid. All parameters are averaged,
    also those without gradient. Each shard of a DTensor is averaged with the same shard on other
    ranks. With a ``delay`` of ``d``, the mean is computed in the background during the next
    ``d`` steps, and the changes of these steps are kept: ``x_r <- x_r + (mean - x_r as it was
    sent)``.

    Args:
        schedule: the steps, and the sizes of groups.
        process_group: all ranks that average, as a group or a DeviceMesh of one dimension; None for
            the world.
        delay: number of steps before a mean is applied; fewer than between two means.
        bucket_bytes: parameters are reduced in chunks of at most this size, with the same bits and
            less memory; by default in one chunk per dtype, which is faster.

    Raises:
        TypeError: ``schedule`` is not an AveragingSchedule.
        ValueError: group sizes that do not fit the group; a delay that is negative or too
            long; ``bucket_bytes`` below 1; a group that this rank is not in.

    Example::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> averager = ScheduledModelAverager(AveragingSchedule(periods=4, warmup=100))
        >>> averager.average_parameters(model.parameters())
        >>> averager.step
        1
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        schedule: AveragingSchedule,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        delay: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        if not isinstance(schedule, AveragingSchedule):
            raise TypeError(f"schedule must be an AveragingSchedule, got {format_value(schedule)}")
        if not 0 <= delay < schedule.shortest_gap:
            raise ValueError(
                f"delay must be a number of steps from 0 to {schedule.shortest_gap - 1}, got "
                f"{delay}: with periods {schedule.periods}, the next mean is begun after "
                f"{schedule.shortest_gap} steps, and this one is to be applied before"
            )
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, or None, got {bucket_bytes}")
        super().__init__(resolve_group(process_group), schedule.warmup)
        self.schedule = schedule
        """The steps after which parameters are averaged, and the sizes of groups."""
        self.delay = delay
        """Number of steps before a mean is applied."""
        groups = period_groups(schedule, self.process_group)
        self.period_process_group_dict: dict[int, dist.ProcessGroup] = {
            period: group for (period, _), group in zip(schedule.levels, groups, strict=True)
        }
        """For each period, the group over which this rank averages."""
        self._means = [
            RankMeans(group, bucket_bytes=bucket_bytes, background=delay > 0) for group in groups
        ]
        self._in_flight: InFlight | None = None

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent, without headers."""
        return sum(mean.bytes_sent for mean in self._means)

    @disable_compile
    @torch.no_grad()
    def average_parameters(self, params: Params, state: Sequence[Tensor] = ()) -> None:
        """Count a step, and average if it is due.

        Args:
            params: parameters, or parameter groups of an optimizer; the same on all ranks.
            state: more tensors to average.

        Raises:
            NotImplementedError: neither parameters nor groups, as torch raises it.
            ValueError: ranks passed different tensors, or different shards of a DTensor; nothing
                was changed, and the step does not count.
            TransportError: names a missing rank.
        """
        everything = [*params_in(params), *state]
        tensors = list(map(to_local, everything))
        level = self.schedule.level(self.step)
        with named_range(RANGE):
            if level is not None:
                sent = [one.detach().clone() for one in tensors] if self.delay else []
                shards = shard_coordinates(everything)
                mean = self._means[level].launch(tensors, mark=shards)
                self._in_flight = InFlight(self.step + self.delay, sent, mean)
            if self._in_flight is not None and self.step >= self._in_flight.due:
                self._apply(tensors)
                # Autograd counts the versions of a DTensor and of its shard separately.
                torch.autograd.graph.increment_version([*filter(is_dtensor, everything)])
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the step count and the mean in flight, after it is complete.

        ``torch.load`` loads it with ``weights_only=True``, its default.
        """
        found = super().state_dict()
        if self._in_flight is not None:
            found["in_flight"] = self._in_flight.to_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict.

        Args:
            state_dict: the state dict of an averager of the same parameters.

        Raises:
            ValueError: the state dict is of another kind of averager; nothing is changed.
        """
        super().load_state_dict(state_dict)
        saved = state_dict.get("in_flight")
        self._in_flight = None if saved is None else InFlight.from_dict(saved)

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` can load a state dict."""
        super().check(state_dict)
        saved = state_dict.get("in_flight")
        if saved is not None:
            self.check_has(saved, *InFlight._fields)

    def _apply(self, tensors: Sequence[Tensor]) -> None:
        assert self._in_flight is not None
        _, sent, pending = self._in_flight
        self._in_flight = None
        means = pending()
        if sent and len(sent) != len(tensors):
            raise ValueError(
                f"a mean of {len(sent)} tensors was begun, and now there are {len(tensors)}: "
                "parameters are added between the end of one averaging and the next"
            )
        for index, (tensor, mean) in enumerate(zip(tensors, means, strict=True)):
            tensor.copy_(mean) if not sent else tensor.add_(mean - sent[index])


class PeriodicModelAverager(ScheduledModelAverager):
    """Averages all parameters over all ranks once per period, as torch's class of this name does.

    Averages after step ``t``, counted from 0, if ``t >= warmup_steps`` and ``(t - warmup_steps)``
    is a multiple of ``period``. :class:`ScheduledModelAverager` defines the mean.

    Args:
        period: the number of steps from one averaging to the next.
        warmup_steps: number of steps before the first averaging.
        process_group, delay, bucket_bytes: as for :class:`ScheduledModelAverager`.

    Raises:
        ValueError: ``period`` below 1, a negative warm-up, a delay that is not below the period.

    Example::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> averager.schedule.level(104)
        0
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        delay: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        schedule = AveragingSchedule(period, warmup=warmup_steps)
        _warn_if_every_step(period)
        super().__init__(schedule, process_group, delay=delay, bucket_bytes=bucket_bytes)
        self.period = period


class HierarchicalModelAverager(ScheduledModelAverager):
    """Averages over small groups often and over large groups rarely, as torch's class does.

    After step ``t >= warmup_steps``, counted from 0, averages over the groups of the largest period
    that divides ``t`` itself. As in torch, and unlike :class:`PeriodicModelAverager`, periods are
    not counted from the end of the warm-up. With an :class:`AveragingSchedule` you can choose.

    Args:
        period_group_size_dict: the group size for each period, both ascending; the last size is
            that of ``process_group``.
        warmup_steps: number of steps before the first averaging.
        process_group, delay, bucket_bytes: as for :class:`ScheduledModelAverager`.

    Raises:
        ValueError: no period, a period below 1, periods or sizes that do not ascend, a last size
            other than the group's, a negative warm-up, a delay not below the shortest period.

    Example::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> averager = HierarchicalModelAverager({4: 1})
        >>> list(averager.period_process_group_dict)
        [4]
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        delay: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        if not period_group_size_dict:
            raise ValueError("period_group_size_dict must have a group size for each period")
        schedule = AveragingSchedule.of_groups(
            {**period_group_size_dict}, warmup=warmup_steps, raw=True
        )
        _warn_if_every_step(schedule.levels[-1][0])
        super().__init__(schedule, process_group, delay=delay, bucket_bytes=bucket_bytes)


def _warn_if_every_step(period: int) -> None:
    if period == 1:
        warnings.warn(
            "parameters are averaged after every step (period 1), which sends no less than "
            "averaging gradients; DistributedDataParallel alone does that",
            stacklevel=3,
        )
