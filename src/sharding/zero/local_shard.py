"""Local shard: the range of one parameter that this rank owns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.engine.tensors import check_grad
from sharding.ownership import OwnedRange


@dataclass(slots=True, eq=False)
class LocalShard:
    """Elements [start, stop) of a parameter, owned by this rank: a leaf of the engine."""

    path: str
    start: int
    stop: int
    whole: bool
    group: int
    """The number of the parameter group."""
    param: Tensor
    tensor: Tensor
    """The tensor in ``.optim``: the parameter itself, or a flat view of the range."""

    def gradient_from(self, given: Any) -> Tensor:
        """Return the gradient of the shard, in its shape, from one of the shard or its parameter.

        Raises:
            RuntimeError: a sparse gradient, for a part of a parameter.
            TypeError, ValueError: the gradient does not fit.
        """
        grad: Tensor = given
        if isinstance(given, Tensor):
            if given.shape == self.param.shape:
                grad = slice_gradient(given, self)
            elif self.whole and given.dim() == 1 and given.numel() == self.param.numel():
                grad = given.reshape(self.param.shape)
        check_grad(self.tensor, grad, self.path)
        return grad.detach() if grad.requires_grad else grad


def slice_gradient(grad: Tensor, one: LocalShard | OwnedRange) -> Tensor:
    """Return the gradient of a range of elements, from that of its whole parameter.

    Raise RuntimeError for a sparse gradient of a parameter that is cut.
    """
    if one.whole:
        return grad
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {one.path!r} is sparse, and the parameter is cut between ranks; "
            "take a policy that leaves parameters whole, or dense gradients"
        )
    return grad.reshape(-1)[one.start : one.stop]
