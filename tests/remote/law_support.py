"""Argument type of the laws of every transport, and a reader of all parameters."""

from collections.abc import Callable

from torch import Tensor

from functional_optim import DistributedOptimizer

Make = Callable[..., DistributedOptimizer]
"""Function that makes an optimizer, as ``DistributedOptimizer.over_threads`` does."""


def values(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    """Return copies of the parameters of all workers."""
    with optimizer.snapshot() as snapshot:
        return {name: one.detach().clone() for name, one in snapshot.parameters.items()}
