"""What the tests of storage share."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

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
"""Every storage, over rules with all kinds of state: (a base, arguments of ``stored``)."""


def dtype_of(arguments: dict[str, Any]) -> torch.dtype:
    """The dtype of the parameters."""
    return torch.bfloat16 if "param" in arguments else torch.float32


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns: minus zero is not zero, and NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


def assert_same(a: Any, b: Any) -> None:
    """Two trees of tensors, the same bit for bit."""
    left, spec = optree.tree_flatten(a)
    right, other = optree.tree_flatten(b)
    assert spec == other
    for one, two in zip(left, right, strict=True):
        assert one.dtype == two.dtype and torch.equal(bits(one), bits(two))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def steps(optimizer: Optimizer, params: Any, grads: list[Any], **hyper: Any) -> tuple[Any, Any]:
    """Params and state after several pure steps."""
    state = optimizer.init(params)
    for one in grads:
        params, state = optimizer.update(params, one, state, **hyper)
    return params, state
