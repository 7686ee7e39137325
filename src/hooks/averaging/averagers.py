"""Averagers: after some of the steps, parameters become their mean over a group of ranks."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functional_optim.core.brief import brief
from functional_optim.core.compiling import uncompiled
from functional_optim.core.dtensors import is_sharded, local
from hooks.averaging.levels import groups_of
from hooks.averaging.model_averager import (
    RANGE,
    InFlight,
    ModelAverager,
    Params,
    params_in,
    shards_in,
)
from hooks.averaging.rank_means import RankMeans
from hooks.averaging.schedule import AveragingSchedule
from hooks.ranges import named_range
from sharding.transport.groups import resolved


class ScheduledModelAverager(ModelAverager):
    """Averages parameters over ranks after the steps that a schedule names.

    After a step that is due, every parameter ``x`` of rank ``r`` becomes

        x_r <- (((x_0 + x_1) + x_2) + ...) / W

    over the ``W`` ranks of the group of the level that is due, in the order of ranks. Parameters
    keep their storage, so views of them (DDP's buckets, flat buffers) stay what they are. All of
    them are averaged, whether they had a gradient or not. Of a DTensor, each rank averages its
    shard with the same shards on the other ranks. With a ``delay`` of ``d``, the mean is taken in
    the background while the next ``d`` steps are made, and what those steps changed is kept:
    ``x_r <- x_r + (mean - x_r as it was sent)``.

    Args:
        schedule: which steps, over how many ranks.
        process_group: of all ranks that average; a DeviceMesh of one dimension; None for the world.
        delay: how many steps are made before a mean is applied; fewer than come between two means.
        bucket_bytes: parameters are reduced in chunks of at most so many bytes, to the same bits
            and with less memory; by default in one for each dtype, which is faster.

    Raises:
        TypeError: ``schedule`` is no AveragingSchedule.
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
            raise TypeError(f"schedule must be an AveragingSchedule, got {brief(schedule)}")
        if not 0 <= delay < schedule.shortest_gap:
            raise ValueError(
                f"delay must be a number of steps from 0 to {schedule.shortest_gap - 1}, got "
                f"{delay}: with periods {schedule.periods}, the next mean is begun after "
                f"{schedule.shortest_gap} steps, and this one is to be applied before"
            )
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, or None, got {bucket_bytes}")
        super().__init__(resolved(process_group), schedule.warmup)
        self.schedule = schedule
        """Which steps, over how many ranks."""
        self.delay = delay
        """How many steps are made before a mean is applied."""
        groups = groups_of(schedule, self.process_group)
        self.period_process_group_dict: dict[int, dist.ProcessGroup] = {
            period: group for (period, _), group in zip(schedule.levels, groups, strict=True)
        }
        """For each period, the group over which this rank then averages."""
        self._means = [
            RankMeans(group, bucket_bytes=bucket_bytes, background=delay > 0) for group in groups
        ]
        self._in_flight: InFlight | None = None

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent, headers not counted."""
        return sum(mean.bytes_sent for mean in self._means)

    @uncompiled
    @torch.no_grad()
    def average_parameters(self, params: Params, state: Sequence[Tensor] = ()) -> None:
        """Account for a step, and average if it is due.

        Args:
            params: parameters, or parameter groups of an optimizer; the same on all ranks.
            state: further tensors to average with them.

        Raises:
            NotImplementedError: something else than parameters and groups, as torch raises it.
            ValueError: ranks that brought other tensors, or other shards of a DTensor; nothing was
                changed, and the step does not count.
            TransportError: a rank that did not come, by its number.
        """
        given = [*params_in(params), *state]
        tensors = list(map(local, given))
        level = self.schedule.level(self.step)
        with named_range(RANGE):
            if level is not None:
                self._begin(level, tensors, shards_in(given))
            if self._in_flight is not None and self.step >= self._in_flight.due:
                self._apply(tensors)
                # Autograd counts the versions of a DTensor and of its shard separately.
                torch.autograd.graph.increment_version([*filter(is_sharded, given)])
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, and what is in flight: the mean, once it is there, and what was sent.

        It loads under the defaults of ``torch.load``.
        """
        found = super().state_dict()
        if self._in_flight is not None:
            found["in_flight"] = self._in_flight.saved()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there.

        Args:
            state_dict: of an averager of the same parameters.

        Raises:
            ValueError: of another kind of averager; nothing is changed.
        """
        super().load_state_dict(state_dict)
        saved = state_dict.get("in_flight")
        self._in_flight = None if saved is None else InFlight.loaded(saved)

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check a state dict, as all averagers do."""
        super().check(state_dict)
        saved = state_dict.get("in_flight")
        if saved is not None:
            self.check_has(saved, *InFlight._fields)

    def _begin(self, level: int, tensors: Sequence[Tensor], shards: object) -> None:
        sent = [one.detach().clone() for one in tensors] if self.delay else []
        mean = self._means[level].launch(tensors, mark=shards)
        self._in_flight = InFlight(self.step + self.delay, sent, mean)

    def _apply(self, tensors: Sequence[Tensor]) -> None:
        assert self._in_flight is not None
        _, sent, pending = self._in_flight
        self._in_flight = None
        means = pending.wait()
        if sent and len(sent) != len(tensors):
            raise ValueError(
                f"a mean of {len(sent)} tensors was begun, and now there are {len(tensors)}: "
                "parameters are added between the end of one averaging and the next"
            )
        for place, (tensor, mean) in enumerate(zip(tensors, means, strict=True)):
            tensor.copy_(mean) if not sent else tensor.add_(mean - sent[place])


class PeriodicModelAverager(ScheduledModelAverager):
    """Averages all parameters over all ranks once in a period, as torch's class of this name does.

    After step ``t``, counted from 0, where ``t >= warmup_steps`` and ``(t - warmup_steps)`` is a
    multiple of ``period``; see :class:`ScheduledModelAverager` for what is averaged and how.

    Args:
        period: the number of steps from one averaging to the next.
        warmup_steps: how many steps come before the first one.
        process_group: of the ranks that average; None for the world.
        delay: as :class:`ScheduledModelAverager`'s.
        bucket_bytes: as :class:`ScheduledModelAverager`'s.

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
        _warn_of_every_step(period)
        super().__init__(schedule, process_group, delay=delay, bucket_bytes=bucket_bytes)
        self.period = period


class HierarchicalModelAverager(ScheduledModelAverager):
    """Averages over small groups often and over large ones now and then, as torch's class does.

    After step ``t``, counted from 0, where ``t >= warmup_steps``, over the groups that belong to
    the largest period that divides ``t`` itself: as in torch, and unlike
    :class:`PeriodicModelAverager`, periods are not counted from the end of the warm-up. What is
    made from an :class:`AveragingSchedule` counts as the schedule says.

    Args:
        period_group_size_dict: the group size for each period, both ascending; the last size is
            that of ``process_group``.
        warmup_steps: how many steps come before the first averaging.
        process_group: of all ranks that average; None for the world.
        delay: as :class:`ScheduledModelAverager`'s.
        bucket_bytes: as :class:`ScheduledModelAverager`'s.

    Raises:
        ValueError: no period, one below 1, periods or sizes that do not ascend, a last size that is
            not the group's, a negative warm-up, a delay that is not below the shortest period.

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
        _warn_of_every_step(schedule.levels[-1][0])
        super().__init__(schedule, process_group, delay=delay, bucket_bytes=bucket_bytes)


def _warn_of_every_step(period: int) -> None:
    if period == 1:
        warnings.warn(
            "parameters are averaged after every step (period 1), which sends no less than "
            "averaging gradients; DistributedDataParallel alone does that",
            stacklevel=3,
        )
