"""DistributedOptimizer: models on one server, rules, and the contestants that step them."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from benchmarks.cases import DECAY, LR, QHM_OPTIONS
from benchmarks.peers import qhm as peer
from benchmarks.peers.unscripted import SGD, AdamW
from benchmarks.workloads import Shape, Size
from functional_optim import qhm

TITLE = "remote, "
"""Prefix of the names of these parts."""
TRAINERS = (1, 2, 4)
"""Numbers of threads that step at the same time, in one process beside the server."""

RPC, THREADS = "ours, RPC", "ours, threads"
SCRIPTED, PYTHON = "torch scripted", "torch Python"
NAMES = (RPC, THREADS, SCRIPTED, PYTHON)

TURN_SECONDS: dict[Size, float] = {"full": 0.1, "quick": 0.02, "tiny": 0.001}
"""Minimum length of a turn."""
WARM_SECONDS: dict[Size, float] = {"full": 0.5, "quick": 0.1, "tiny": 0.0}
"""Time that one trainer steps before anything is timed."""


class Model(NamedTuple):
    """Model of equal parameters: the number of tensors and their shape, in each size."""

    name: str
    shapes: dict[Size, tuple[int, Shape]]
    large: bool = False
    """True if the arithmetic of a step takes longer than the messages."""

    def parameters(self, size: Size) -> list[Shape]:
        """Return the shape of each parameter."""
        count, shape = self.shapes[size]
        return [shape] * count

    def numel(self, size: Size) -> int:
        """Return the number of elements of all parameters together."""
        count, shape = self.shapes[size]
        return count * prod(shape)


MODELS: Mapping[str, Model] = {
    one.name: one
    for one in (
        Model("0.3 M in 40", {"full": (40, (75, 100)), "quick": (40, (750,)), "tiny": (3, (10,))}),
        Model(
            "4 M in 8",
            {"full": (8, (500, 1000)), "quick": (8, (50_000,)), "tiny": (2, (20,))},
            large=True,
        ),
        Model(
            "4 M in 400",
            {"full": (400, (100, 100)), "quick": (400, (1000,)), "tiny": (6, (5,))},
            large=True,
        ),
    )
}


class Rule(NamedTuple):
    """Rule, with the arguments of each side."""

    ours: Any
    """First argument of our DistributedOptimizer."""
    scripted: type[torch.optim.Optimizer] | None
    """Class that torch's DistributedOptimizer steps in TorchScript, by its functional form."""
    python: type[torch.optim.Optimizer]
    """Class without a functional form, which torch's DistributedOptimizer steps in Python."""
    options: dict[str, Any]


RULES: Mapping[str, Rule] = {
    "SGD": Rule(torch.optim.SGD, torch.optim.SGD, SGD, {"lr": LR}),
    "AdamW": Rule(torch.optim.AdamW, torch.optim.AdamW, AdamW, {"lr": LR, "weight_decay": DECAY}),
    "QHM": Rule(qhm, None, peer.QHM, QHM_OPTIONS),
}
"""Rules by their names in ``benchmarks.cases.CASES``."""


def names_of(rule: str) -> list[str]:
    """Return the names of the contestants that step by a rule."""
    return [name for name in NAMES if name != SCRIPTED or RULES[rule].scripted is not None]
