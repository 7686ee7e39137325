"""Adamax: Kingma & Ba 2015, algorithm 2, with torch's eps inside the maximum.

m_t = b1 * m_{t-1} + (1 - b1) * g_t
u_t = max(b2 * u_{t-1}, |g_t| + eps)         (the paper has no eps)
p_t = p_{t-1} - lr / (1 - b1^t) * m_t / u_t
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import addcdiv, lerp, mul, shift
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class AdamaxState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_inf: Tensor  # u, the same


class AdamaxHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of u
    eps: float


class AdamaxCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    eps: float
    step_size: float  # -lr / (1 - b1^t)


def adamax_coefficients(step: float, hyper: AdamaxHyper) -> AdamaxCoefficients:
    beta_1, beta_2 = hyper.betas
    return AdamaxCoefficients(1 - beta_1, beta_2, hyper.eps, -(hyper.lr / (1 - beta_1**step)))


def adamax_rule(
    param: Tensor, grad: Tensor, state: AdamaxState, c: AdamaxCoefficients
) -> tuple[Tensor, AdamaxState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    exp_inf = torch.maximum(mul(state.exp_inf, c.beta_2), shift(grad.abs(), c.eps))
    return addcdiv(param, exp_avg, exp_inf, c.step_size), AdamaxState(exp_avg, exp_inf)


ADAMAX = Rule(
    name="adamax",
    hyper=AdamaxHyper,
    state=AdamaxState,
    coefficients=adamax_coefficients,
    rule=adamax_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("betas", BELOW_ONE), ("eps", NON_NEGATIVE)),
)


@constructor
def adamax(
    lr: Scalar = 2e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Adamax: Adam with the infinity norm in place of the second average.

    ``u = max(beta_2 * u, |g| + eps)``, then ``p = p - lr / (1 - beta_1^t) * m / u``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the average and of the norm, each in [0, 1).
        eps: added to ``|g|``, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.Adamax(foreach=False).

    Example::

        >>> import torch
        >>> optimizer = adamax(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Kingma & Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 2.
    """
    return chain(
        maximized(maximize), coupled_weight_decay(weight_decay), ADAMAX(lr=lr, betas=betas, eps=eps)
    )
