"""ADOPT: Taniguchi et al. 2024, algorithm 2, with the clipping of its later version.

The gradients are g_0, g_1, ... The first one only starts the average square: v_0 = g_0^2. Then

    c_t = t^clip_power
    n_t = clip(g_t / max(sqrt(v_{t-1}), eps), -c_t, c_t)
    m_t = b1 * m_{t-1} + (1 - b1) * n_t          (m_0 = 0, no bias correction)
    p_t = p_{t-1} - lr * m_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2

Step n of the optimizer is t = n - 1. The decay is skipped at the first step too: it is added to
the gradient, or it shrinks the parameter by 1 - lr * lambda before the step.
"""

import math
from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import add, addcmul, at_first_step, clamp, is_active, lerp, mul


class AdoptState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of the same shape and dtype


class AdoptHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    weight_decay: float  # lambda
    decouple: bool  # shrink the parameter; else add the decay to the gradient
    clip: bool  # clip n; else c is infinite
    clip_power: float


class AdoptCoefficients(NamedTuple):
    weight_1: float  # 1 - b1; 0 at the first step
    beta_2: float  # 0 at the first step
    weight_2: float  # 1 - b2; 1 at the first step
    eps: float  # 1 at the first step: v is 0 there, and eps may be
    limit: float  # c; 0 at the first step, infinity later without clipping
    lr: float  # 0 at the first step
    added_decay: float  # of the parameter to the gradient
    factor: float  # 1 - lr * lambda; 1 at the first step
    adds_decay: bool
    shrinks: bool


def adopt_coefficients(step: float, hyper: AdoptHyper) -> AdoptCoefficients:
    beta_1, beta_2 = hyper.betas
    decays = is_active(hyper.weight_decay)
    limit = math.inf
    if hyper.clip:
        limit = at_first_step(step, 1.0, step - 1.0) ** hyper.clip_power
    return AdoptCoefficients(
        at_first_step(step, 0.0, 1 - beta_1),
        at_first_step(step, 0.0, beta_2),
        at_first_step(step, 1.0, 1 - beta_2),
        at_first_step(step, 1.0, hyper.eps),
        at_first_step(step, 0.0, limit),
        at_first_step(step, 0.0, hyper.lr),
        hyper.weight_decay,
        at_first_step(step, 1.0, 1 - hyper.lr * hyper.weight_decay),
        decays and not hyper.decouple,
        decays and hyper.decouple,
    )


def adopt_rule(
    param: Tensor, grad: Tensor, state: AdoptState, c: AdoptCoefficients
) -> tuple[Tensor, AdoptState]:
    if c.adds_decay:
        grad = add(grad, param, c.added_decay)
    if c.shrinks:
        param = mul(param, c.factor)
    normed = grad / clamp(state.exp_avg_sq.sqrt(), c.eps, math.inf)
    exp_avg = lerp(state.exp_avg, clamp(normed, -c.limit, c.limit), c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    return add(param, exp_avg, -c.lr), AdoptState(exp_avg, exp_avg_sq)


ADOPT = Rule(
    name="adopt",
    hyper=AdoptHyper,
    state=AdoptState,
    coefficients=adopt_coefficients,
    rule=adopt_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("weight_decay", NON_NEGATIVE),
        ("clip_power", FINITE_NON_NEGATIVE),
    ),
)


@constructor
def adopt(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.9999),
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 0.0,
    decouple: bool = False,
    clip: bool = True,
    clip_power: Scalar = 0.25,
    *,
    maximize: bool = False,
) -> Optimizer:
    """ADOPT: Adam that divides a gradient by the average square of the gradients before it.

    ``m = beta_1 * m + (1 - beta_1) * clip(g / max(sqrt(v), eps))`` with the ``v`` of the step
    before, then ``p = p - lr * m`` and ``v = beta_2 * v + (1 - beta_2) * g^2``. The first step only
    sets ``v = g^2``: the parameter stays. Neither average has a bias correction.

    The state has 2 tensors of the parameter's shape and dtype: 8 bytes per float32 parameter. A
    step reads 4 numbers and writes 3 for each element.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: least value of the root, >= 0.
        weight_decay: coefficient of the decay, >= 0. The first step has none.
        decouple: shrink the parameter by ``1 - lr * weight_decay``; else add ``weight_decay * p``
            to the gradient.
        clip: clip the magnitude of the quotient of step ``t`` to ``t ** clip_power``, where the
            second step of the optimizer is ``t = 1``. The first version of the paper does not clip.
        clip_power: a finite number >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no ADOPT.

    Example::

        >>> import torch
        >>> optimizer, params = adopt(lr=0.1, betas=(0.5, 0.9999)), torch.ones(2)
        >>> grads, state = torch.tensor([3.0, -2.0]), optimizer.init(params)
        >>> params, state = optimizer.update(params, grads, state)
        >>> params
        tensor([1., 1.])
        >>> optimizer.update(params, grads, state)[0]
        tensor([0.9500, 1.0500])

    Reference:
        Taniguchi et al., "ADOPT: modified Adam can converge with any beta2 with the optimal rate",
        NeurIPS 2024, algorithm 2. The clipping and the defaults are those of the authors' program.
    """
    return chain(
        maximized(maximize),
        ADOPT(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decouple=decouple,
            clip=clip,
            clip_power=clip_power,
        ),
    )
