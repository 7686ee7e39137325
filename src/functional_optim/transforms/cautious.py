"""Caution: no element goes against its gradient. Liang, Chen, Liu & Liu 2024, algorithm 1.

    phi = 1 where u * g > 0, else 0
    u = u * phi                                  or, rescaled,
    u = u * phi * n / (sum of phi + 1)

g is the gradient that the chain gets, n the number of elements of the leaf. The paper rescales the
learning rate. This transform rescales the update, which is equal before a descent.
"""

import torch
from torch import Tensor

from functional_optim.core.stage import Link, NoHyper, NoState, Transform
from functional_optim.numeric import select


def goes_against(update: Tensor, raw: Tensor) -> Tensor:
    """Return a mask of the elements whose step is not along the negative gradient.

    The mask is False if the update is NaN. It uses the sign of the gradient, since a product with a
    small gradient may round to 0.
    """
    return update * raw.sign() <= 0.0


def cautious_transform(
    grad: Tensor, param: Tensor, state: NoState, c: NoHyper, raw: Tensor
) -> tuple[Tensor, NoState]:
    return select(grad, goes_against(grad, raw), 0.0), state


def cautious_rescaled_transform(
    grad: Tensor, param: Tensor, state: NoState, c: NoHyper, raw: Tensor
) -> tuple[Tensor, NoState]:
    against = goes_against(grad, raw)
    left = (~against).sum(dtype=torch.float64)
    scale = grad.numel() / (left + 1.0)
    return select(grad, against, 0.0) * scale.to(grad.dtype), state


CAUTIOUS = Transform(
    name="cautious",
    hyper=NoHyper,
    transform=cautious_rescaled_transform,
    kind="per_matrix",
    takes_dtensors=True,
    raw=True,
)

CAUTIOUS_UNSCALED = Transform(
    name="cautious_unscaled", hyper=NoHyper, transform=cautious_transform, raw=True
)
"""A second stage, which may be cut anywhere, since it does not count elements."""


def cautious(rescale: bool = True) -> Link:
    """Set elements of an update to 0 that go against the gradient that the chain gets.

    ``u = u * phi`` with ``phi = 1 where u * g > 0, else 0``. With ``rescale`` the update is also
    multiplied by ``n / (sum(phi) + 1)`` for a leaf of ``n`` elements, so that the leaf moves about
    as much as before. ``g`` is the gradient before all other stages. After
    :func:`~functional_optim.accumulate`, it is the accumulated mean.

    Args:
        rescale: rescale the update. It needs whole leaves (``kind="per_matrix"``), and halves the
            update of a leaf with one element. Without it, leaves may be cut anywhere.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after the stage with momentum. After
        ``scale_by_adam`` it gives C-AdamW, and after ``scale_by_lion`` C-Lion.

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
        2024, algorithm 1, with the constant 1 added to the sum.
    """
    return (CAUTIOUS if rescale else CAUTIOUS_UNSCALED)()
