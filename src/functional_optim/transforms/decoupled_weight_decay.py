"""Decoupled weight decay: the parameter shrinks independently of the gradient.

    p = (1 - lr * lambda) * p

It changes the parameter, so it is a Rule, before another rule of the chain.
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, NoState, Rule, Sparse
from functional_optim.numeric import is_active, mul


class DecoupledWeightDecayHyper(NamedTuple):
    lr: float  # the chain's learning rate
    weight_decay: float  # lambda


class DecoupledWeightDecayCoefficients(NamedTuple):
    factor: float  # 1 - lr * lambda
    active: bool


def decoupled_weight_decay_coefficients(
    step: float, hyper: DecoupledWeightDecayHyper
) -> DecoupledWeightDecayCoefficients:
    return DecoupledWeightDecayCoefficients(
        1 - hyper.lr * hyper.weight_decay, is_active(hyper.weight_decay)
    )


def decoupled_weight_decay_rule(
    param: Tensor, grad: Tensor, state: NoState, c: DecoupledWeightDecayCoefficients
) -> tuple[Tensor, NoState]:
    return mul(param, c.factor) if c.active else param, state


def decoupled_weight_decay_sparse(hyper: DecoupledWeightDecayHyper) -> Sparse:
    return "dense" if is_active(hyper.weight_decay) else "rows"


DECOUPLED_WEIGHT_DECAY = Rule(
    name="decoupled_weight_decay",
    hyper=DecoupledWeightDecayHyper,
    coefficients=decoupled_weight_decay_coefficients,
    rule=decoupled_weight_decay_rule,
    uses_gradient=False,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("weight_decay", NON_NEGATIVE)),
    sparse=decoupled_weight_decay_sparse,
)


def decoupled_weight_decay(weight_decay: Scalar) -> Link:
    """Decoupled weight decay: ``p = (1 - lr * weight_decay) * p``, with the chain's ``lr``.

    Args:
        weight_decay: lambda, a number >= 0 (or a 0-d tensor, or a schedule).

    Returns:
        A link for :func:`~functional_optim.chain`. Put it before the rule.

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(decoupled_weight_decay(0.5), sgd(lr=0.5).links[-1])
        >>> optimizer.update(torch.ones(1), torch.zeros(1), optimizer.init(torch.ones(1)))[0]
        tensor([0.7500])

    Reference:
        Loshchilov & Hutter, "Decoupled weight decay regularization", ICLR 2019, eq. 1.
    """
    return DECOUPLED_WEIGHT_DECAY(weight_decay=weight_decay)
