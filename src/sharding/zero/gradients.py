"""Gradients of local shards: of all of a parameter, or of the range that a rank owns."""

from typing import Any

import torch
from torch import Tensor

from functional_optim.core.checks import check_grad
from sharding.zero.local_shard import LocalShard


def gradient_of(one: LocalShard, given: Any) -> Tensor:
    """A gradient of all of the parameter, or of the shard, as the shard itself lies.

    Raises:
        RuntimeError: a sparse one, for a part.
        TypeError, ValueError: it does not fit.
    """
    grad = _as_shard(one, given) if isinstance(given, Tensor) else given
    check_grad(one.tensor, grad, one.path)
    return grad.detach() if grad.requires_grad else grad


def own_gradient_of(one: LocalShard) -> Tensor | None:
    """Return the parameter's ``.grad``, which torch has seen to fit, as the shard lies; or None.

    Raises:
        RuntimeError: a sparse one, for a part.
    """
    grad = one.param.grad
    if grad is None:
        return None
    own = grad if one.whole else _as_shard(one, grad)
    return own.detach() if own.requires_grad else own


def _as_shard(one: LocalShard, grad: Tensor) -> Tensor:
    param = one.param
    in_shape = grad.shape == param.shape
    if one.whole:
        flat = not in_shape and grad.dim() == 1 and grad.numel() == one.numel
        return grad.reshape(param.shape) if flat else grad
    if not in_shape:
        return grad
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {one.path!r} is sparse, and the parameter is cut between ranks; "
            "take a policy that leaves parameters whole, or dense gradients"
        )
    return grad.reshape(-1)[one.start : one.stop]
