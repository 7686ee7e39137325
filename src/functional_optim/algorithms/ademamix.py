"""AdEMAMix: Pagliardini et al. 2024, algorithm 1.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    s_t = b3_t * s_{t-1} + (1 - b3_t) * g_t          (the slow average: no bias correction)
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    u_t = (m_t / (1 - b1^t) + alpha_t * s_t) / (sqrt(v_t / (1 - b2^t)) + eps)
    p_t = p_{t-1} - lr * (u_t + lambda * p_{t-1})

Without warm-up, alpha_t = alpha and b3_t = b3. In a warm-up of T steps, alpha rises from 0 in a
straight line, and so does the half-life of the slow average from that of b1 (section 3):

    alpha_t = min(t / T, 1) * alpha
    b3_t = min(exp(1 / ((1 - t / T) / ln b1 + (t / T) / ln b3)), b3)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.adam import adam_denominator
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.numeric import add, addcdiv, addcmul, beside, is_active, lerp, mul
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class AdEMAMixState(NamedTuple):
    exp_avg: Tensor  # m, the fast average, of the parameter's shape and dtype
    exp_avg_slow: Tensor  # s, the slow average, of the same shape and dtype
    exp_avg_sq: Tensor  # v, of the same shape and dtype


class AdEMAMixHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float, float]  # decay of m, of v and of s
    alpha: float  # weight of s
    eps: float
    alpha_warmup: int  # T of alpha; 0 for no warm-up
    beta3_warmup: int  # T of b3; 0 for no warm-up


class AdEMAMixCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    weight_3: float  # 1 - b3_t
    scale: float  # 1 / (1 - b1^t)
    alpha: float  # alpha_t
    root: float  # sqrt(1 - b2^t)
    eps: float
    lr: float


def least(x: float, y: float) -> float:
    """Return the smaller of two numbers; ``y`` is a tensor only if ``x`` is one."""
    if isinstance(x, Tensor):
        return torch.minimum(x, beside(x, y))
    return min(x, y)


def inverse_log(beta: float) -> float:
    """Return ``1 / ln(beta)``, which is proportional to the half-life; 0 for ``beta = 0``."""
    if isinstance(beta, Tensor):
        return 1 / torch.log(beta)
    return 1 / math.log(beta) if beta > 0.0 else 0.0


def warm_up_beta(step: float, start: float, beta: float, steps: int) -> float:
    """Return b3_t: its half-life rises from that of ``start`` over so many steps."""
    if steps == 0 or not is_active(beta):
        return beta
    share = least(step / float(steps), 1.0)
    inverse = (1 - share) * inverse_log(start) + share * inverse_log(beta)
    return least(math.e ** (1 / inverse), beta)


def ademamix_coefficients(step: float, hyper: AdEMAMixHyper) -> AdEMAMixCoefficients:
    beta_1, beta_2, beta_3 = hyper.betas
    alpha = hyper.alpha
    if hyper.alpha_warmup != 0:
        alpha = least(step / float(hyper.alpha_warmup), 1.0) * alpha
    return AdEMAMixCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        1 - warm_up_beta(step, beta_1, beta_3, hyper.beta3_warmup),
        1 / (1 - beta_1**step),
        alpha,
        (1 - beta_2**step) ** 0.5,
        hyper.eps,
        hyper.lr,
    )


def ademamix_rule(
    param: Tensor, grad: Tensor, state: AdEMAMixState, c: AdEMAMixCoefficients
) -> tuple[Tensor, AdEMAMixState]:
    fast = lerp(state.exp_avg, grad, c.weight_1)
    slow = lerp(state.exp_avg_slow, grad, c.weight_3)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    direction = add(mul(fast, c.scale), slow, c.alpha)
    denominator = adam_denominator(exp_avg_sq, c.root, c.eps)
    param = addcdiv(param, direction, denominator, -c.lr)
    return param, AdEMAMixState(fast, slow, exp_avg_sq)


ADEMAMIX = Rule(
    name="ademamix",
    hyper=AdEMAMixHyper,
    state=AdEMAMixState,
    coefficients=ademamix_coefficients,
    rule=ademamix_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("alpha", FINITE_NON_NEGATIVE),
        ("eps", NON_NEGATIVE),
        ("alpha_warmup", Interval(0)),
        ("beta3_warmup", Interval(0)),
    ),
)


@constructor
def ademamix(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar, Scalar] = (0.9, 0.999, 0.9999),
    alpha: Scalar = 5.0,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    alpha_warmup: int = 0,
    beta3_warmup: int = 0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """AdEMAMix: Adam with a second, slow average of the gradient added to the first.

    ``p = p - lr * ((m_hat + alpha * s) / (sqrt(v_hat) + eps) + weight_decay * p)``, where ``m_hat``
    and ``v_hat`` are Adam's bias-corrected averages and ``s`` is the slow average without bias
    correction. The slow average forgets a gradient only after about ``1 / (1 - betas[2])`` steps.

    The state has 3 tensors of the parameter's shape and dtype: 12 bytes per float32 parameter. A
    step reads 5 numbers and writes 4 for each element. In bfloat16, an average with a decay so
    close to 1 stops changing early: ``stored(..., param="bfloat16")`` keeps it in float32.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the fast average, of the average square and of the slow average, each in
            [0, 1).
        alpha: weight of the slow average, a finite number >= 0. The paper uses 4 to 10.
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        alpha_warmup: number of steps in which ``alpha`` rises from 0, a whole number >= 0. The
            paper uses the number of all steps for both warm-ups.
        beta3_warmup: number of steps in which ``betas[2]`` rises from ``betas[0]``, a whole number
            >= 0.
        maximize: ascend instead of descend (the decay still shrinks).

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no AdEMAMix.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> optimizer = ademamix(lr=0.1, betas=(0.9, 0.999, 0.75), alpha=2.0)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.8500, 1.1500])

    Reference:
        Pagliardini, Ablin, Grangier, "The AdEMAMix optimizer: better, faster, older", ICLR 2025,
        algorithm 1. The defaults are those of the code in the paper's appendix.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        ADEMAMIX(
            lr=lr,
            betas=betas,
            alpha=alpha,
            eps=eps,
            alpha_warmup=alpha_warmup,
            beta3_warmup=beta3_warmup,
        ),
    )
