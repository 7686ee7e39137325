"""Rows of adaptive algorithms for the tables of the core: optimizers, and bounds of numbers."""

import math
from typing import Any

from functional_optim import (
    Optimizer,
    ademamix,
)

VARIANTS: dict[str, Optimizer] = {
    "ademamix": ademamix(0.1, (0.9, 0.999, 0.99), weight_decay=0.2),
    "ademamix warm-up": ademamix(0.1, alpha_warmup=3, beta3_warmup=2, maximize=True),
}
"""Every algorithm, with the options that change its state or its path."""

_OF_ALL = {
    "lr": (0.0, 1e300),
    "eps": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
}
BOUNDS: dict[Any, dict[str, tuple[float, float]]] = {
    ademamix: {**_OF_ALL, "alpha": (0.0, 1e300)},
}
"""Numbers that torch does not have: the least and the greatest that is accepted."""
