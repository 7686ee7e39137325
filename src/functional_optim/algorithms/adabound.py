"""AdaBound and AMSBound: Luo et al. 2019, algorithms 2 and 3, as their authors run them.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    u_t = v_t, or for AMSBound max(u_{t-1}, v_t)
    low_t = final_lr * (1 - 1 / (gamma * t + 1)),    high_t = final_lr * (1 + 1 / (gamma * t))
    l_t = clip(lr * sqrt(1 - b2^t) / (1 - b1^t) / (sqrt(u_t) + eps), low_t, high_t)
    p_t = p_{t-1} - l_t * m_t

The paper has no bias correction and no eps, and divides l_t by sqrt(t); all programs run the steps
above.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.numeric import addcmul, clamp, lerp, mul, shift
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class AdaBoundState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of the same shape and dtype
    max_exp_avg_sq: list[Tensor]  # [u], of the same shape and dtype; [] without amsbound


class AdaBoundHyper(NamedTuple):
    lr: float  # learning rate of the first steps, which are Adam's
    betas: tuple[float, float]  # decay of m and of v
    final_lr: float  # learning rate of the last steps, which are those of SGD
    gamma: float  # rate at which the bounds approach final_lr
    eps: float
    amsbound: bool


class AdaBoundCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    eps: float
    step_size: float  # lr * sqrt(1 - b2^t) / (1 - b1^t)
    low: float
    high: float
    amsbound: bool


def adabound_init(param: Tensor, hyper: AdaBoundHyper) -> AdaBoundState:
    return AdaBoundState(
        torch.zeros_like(param),
        torch.zeros_like(param),
        [torch.zeros_like(param)] if hyper.amsbound else [],
    )


def adabound_coefficients(step: float, hyper: AdaBoundHyper) -> AdaBoundCoefficients:
    (beta_1, beta_2), progress = hyper.betas, hyper.gamma * step
    return AdaBoundCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        hyper.eps,
        hyper.lr * (1 - beta_2**step) ** 0.5 / (1 - beta_1**step),
        hyper.final_lr * (1 - 1 / (progress + 1)),
        hyper.final_lr * (1 + 1 / progress),
        hyper.amsbound,
    )


def adabound_rule(
    param: Tensor, grad: Tensor, state: AdaBoundState, c: AdaBoundCoefficients
) -> tuple[Tensor, AdaBoundState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    second, maximum = exp_avg_sq, state.max_exp_avg_sq
    if c.amsbound:
        second = torch.maximum(maximum[0], exp_avg_sq)
        maximum = [second]
    rate = mul(shift(second.sqrt(), c.eps).reciprocal(), c.step_size)
    param = torch.addcmul(param, clamp(rate, c.low, c.high), exp_avg, value=-1.0)
    return param, AdaBoundState(exp_avg, exp_avg_sq, maximum)


ADABOUND = Rule(
    name="adabound",
    hyper=AdaBoundHyper,
    state=AdaBoundState,
    init=adabound_init,
    state_depends_on=("amsbound",),
    coefficients=adabound_coefficients,
    rule=adabound_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("final_lr", FINITE_NON_NEGATIVE),
        ("gamma", Interval(0.0, 1.0, low_open=True, high_open=True)),
        ("eps", NON_NEGATIVE),
    ),
)


@constructor
def adabound(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    final_lr: Scalar = 0.1,
    gamma: Scalar = 1e-3,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    amsbound: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """AdaBound: steps that begin as Adam's and end as those of SGD with momentum.

    ``p = p - clip(lr / (sqrt(v_hat) + eps), low, high) * m_hat``, with bounds of the step size that
    both approach ``final_lr``: ``low = final_lr * (1 - 1 / (gamma * t + 1))`` and ``high = final_lr
    * (1 + 1 / (gamma * t))``. The bounds act on the step size after its bias corrections.

    The state has 2 tensors of the parameter's shape and dtype (3 with ``amsbound``): 8 bytes per
    float32 parameter. A step reads 4 numbers and writes 3 for each element.

    Args:
        lr: learning rate of the first steps, a finite number >= 0. Any number may be a 0-d tensor
            or a schedule.
        betas: decay of the two averages, each in [0, 1).
        final_lr: learning rate of the last steps, a finite number >= 0. A schedule of ``lr`` does
            not change it: give ``final_lr`` a schedule of the same shape.
        gamma: rate at which the bounds approach ``final_lr``, in (0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        amsbound: divide by the largest second average so far (AMSBound).
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no AdaBound.

    Example::

        >>> import torch
        >>> optimizer = adabound(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Luo, Xiong, Liu, Sun, "Adaptive gradient methods with dynamic bound of learning rate", ICLR
        2019, algorithms 2 and 3. The bias correction and the defaults are those of the authors'
        package adabound.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        ADABOUND(lr=lr, betas=betas, final_lr=final_lr, gamma=gamma, eps=eps, amsbound=amsbound),
    )
