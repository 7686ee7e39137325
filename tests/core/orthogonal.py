"""Least and greatest values for the algorithms that orthogonalize matrices."""

import math
from collections.abc import Callable
from typing import Any

from functional_optim import dion, normuon, scion

BELOW_ONE = (0.0, math.nextafter(1.0, 0.0))
POSITIVE = (0.0, math.inf)
BOUNDS: dict[Callable[..., Any], dict[str, tuple[float, float]]] = {
    normuon: {
        "lr": (0.0, 1e300),
        "weight_decay": POSITIVE,
        "momentum": BELOW_ONE,
        "beta2": BELOW_ONE,
        "eps": POSITIVE,
    },
    scion: {"lr": (0.0, 1e300), "momentum": BELOW_ONE, "scale": POSITIVE},
    dion: {
        "lr": (0.0, 1e300),
        "weight_decay": POSITIVE,
        "momentum": (0.0, 1.0),
        "eps": POSITIVE,
    },
}
