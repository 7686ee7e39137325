"""Optimizers of one rank after some steps, and their state."""

import copy
from typing import Any

import torch
from torch import nn

from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld


def sharded(params: Any, **options: Any) -> Any:
    """Return an optimizer of one rank that compiles nothing."""
    (group,) = LocalWorld(1).groups
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, executor="blocked", **options)


def made(steps: int, scale: float = 1.0) -> Any:
    """Return an optimizer after some steps."""
    params = [
        ("w", nn.Parameter(torch.arange(6.0).view(2, 3))),
        ("b", nn.Parameter(torch.tensor(2.0))),
    ]
    zero = sharded(params, lr=0.25)
    for step in range(steps):
        for _, param in params:
            param.grad = torch.full_like(param, scale * (1.0 + step))
        zero.step()
    return zero


def state_of(zero: Any) -> dict[str, Any]:
    """Return a copy of the whole state dict."""
    zero.consolidate_state_dict()
    return copy.deepcopy(zero.state_dict())


def same(one: Any, other: Any) -> bool:
    """Return True if two trees are equal, ignoring parameter names and comparing tensors bit for
    bit.
    """
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        left, right = (
            {k: v for k, v in tree.items() if k != "param_names"} for tree in (one, other)
        )
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
