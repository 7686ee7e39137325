"""DiLoCo with composed inner optimizers, stopped in mid-period, on threads or processes."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.claims.muloco import muloco_inner
from benchmarks.outer_settings import OUTER_SETTINGS
from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    labels,
    matching,
    muon,
    partition,
    with_shape,
)
from hooks import PostLocalSGDOptimizer
from hooks.averaging import OuterModelAverager
from tests.zero_local.compare import digest

from .training import model, saved_and_loaded, train, values

STEPS, PERIOD = 11, 4
OUTER = OUTER_SETTINGS["MuLoCo, Muon"]
PARTS = partition(
    {"matrices": muon(lr=0.1), "rest": adamw(lr=0.05)},
    labels({"matrices": with_shape(lambda shape: len(shape) == 2)}, default="rest"),
)
WITHIN: dict[str, Optimizer] = {
    "parts": PARTS,
    "MuLoCo": muloco_inner(0.05, 0.1, not_hidden=matching("2.*")),
    "a clip of all parts": chain(clip_by_global_norm(0.01), PARTS),
}
FORMS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (6, {}),
    (7, {"fragments": 2, "delay": 1}),
)
"""Number of steps before the stop, and options of the averager, for each run."""


class Run:
    """A rank's model with one of the optimizers in ``WITHIN``."""

    def __init__(self, group: Any, within: str, options: dict[str, Any]) -> None:
        self.rank, self.module = group.rank(), model()
        self.optimizer = PostLocalSGDOptimizer(
            TorchOptimizer(self.module.named_parameters(), WITHIN[within]),
            OuterModelAverager(
                self.module.parameters(), OUTER.optimizer(), PERIOD, process_group=group, **options
            ),
        )

    def steps(self, which: range) -> list[list[Tensor]]:
        return train(self.module, self.optimizer, self.rank, which)

    def moved(self) -> Any:
        """Return the states of model and optimizer, saved to a file and loaded by torch.load."""
        return saved_and_loaded((self.module.state_dict(), self.optimizer.state_dict()))

    def digest(self) -> str:
        """Return a digest of parameters and all state: inner, outer, anchors, means in flight."""
        found = [*values(self.module), *tensors_in(self.optimizer.state_dict())]
        return digest(found)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [one for part in tree for one in tensors_in(part)] if isinstance(tree, list) else []


def whole_and_stopped(group: Any, name: str) -> list[list[str]]:
    """Return for each form the digests of an uninterrupted run and of a stopped run."""
    found = []
    for cut, options in FORMS:
        whole, first, second = (Run(group, name, options) for _ in range(3))
        whole.steps(range(STEPS))
        first.steps(range(cut))
        module, optimizer = first.moved()
        second.module.load_state_dict(module)
        second.optimizer.load_state_dict(optimizer)
        second.steps(range(cut, STEPS))
        found.append([whole.digest(), second.digest()])
    return found


def in_the_world(name: str) -> list[list[str]]:
    """Run ``whole_and_stopped`` on a process of the default group."""
    return whole_and_stopped(dist.group.WORLD, name)
