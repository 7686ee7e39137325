"""Ascent: the gradient is negated before all other stages.

The stage is always first in a chain, so decay and clipping get the negated gradient.
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.core.stage import Link, NoState, Transform, rows_of_sparse


class MaximizeHyper(NamedTuple):
    maximize: bool


def maximize_transform(
    grad: Tensor, param: Tensor, state: NoState, c: MaximizeHyper
) -> tuple[Tensor, NoState]:
    return -grad if c.maximize else grad, state


MAXIMIZE = Transform(
    name="maximize",
    hyper=MaximizeHyper,
    transform=maximize_transform,
    sparse=rows_of_sparse,
    leads=True,
)


def maximized(maximize: bool = True) -> Link:
    """Ascend instead of descend: ``g = -g``, before every other stage of the chain.

    Args:
        maximize: False leaves the gradient unchanged.

    Returns:
        A link for :func:`~functional_optim.chain`.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(maximized(), sgd(lr=1.0).links[-1])
        >>> optimizer.update(torch.ones(1), torch.ones(1), optimizer.init(torch.ones(1)))[0]
        tensor([2.])
    """
    return MAXIMIZE(maximize=maximize)
