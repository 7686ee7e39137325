"""Averaging: the ways to average that are measured, and the bytes that each of them should send."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from benchmarks.outer_settings import OUTER_SETTINGS
from functional_optim import Optimizer
from hooks.averaging import (
    AveragingSchedule,
    ModelAverager,
    OuterModelAverager,
    ScheduledModelAverager,
)
from hooks.averaging.compression import Blocks, Compression, TopK
from hooks.averaging.contrib import Statistical
from sharding import ParameterSpec, plan

TITLE = "averaging: "
"""Prefix of the names of these parts."""
BYTES = f"{TITLE}bytes"
RACE = f"{TITLE}a slow link"
RULE = "SGD"
"""Optimizer of the ranks while bytes are counted."""
RANKS = 4
FLOAT32_BYTES = 4
LEAST_STEPS = 4
"""Minimum number of counted steps."""


class Way(Protocol):
    """A way for ranks to come to one model."""

    @property
    def period(self) -> int:
        """Return the number of steps after which the same bytes are sent again."""

    def averager(self, module: nn.Module, warmup_steps: int) -> ModelAverager | None:
        """Return the averager of each step; None if gradients are averaged. Collective.

        Args:
            module: the module whose parameters are averaged.
            warmup_steps: the number of first steps, in which gradients are averaged instead.
        """

    def sent_bytes(self, module: nn.Module, ranks: int) -> float:
        """Return the bytes that a rank should send in a period, by arithmetic alone."""


def steps_of(way: Way) -> int:
    """Return the number of counted steps: whole periods."""
    return way.period * math.ceil(LEAST_STEPS / way.period)


def mean_bytes(numel: int, ranks: int) -> float:
    """Return the bytes that a rank sends for one mean in float32.

    A rank sends all but its share to the owners of the other shares, and then its share to all
    other ranks.
    """
    return 2 * (ranks - 1) / ranks * FLOAT32_BYTES * numel


def numel_of(module: nn.Module) -> int:
    """Return the number of elements of all parameters together."""
    return sum(param.numel() for param in module.parameters())


@dataclass(frozen=True)
class Reduced:
    """Way in which DDP averages the gradients in every step."""

    period: int = 1

    def averager(self, module: nn.Module, warmup_steps: int) -> None:
        """See :meth:`Way.averager`."""

    def sent_bytes(self, module: nn.Module, ranks: int) -> float:
        """See :meth:`Way.sent_bytes`."""
        return mean_bytes(numel_of(module), ranks)


@dataclass(frozen=True)
class Averaged:
    """Way in which a schedule averages the parameters."""

    schedule: AveragingSchedule

    @property
    def period(self) -> int:
        """See :attr:`Way.period`."""
        return self.schedule.levels[-1][0]

    def averager(self, module: nn.Module, warmup_steps: int) -> ModelAverager:
        """See :meth:`Way.averager`."""
        return ScheduledModelAverager(replace(self.schedule, warmup=warmup_steps))

    def sent_bytes(self, module: nn.Module, ranks: int) -> float:
        """See :meth:`Way.sent_bytes`."""
        sizes = [ranks if size is None else size for _, size in self.schedule.levels]
        counts = self.schedule.counts(self.period)
        means = [mean_bytes(numel_of(module), size) for size in sizes]
        return sum(count * mean for count, mean in zip(counts, means, strict=True))


@dataclass(frozen=True)
class Outer:
    """Way in which an outer rule gets the mean change of the parameters."""

    period: int
    fragments: int = 1
    compression: Compression | None = None
    outer: Callable[[], Optimizer] = OUTER_SETTINGS["OpenDiLoCo"].optimizer
    delayed: Mapping[str, Any] = field(default_factory=dict)
    """The averager's options for a mean in the background."""

    def averager(self, module: nn.Module, warmup_steps: int) -> ModelAverager:
        """See :meth:`Way.averager`."""
        return OuterModelAverager(
            module.parameters(),
            self.outer(),
            self.period,
            warmup_steps=warmup_steps,
            fragments=self.fragments,
            compression=self.compression,
            **self.delayed,
        )

    def sent_bytes(self, module: nn.Module, ranks: int) -> float:
        """See :meth:`Way.sent_bytes`."""
        if self.compression is None:
            return mean_bytes(numel_of(module), ranks)
        named = module.named_parameters()
        specs = [ParameterSpec(name, tuple(param.shape)) for name, param in named]
        dealt = plan(specs, self.fragments, policy="greedy")
        owned = map(dealt.owned, range(self.fragments))
        sizes = [sum(math.prod(specs[one.parameter].shape) for one in part) for part in owned]
        return (ranks - 1) * sum(map(self.compression.payload_bytes, sizes))


def _periodic(period: int) -> Averaged:
    return Averaged(AveragingSchedule(period))


DDP = "DDP"
WAYS: Mapping[str, Way] = {
    DDP: Reduced(),
    "periodic, H = 4": _periodic(4),
    "periodic, H = 16": _periodic(16),
    "periodic, H = 64": _periodic(64),
    "hierarchical, 2 ranks every 4, all every 16": Averaged(AveragingSchedule((4, 16), (2, None))),
    "DiLoCo, H = 16": Outer(16),
    "DiLoCo, H = 16, Blocks, 8 bits": Outer(16, compression=Blocks(bits=8)),
    "DiLoCo, H = 16, Blocks, 4 bits": Outer(16, compression=Blocks(bits=4)),
    "DiLoCo, H = 16, Statistical, 2 bits": Outer(16, compression=Statistical(bits=2)),
    "DiLoCo, H = 16, TopK, 1/32": Outer(16, compression=TopK(fraction=1 / 32)),
    "streaming, H = 16, 4 fragments": Outer(16, fragments=4),
    "streaming, H = 16, 4 fragments, 2 bits": Outer(
        16, fragments=4, compression=Statistical(bits=2)
    ),
}
"""Ways of averaging whose bytes are counted, by name."""

MULOCO = OUTER_SETTINGS["MuLoCo, AdamW"]
RACERS: Mapping[str, Way] = {
    DDP: Reduced(),
    "post-local SGD, H = 16": _periodic(16),
    f"DiLoCo, H = {MULOCO.period}": Outer(MULOCO.period, outer=MULOCO.optimizer),
    f"streaming DiLoCo, H = {MULOCO.period}, 4 fragments, delay 5, 2 bits": Outer(
        MULOCO.period,
        fragments=4,
        compression=Statistical(bits=2),
        outer=MULOCO.optimizer,
        delayed={"delay": 5, "mixing": 0.5},
    ),
}
"""Ways that train over a slow link, by name. Their outer settings are published values, not tuned
here."""
