"""RAdam: Liu et al. 2020, algorithm 2.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    r_inf = 2 / (1 - b2) - 1,   r_t = r_inf - 2 * t * b2^t / (1 - b2^t)
    s_t = sqrt((r_t - 4) (r_t - 2) r_inf / ((r_inf - 4) (r_inf - 2) r_t))
    p_t = p_{t-1} - lr / (1 - b1^t) * m_t * s_t * sqrt(1 - b2^t) / (sqrt(v_t) + eps)   if r_t > 5
    p_t = p_{t-1} - lr / (1 - b1^t) * m_t                                              otherwise

Order of operations and defaults are those of torch.optim.RAdam. The paper has r_t > 4, and no eps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import above, add, addcmul, div, lerp, mul, select, shift
from functional_optim.transforms.weight_decay import choose_weight_decay


class RAdamState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, the same


class RAdamHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float


class RAdamCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    correction_1: float  # 1 - b1^t
    lr: float
    is_plain: float  # 1 if r_t <= 5, so that this is a plain step of momentum; else 0
    eps: float  # 0 in a plain step
    root: float  # sqrt(1 - b2^t), or 1
    rectification: float  # s_t, or 1


def radam_coefficients(step: float, hyper: RAdamHyper) -> RAdamCoefficients:
    beta_1, beta_2 = hyper.betas
    correction_2 = 1 - beta_2**step
    limit = 2 / (1 - beta_2) - 1
    length = limit - 2 * step * (beta_2**step) / correction_2
    # A plain step does not use the root. Use 6 there, so that the root and its derivative exist.
    r = above(length, 5.0, length, 6.0)
    r_inf = above(length, 5.0, limit, 6.0)
    squared = (r - 4) * (r - 2) * r_inf / ((r_inf - 4) * (r_inf - 2) * r)
    return RAdamCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        1 - beta_1**step,
        hyper.lr,
        above(length, 5.0, 0.0, 1.0),
        above(length, 5.0, hyper.eps, 0.0),
        above(length, 5.0, correction_2**0.5, 1.0),
        squared**0.5,
    )


def radam_rule(
    param: Tensor, grad: Tensor, state: RAdamState, c: RAdamCoefficients
) -> tuple[Tensor, RAdamState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    # In a plain step the divisor is exactly 1, so one program serves both kinds of step.
    is_plain = shift(torch.zeros_like(exp_avg_sq), c.is_plain) > 0.0
    divisor = shift(select(exp_avg_sq, is_plain, 1.0).sqrt(), c.eps)
    direction = mul(div(exp_avg, c.correction_1), c.lr) * mul(divisor.reciprocal(), c.root)
    param = add(param, mul(direction, c.rectification), -1.0)
    return param, RAdamState(exp_avg, exp_avg_sq)


RADAM = Rule(
    name="radam",
    hyper=RAdamHyper,
    state=RAdamState,
    coefficients=radam_coefficients,
    rule=radam_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("betas", BELOW_ONE), ("eps", NON_NEGATIVE)),
)


@constructor
def radam(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """RAdam: Adam that starts as momentum SGD, until its second average is reliable.

    ``p = p - lr * s * m_hat / (sqrt(v_hat) + eps')`` with Adam's averages and a factor ``s`` that
    grows towards 1. While the window of ``v`` is short (the first 5 steps for the default
    ``betas``), the step is ``p = p - lr * m_hat``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root of ``v``, before its bias correction, >= 0.
        weight_decay: coefficient of the decay, >= 0: added to the gradient as ``weight_decay * p``.
        decoupled_weight_decay: shrink the parameter by ``1 - lr * weight_decay`` instead, as the
            authors' program does.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.RAdam(foreach=False). Its
        state is two tensors of the parameter's shape and dtype.

    Example::

        >>> import torch
        >>> optimizer = radam(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.7000, 1.2000])

    Reference:
        Liu et al., "On the variance of the adaptive learning rate and beyond", ICLR 2020,
        algorithm 2. Order of operations, ``eps`` and the bound 5 are torch.optim.RAdam's; the
        bound of the paper is 4.
    """
    return chain(
        maximized(maximize),
        choose_weight_decay(weight_decay, decoupled_weight_decay),
        RADAM(lr=lr, betas=betas, eps=eps),
    )
