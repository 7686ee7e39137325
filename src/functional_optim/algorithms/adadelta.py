"""Adadelta: Zeiler 2012, algorithm 1.

v_t = rho * v_{t-1} + (1 - rho) * g_t^2
d_t = sqrt(u_{t-1} + eps) / sqrt(v_t + eps) * g_t
u_t = rho * u_{t-1} + (1 - rho) * d_t^2
p_t = p_{t-1} - lr * d_t                     (the paper has lr = 1)
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE, UNIT
from functional_optim.numeric import add, addcmul, mul, shift
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class AdadeltaState(NamedTuple):
    square_avg: Tensor  # v, of the parameter's shape and dtype
    acc_delta: Tensor  # u, the same


class AdadeltaHyper(NamedTuple):
    lr: float  # learning rate
    rho: float  # decay of both averages
    eps: float


class AdadeltaCoefficients(NamedTuple):
    lr: float
    rho: float
    weight: float  # 1 - rho
    eps: float


def adadelta_coefficients(step: float, hyper: AdadeltaHyper) -> AdadeltaCoefficients:
    return AdadeltaCoefficients(hyper.lr, hyper.rho, 1 - hyper.rho, hyper.eps)


def adadelta_rule(
    param: Tensor, grad: Tensor, state: AdadeltaState, c: AdadeltaCoefficients
) -> tuple[Tensor, AdadeltaState]:
    square_avg = addcmul(mul(state.square_avg, c.rho), grad, grad, c.weight)
    root = shift(square_avg, c.eps).sqrt()
    delta = shift(state.acc_delta, c.eps).sqrt() / root * grad
    acc_delta = addcmul(mul(state.acc_delta, c.rho), delta, delta, c.weight)
    return add(param, delta, -c.lr), AdadeltaState(square_avg, acc_delta)


ADADELTA = Rule(
    name="adadelta",
    hyper=AdadeltaHyper,
    state=AdadeltaState,
    coefficients=adadelta_coefficients,
    rule=adadelta_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("rho", UNIT), ("eps", NON_NEGATIVE)),
)


@constructor
def adadelta(
    lr: Scalar = 1.0,
    rho: Scalar = 0.9,
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Adadelta: steps in the units of the parameter, from running averages of squares.

    ``d = sqrt(u + eps) / sqrt(v + eps) * g``, then ``p = p - lr * d``, with ``v`` and ``u`` the
    running averages of ``g^2`` and of ``d^2``.

    Args:
        lr: factor of the step, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        rho: decay of both averages, in [0, 1].
        eps: added under both roots, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.Adadelta(foreach=False).

    Example::

        >>> import torch
        >>> optimizer = adadelta(rho=0.0, eps=1.0)
        >>> params, state = optimizer.update(
        ...     torch.ones(1), torch.zeros(1), optimizer.init(torch.ones(1)))
        >>> params
        tensor([1.])

    Reference:
        Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701, algorithm 1.
    """
    return chain(
        maximized(maximize), coupled_weight_decay(weight_decay), ADADELTA(lr=lr, rho=rho, eps=eps)
    )
