"""Composed optimizers, and their runs in one process and on each rank."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adam_mini,
    adamw,
    came,
    chain,
    clip_by_global_norm,
    dadapt_adam,
    dadapt_sgd,
    dog,
    freeze,
    if_any,
    ldog,
    matching,
    muon,
    novograd,
    partition,
    prodigy,
    schedule_free_adamw,
    schedule_free_sgd,
)
from hooks import zero_step_hook
from sharding import ZeroRedundancyOptimizer
from tests.composition.trees import COMPOSED, HOLES, grads_at, kind, params_of
from tests.hooks_alone.test_composed import Model
from tests.hooks_alone.test_composed import losses as batch

KEEPS = (
    "accumulate",
    "finite",
    "finite batches",
    "sam",
    "one name twice",
    "batches of parts",
    "gates in gates",
    "batches at a global step",
)
"""Optimizers with scalars that all parameters share, such as a global step."""

SHARDED: dict[str, Callable[[], Optimizer]] = {
    **{name: COMPOSED[name] for name in ("parts", "clip over parts", "frozen", "masked decay")},
    **{name: COMPOSED[name] for name in (*KEEPS, "global step")},
    "schedule-free": schedule_free_adamw,
    "schedule-free parts": lambda: chain(
        freeze(if_any(matching("head*"))), clip_by_global_norm(0.5), schedule_free_sgd(0.1)
    ),
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
    "dadapt_adam": lambda: dadapt_adam(d0=1e-2),
    "dadapt_sgd": lambda: dadapt_sgd(d0=1e-2, momentum=0.5),
    "dog": lambda: dog(reps_rel=0.1),
    "ldog and novograd": lambda: partition(
        {"matrices": ldog(reps_rel=0.1), "rest": novograd(0.1)}, kind
    ),
    "came and adam_mini": lambda: partition({"matrices": came(0.01), "rest": adam_mini(0.1)}, kind),
    "muon and adamw": lambda: partition({"matrices": muon(0.1), "rest": adamw(0.01)}, kind),
    "overrides": lambda: adamw(0.01).override(matching("*bias"), weight_decay=0.0, lr=0.1),
}

FOUND = ("dadapt_adam", "dadapt_sgd", "dog", "prodigy")
"""Optimizers that find their step size from sums over all parameters."""

ALL_AT_ONCE = (*KEEPS, "global step", "schedule-free", "schedule-free parts", *FOUND)

WITH_NORM = (
    "clip over parts",
    "frozen",
    "accumulate",
    "sam",
    "schedule-free parts",
    *FOUND,
    "gates in gates",
    "batches at a global step",
)
"""Optimizers whose norms round differently if a parameter is cut."""

WHOLE = ("ldog and novograd", "came and adam_mini")
"""Optimizers that need whole parameters."""


def named() -> dict[str, Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


def grouped(params: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return two groups, which ZeRO divides one after the other."""
    pairs_ = list(params.items())
    return [{"params": pairs_[:2]}, {"params": pairs_[2:]}]


class Run:
    """Parameters and optimizer of one process or of one rank."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        self.params = named()
        self.optimizer = optimizer(self.params)
        with torch.no_grad():  # as where a module is loaded after its optimizer was made
            for param in self.params.values():
                param.mul_(-2.0)

    def steps(self, numbers: range) -> None:
        for number in numbers:
            for name, grad in grads_at(number, missing=HOLES).items():
                self.params[name].grad = grad
            self.optimizer.step()

    def detached(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}


def alone(name: str, until: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    run = Run(lambda params: TorchOptimizer(grouped(params), SHARDED[name]()))
    run.steps(range(until))
    return run.detached(), copy.deepcopy(run.optimizer.state_dict())


def sharded(name: str, policy: Any, group: Any, views: bool = False) -> Run:
    def made(params: dict[str, Tensor]) -> ZeroRedundancyOptimizer:
        groups, chosen = grouped(params), SHARDED[name]()
        zero = ZeroRedundancyOptimizer(groups[:1], chosen, group, views, policy=policy)
        zero.add_param_group(groups[1])
        return zero

    return Run(made)


class Hooked:
    """Rank that steps from a hook, in buckets of a few bytes."""

    def __init__(self, name: str, group: Any, hook: Callable[..., Any] = zero_step_hook) -> None:
        self.ddp = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=1e-5)
        self.params = dict(self.ddp.module.named_parameters())
        self.zero = ZeroRedundancyOptimizer(
            self.params.items(), SHARDED[name](), group, overlap_with_ddp=True
        )
        self.ddp.register_comm_hook(group, hook(self.ddp, self.zero))

    def steps(self, numbers: range) -> None:
        ranks = self.zero.process_group.size()
        part = ranks / 2 if self.zero.rank < 2 else 0.0  # sums of powers of two are exact
        for number in numbers:
            self.ddp.zero_grad()
            (part * self.ddp(batch(number))).backward()
