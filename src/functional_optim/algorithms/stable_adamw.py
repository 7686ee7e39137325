"""StableAdamW: Wortsman et al. 2023, algorithm 2: AdamW with Adafactor's update clipping.

    w1_t = (1 - b1) / (1 - b1^t),    w2_t = (1 - b2) / (1 - b2^t)
    m_t = (1 - w1_t) * m_{t-1} + w1_t * g_t
    v_t = (1 - w2_t) * v_{t-1} + w2_t * g_t^2
    r_t = sqrt(mean(g_t^2 / max(v_t, eps^2)))          (over all elements of a parameter)
    l_t = lr / max(1, r_t)
    p_t = p_{t-1} - l_t * (lambda * p_{t-1} + m_t / (sqrt(v_t) + eps))

With the weights w, averages need no bias correction: m_t is Adam's m_hat.
"""

import math
from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import addcmul, clamp, is_active, lerp, mul, shift
from functional_optim.transforms.scale_by_trust_ratio import norm_of


class StableAdamWState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of the same shape and dtype


class StableAdamWHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    weight_decay: float  # lambda


class StableAdamWCoefficients(NamedTuple):
    weight_1: float  # w1
    beta_2: float  # 1 - w2
    weight_2: float  # w2
    eps: float
    step_size: float  # -lr
    weight_decay: float
    decays: bool


def stable_adamw_coefficients(step: float, hyper: StableAdamWHyper) -> StableAdamWCoefficients:
    beta_1, beta_2 = hyper.betas
    weight_2 = (1 - beta_2) / (1 - beta_2**step)
    return StableAdamWCoefficients(
        (1 - beta_1) / (1 - beta_1**step),
        1 - weight_2,
        weight_2,
        hyper.eps,
        -hyper.lr,
        hyper.weight_decay,
        is_active(hyper.weight_decay),
    )


def stable_adamw_rule(
    param: Tensor, grad: Tensor, state: StableAdamWState, c: StableAdamWCoefficients
) -> tuple[Tensor, StableAdamWState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    root = exp_avg_sq.sqrt()
    size = float(max(grad.numel(), 1)) ** 0.5
    rms = norm_of(grad / clamp(root, c.eps, math.inf)) / size
    step = mul(clamp(rms, 1.0, math.inf).reciprocal(), c.step_size)
    direction = exp_avg / shift(root, c.eps)
    if c.decays:
        direction = direction + mul(param, c.weight_decay)
    return param + direction * step.to(param.dtype), StableAdamWState(exp_avg, exp_avg_sq)


STABLE_ADAMW = Rule(
    name="stable_adamw",
    hyper=StableAdamWHyper,
    state=StableAdamWState,
    coefficients=stable_adamw_coefficients,
    rule=stable_adamw_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("weight_decay", NON_NEGATIVE),
    ),
    kind="per_matrix",
    takes_dtensors=True,
)


@constructor
def stable_adamw(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.99),
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 1e-2,
    *,
    maximize: bool = False,
) -> Optimizer:
    """StableAdamW: AdamW with smaller steps when gradients exceed their average square.

    ``r = sqrt(mean(g^2 / max(v_hat, eps^2)))`` over each parameter, and ``p = p - lr / max(1, r) *
    (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)``. A sudden large gradient, to which ``v`` has
    not adapted, makes ``r`` large: no gradient clipping is needed.

    The state has 2 tensors of the parameter's shape and dtype: 8 bytes per float32 parameter. The
    rule needs whole parameters, since ``r`` is a mean over one; it reads each of them twice.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, and the least value of the root in ``r``, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0. The decay is reduced with the
            learning rate.
        maximize: ascend instead of descend (the decay still shrinks).

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no StableAdamW. The mean is taken in
        float64, whatever the parameter's dtype.

    Example::

        >>> import torch
        >>> optimizer, params = stable_adamw(lr=0.1, weight_decay=0.0), torch.ones(2)
        >>> state = optimizer.init(params)
        >>> for grads in (torch.tensor([1.0, 1.0]), torch.tensor([1.0, 100.0])):
        ...     params, state = optimizer.update(params, grads, state)
        >>> params
        tensor([0.8182, 0.8387])

    Reference:
        Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
        NeurIPS 2023, algorithm 2. The defaults are those of the package torch-optimi, since the
        paper varies them.
    """
    return chain(
        maximized(maximize), STABLE_ADAMW(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    )
