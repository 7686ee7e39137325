"""Support of the tests of storage: every storage, over rules with all kinds of state."""

from collections.abc import Callable
from typing import Any

import torch

from functional_optim import (
    Optimizer,
    adagrad,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    lion,
    rmsprop,
    sgd,
)
from functional_optim.storage import stored

BASES: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: adamw(lr=1e-2, amsgrad=True),
    "momentum": lambda: sgd(lr=0.1, momentum=0.9, weight_decay=0.01),
    "plain": lambda: sgd(lr=0.1),
    "lion": lambda: lion(lr=1e-2),
    "adagrad": adagrad,
    "rmsprop": lambda: rmsprop(momentum=0.9, centered=True),
    "clipped": lambda: chain(clip_by_value(2.0), clip_by_global_norm(1.0), adamw(lr=1e-2)),
}

MIXED = {"exp_avg": "int8", "exp_avg_sq": "int8+stochastic", "*": "bfloat16"}

CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("adamw", {"param": "bfloat16"}),
    "master": ("adamw", {"param": "bfloat16+master"}),
    "kahan": ("momentum", {"param": "bfloat16+kahan"}),
    "stochastic": ("plain", {"param": "bfloat16+stochastic"}),
    "state bfloat16": ("rmsprop", {"state": "bfloat16"}),
    "state stochastic": ("adagrad", {"state": "bfloat16+stochastic"}),
    "state int8": ("lion", {"state": "int8"}),
    "state int8 stochastic": ("adamw", {"state": "int8+stochastic", "seed": 3}),
    "smallest": ("adamw", {"param": "bfloat16+stochastic", "state": "int8+stochastic"}),
    "clipped": ("clipped", {"param": "bfloat16+kahan", "state": MIXED, "state_device": "cpu"}),
}
"""For each name, the key of a base, and arguments of ``stored``."""


def made(name: str) -> tuple[Optimizer, torch.dtype]:
    """Return a stored optimizer, and the dtype of its parameters."""
    base, arguments = CHOICES[name]
    dtype = torch.bfloat16 if "param" in arguments else torch.float32
    return stored(BASES[base](), **arguments), dtype


def steps(optimizer: Optimizer, params: Any, grads: list[Any], **hyper: Any) -> tuple[Any, Any]:
    """Return parameters and state after several pure steps."""
    state = optimizer.init(params)
    for one in grads:
        params, state = optimizer.update(params, one, state, **hyper)
    return params, state
