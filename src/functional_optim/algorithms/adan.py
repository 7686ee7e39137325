"""Adan: Xie et al. 2022, algorithm 1, as its authors run it.

With betas that are decays (1 less the paper's) and d_t = g_t - g_{t-1}, where d_1 = 0:

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * d_t
    n_t = b3 * n_{t-1} + (1 - b3) * (g_t + b2 * d_t)^2
    u_t = (m_t / (1 - b1^t) + b2 * v_t / (1 - b2^t)) / (sqrt(n_t / (1 - b3^t)) + eps)
    p_t = (p_{t-1} - lr * u_t) / (1 + lr * lambda)

The paper starts the averages at the first gradient. The authors' program, and all other programs,
start them at 0 and correct the bias. There is no restart.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.adam import adam_denominator
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import add, addcdiv, addcmul, at_first_step, is_active, lerp, mul


class AdanState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_diff: Tensor  # v, of the same shape and dtype
    exp_avg_sq: Tensor  # n, of the same shape and dtype
    previous_grad: Tensor  # g of the step before, of the same shape and dtype


class AdanHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float, float]  # decay of m, of v and of n
    eps: float
    weight_decay: float  # lambda
    no_prox: bool  # shrink the parameter before the step, as AdamW; else after it


class AdanCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    weight_2: float  # 1 - b2; 0 at the first step
    lookahead: float  # b2, weight of d in the square; 0 at the first step
    beta_3: float
    weight_3: float  # 1 - b3
    scale: float  # 1 / (1 - b1^t), of m
    diff_scale: float  # b2 / (1 - b2^t), of v
    root: float  # sqrt(1 - b3^t)
    eps: float
    lr: float
    factor: float  # 1 - lr * lambda without prox, else 1 / (1 + lr * lambda)
    shrinks_before: bool
    shrinks_after: bool


def adan_coefficients(step: float, hyper: AdanHyper) -> AdanCoefficients:
    beta_1, beta_2, beta_3 = hyper.betas
    decays, decay = is_active(hyper.weight_decay), hyper.lr * hyper.weight_decay
    return AdanCoefficients(
        1 - beta_1,
        at_first_step(step, 0.0, 1 - beta_2),
        at_first_step(step, 0.0, beta_2),
        beta_3,
        1 - beta_3,
        1 / (1 - beta_1**step),
        beta_2 / (1 - beta_2**step),
        (1 - beta_3**step) ** 0.5,
        hyper.eps,
        hyper.lr,
        1 - decay if hyper.no_prox else 1 / (1 + decay),
        decays and hyper.no_prox,
        decays and not hyper.no_prox,
    )


def adan_rule(
    param: Tensor, grad: Tensor, state: AdanState, c: AdanCoefficients
) -> tuple[Tensor, AdanState]:
    difference = grad - state.previous_grad
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    exp_avg_diff = lerp(state.exp_avg_diff, difference, c.weight_2)
    ahead = add(grad, difference, c.lookahead)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_3), ahead, ahead, c.weight_3)
    direction = add(mul(exp_avg, c.scale), exp_avg_diff, c.diff_scale)
    denominator = adam_denominator(exp_avg_sq, c.root, c.eps)
    if c.shrinks_before:
        param = mul(param, c.factor)
    param = addcdiv(param, direction, denominator, -c.lr)
    if c.shrinks_after:
        param = mul(param, c.factor)
    return param, AdanState(exp_avg, exp_avg_diff, exp_avg_sq, torch.clone(grad))


ADAN = Rule(
    name="adan",
    hyper=AdanHyper,
    state=AdanState,
    coefficients=adan_coefficients,
    rule=adan_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("weight_decay", NON_NEGATIVE),
    ),
)


@constructor
def adan(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar, Scalar] = (0.98, 0.92, 0.99),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    no_prox: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Adan: adaptive steps with Nesterov momentum, from averages of gradients and their changes.

    ``p = (p - lr * (m_hat + beta_2 * v_hat) / (sqrt(n_hat) + eps)) / (1 + lr * weight_decay)`` with
    bias-corrected averages of the gradient ``g``, of its change ``d`` since the step before, and of
    ``(g + beta_2 * d)^2``. At the first step, ``d`` is 0.

    The state has 4 tensors of the parameter's shape and dtype, the last gradient among them: 16
    bytes per float32 parameter. A step reads 6 numbers and writes 5 for each element.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule. Adan
            takes rates up to ten times those of AdamW.
        betas: decay of the three averages, each in [0, 1). The paper's betas are 1 minus these:
            0.02, 0.08 and 0.01.
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decay, >= 0. The paper uses 0.02.
        no_prox: shrink the parameter by ``1 - lr * weight_decay`` before the step, as AdamW does;
            else divide it by ``1 + lr * weight_decay`` after the step.
        maximize: ascend instead of descend (the decay still shrinks).

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no Adan.

    Example::

        >>> import torch
        >>> optimizer = adan(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Xie, Zhou, Li, Lin, Yan, "Adan: adaptive Nesterov momentum algorithm for faster optimizing
        deep models", 2022, algorithm 1. The defaults and the bias correction are those of the
        authors' program.
    """
    return chain(
        maximized(maximize),
        ADAN(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, no_prox=no_prox),
    )
