"""Caution: no element goes against its gradient. Liang, Chen, Liu & Liu 2024, algorithm 1.

    phi = 1 where u * g > 0, else 0
    u = u * phi                                  or, rescaled,
    u = u * phi * n / (sum of phi + 1)

g is the gradient that the chain was given, n the number of elements of the leaf. The paper rescales
the learning rate; here it is the update, which is the same before a descent.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core.stage import Link, NoState, Transform
from functional_optim.numeric import select


class CautiousHyper(NamedTuple):
    pass


def goes_against(update: Tensor, raw: Tensor) -> Tensor:
    """Return where a step would not go down the gradient; nowhere where the update is NaN.

    A product with the gradient itself might be too small to be told from 0.
    """
    return update * raw.sign() <= 0.0


def cautious_transform(
    grad: Tensor, param: Tensor, state: NoState, c: CautiousHyper, raw: Tensor
) -> tuple[Tensor, NoState]:
    return select(grad, goes_against(grad, raw), 0.0), state


def cautious_rescaled_transform(
    grad: Tensor, param: Tensor, state: NoState, c: CautiousHyper, raw: Tensor
) -> tuple[Tensor, NoState]:
    against = goes_against(grad, raw)
    left = (~against).sum(dtype=torch.float64)
    scale = grad.numel() / (left + 1.0)
    return select(grad, against, 0.0) * scale.to(grad.dtype), state


CAUTIOUS = Transform(
    name="cautious",
    hyper=CautiousHyper,
    transform=cautious_rescaled_transform,
    kind="per_matrix",
    takes_dtensors=True,
    raw=True,
)

CAUTIOUS_UNSCALED = Transform(
    name="cautious_unscaled",
    hyper=CautiousHyper,
    transform=cautious_transform,
    raw=True,
)
"""Another stage, since without the count a leaf may be cut anywhere."""


def cautious(rescale: bool = True) -> Link:
    """Leave out the elements of an update that go against the gradient that the chain was given.

    ``u = u * phi`` with ``phi = 1 where u * g > 0, else 0``; rescaled, so that a leaf moves as much
    as before, also times ``n / (sum(phi) + 1)`` for a leaf of ``n`` elements. The gradient ``g`` is
    as it came, before any clip; behind :func:`~functional_optim.accumulate`, it is the mean of
    those that it has let through.

    Args:
        rescale: whether to. It needs whole leaves (``kind="per_matrix"``); without it, leaves may
            be cut anywhere. A leaf of one element is halved by it.

    Returns:
        A link for :func:`~functional_optim.chain`, to stand behind what keeps momentum. Behind
        ``scale_by_adam`` and ``scale_by_lion`` it makes C-AdamW and C-Lion.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend, trace
        >>> optimizer = chain(trace(momentum=1.0), cautious(), descend(lr=1.0))
        >>> params, state = torch.zeros(2), optimizer.init(torch.zeros(2))
        >>> for gradient in ([3.0, 3.0], [-1.0, 1.0]):
        ...     params, state = optimizer.update(params, torch.tensor(gradient), state)
        ...     print(params)
        tensor([-2., -2.])
        tensor([-2., -6.])

    Reference:
        Liang, Chen, Liu, Liu, "Cautious optimizers: improving training with one line of code",
        2024, algorithm 1, with the constant 1 beside the sum.
    """
    return (CAUTIOUS if rescale else CAUTIOUS_UNSCALED)()
