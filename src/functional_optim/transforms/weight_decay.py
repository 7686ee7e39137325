"""Coupled weight decay: the gradient of an L2 penalty, added to the gradient.

g = g + lambda * p
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Sparse, Transform
from functional_optim.numeric import add, is_active
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class WeightDecayHyper(NamedTuple):
    weight_decay: float  # lambda


class WeightDecayCoefficients(NamedTuple):
    weight_decay: float
    active: bool  # False if lambda is 0: then the gradient is unchanged, even if p is not finite


def weight_decay_coefficients(step: float, hyper: WeightDecayHyper) -> WeightDecayCoefficients:
    return WeightDecayCoefficients(hyper.weight_decay, is_active(hyper.weight_decay))


def weight_decay_transform(
    grad: Tensor, param: Tensor, state: NoState, c: WeightDecayCoefficients
) -> tuple[Tensor, NoState]:
    return add(grad, param, c.weight_decay) if c.active else grad, state


def weight_decay_sparse(hyper: WeightDecayHyper) -> Sparse:
    return "refuse" if is_active(hyper.weight_decay) else "rows"


WEIGHT_DECAY = Transform(
    name="weight_decay",
    hyper=WeightDecayHyper,
    coefficients=weight_decay_coefficients,
    transform=weight_decay_transform,
    bounds=(("weight_decay", NON_NEGATIVE),),
    sparse=weight_decay_sparse,
)


def weight_decay(weight_decay: Scalar) -> Link:
    """Coupled weight decay (L2 regularisation): ``g = g + weight_decay * p``.

    Args:
        weight_decay: lambda, a number >= 0 (or a 0-d tensor, or a schedule).

    Returns:
        A link for :func:`~functional_optim.chain`.

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, lion
        >>> optimizer = chain(weight_decay(0.1), lion(lr=0.5).links[-1])
        >>> optimizer.update(torch.ones(1), torch.zeros(1), optimizer.init(torch.ones(1)))[0]
        tensor([0.5000])

    Reference:
        Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, eq. 2.
    """
    return WEIGHT_DECAY(weight_decay=weight_decay)


def choose_weight_decay(weight_decay: Scalar, decoupled: bool) -> Link:
    """Return decoupled weight decay, or else coupled weight decay."""
    return (
        decoupled_weight_decay(weight_decay)
        if decoupled
        else WEIGHT_DECAY(weight_decay=weight_decay)
    )
