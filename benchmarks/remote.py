"""DistributedOptimizer: which models on one server, by which rules, and who steps them."""

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
"""How the names of its parts begin."""
TRAINERS = (1, 2, 4)
"""How many threads step at once, all in one process beside the server."""

RPC, THREADS = "ours, RPC", "ours, threads"
SCRIPTED, PYTHON = "torch scripted", "torch Python"
NAMES = (RPC, THREADS, SCRIPTED, PYTHON)

TURN_SECONDS: dict[Size, float] = {"full": 0.1, "quick": 0.02, "tiny": 0.001}
"""How long a turn lasts at least."""
WARM_SECONDS: dict[Size, float] = {"full": 0.5, "quick": 0.1, "tiny": 0.0}
"""For how long one trainer steps before anything is timed."""


class Model(NamedTuple):
    """Equal parameters: how many tensors, and their shape, in each size."""

    name: str
    shapes: dict[Size, tuple[int, Shape]]
    large: bool = False
    """Whether the arithmetic of a step takes longer than sending it."""

    def parameters(self, size: Size) -> list[Shape]:
        """The shape of each parameter."""
        count, shape = self.shapes[size]
        return [shape] * count

    def numel(self, size: Size) -> int:
        """Elements of all parameters together."""
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
    """One rule, as each side is asked for it."""

    ours: Any
    """What our DistributedOptimizer takes first."""
    scripted: type[torch.optim.Optimizer] | None
    """A class for which torch's has a functional form, and so steps it in TorchScript."""
    python: type[torch.optim.Optimizer]
    """A class for which it has none, and so steps it in Python."""
    options: dict[str, Any]


RULES: Mapping[str, Rule] = {
    "SGD": Rule(torch.optim.SGD, torch.optim.SGD, SGD, {"lr": LR}),
    "AdamW": Rule(torch.optim.AdamW, torch.optim.AdamW, AdamW, {"lr": LR, "weight_decay": DECAY}),
    "QHM": Rule(qhm, None, peer.QHM, QHM_OPTIONS),
}
"""By the names that they have in ``benchmarks.cases.CASES``."""


def names_of(rule: str) -> list[str]:
    """Return the names of the contestants that step by a rule."""
    return [name for name in NAMES if name != SCRIPTED or RULES[rule].scripted is not None]
