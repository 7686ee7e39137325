"""NAdam: Dozat 2016, algorithm 2, with the schedule of momentum of torch.optim.NAdam.

    u_t = b1 * (1 - 0.96^(t * psi) / 2),   U_t = u_1 * ... * u_t
    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    p_t = p_{t-1} - lr * ((1 - u_t) / (1 - U_t) * g_t + u_{t+1} / (1 - U_{t+1}) * m_t)
                       / (sqrt(v_t / (1 - b2^t)) + eps)

The product U is in the state, since b1 and psi may change at each step. It is one number per
parameter, so this rule runs as torch's own operations, without a compiled kernel. As in torch.optim
U is rounded to float32 (to float64 if that is torch's default dtype), whatever the dtype of the
parameter.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.scalars import default_scalar_dtype, quotient_in, scalar_dtype
from functional_optim.numeric import addcdiv, addcmul, div, lerp, mul, number, shift
from functional_optim.transforms.weight_decay import choose_weight_decay


class NAdamState(NamedTuple):
    mu_product: Tensor  # U, 0-d, in float32 unless torch's default dtype is float64
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, the same


class NAdamHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    momentum_decay: float  # psi


class NAdamCoefficients(NamedTuple):
    mu: float  # u_t
    mu_next: float  # u_{t+1}
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    correction_2: float  # 1 - b2^t
    eps: float
    step_g: float  # -lr * (1 - u_t), to be divided by 1 - U_t
    step_m: float  # -lr * u_{t+1}, to be divided by 1 - U_{t+1}
    lr_dtype: str  # dtype of a tensor lr, in which torch.optim.NAdam divides; else "float64"


def nadam_init(param: Tensor, hyper: Any) -> NAdamState:
    return NAdamState(
        param.new_ones((), dtype=default_scalar_dtype()),
        torch.zeros_like(param),
        torch.zeros_like(param),
    )


def nadam_coefficients(step: float, hyper: NAdamHyper) -> NAdamCoefficients:
    beta_1, beta_2 = hyper.betas
    mu = beta_1 * (1.0 - 0.5 * (0.96 ** (step * hyper.momentum_decay)))
    mu_next = beta_1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * hyper.momentum_decay)))
    return NAdamCoefficients(
        mu,
        mu_next,
        1 - beta_1,
        beta_2,
        1 - beta_2,
        1 - beta_2**step,
        hyper.eps,
        -hyper.lr * (1.0 - mu),
        -hyper.lr * mu_next,
        scalar_dtype(hyper.lr),
    )


def nadam_rule(
    param: Tensor, grad: Tensor, state: NAdamState, c: NAdamCoefficients
) -> tuple[Tensor, NAdamState]:
    mu_product = mul(state.mu_product, c.mu)
    product = number(mu_product)
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    denominator = shift(div(exp_avg_sq, c.correction_2).sqrt(), c.eps)
    step_g = quotient_in(c.step_g, 1.0 - product, c.lr_dtype)
    step_m = quotient_in(c.step_m, 1.0 - product * c.mu_next, c.lr_dtype)
    param = addcdiv(param, grad, denominator, step_g)
    param = addcdiv(param, exp_avg, denominator, step_m)
    return param, NAdamState(mu_product, exp_avg, exp_avg_sq)


NADAM = Rule(
    name="nadam",
    hyper=NAdamHyper,
    state=NAdamState,
    init=nadam_init,
    state_depends_on=(),
    coefficients=nadam_coefficients,
    rule=nadam_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("momentum_decay", NON_NEGATIVE),
    ),
)


@constructor
def nadam(
    lr: Scalar = 2e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    momentum_decay: Scalar = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """NAdam: Adam with Nesterov's momentum, whose decay grows towards ``betas[0]``.

    ``p = p - lr * m_bar / (sqrt(v_hat) + eps)``, where ``m_bar`` is a weighted sum of the gradient
    and of its average, and ``mu = betas[0] * (1 - 0.96^(t * momentum_decay) / 2)`` at step ``t``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decay, >= 0: added to the gradient as ``weight_decay * p``.
        momentum_decay: rate at which ``mu`` grows, >= 0.
        decoupled_weight_decay: shrink the parameter by ``1 - lr * weight_decay`` instead (NAdamW).
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.NAdam(foreach=False). Its
        state is two tensors of the parameter's shape and dtype, and ``mu_product``, one number in
        float32. Every executor runs its steps as torch's own operations.

    Example::

        >>> import torch
        >>> optimizer = nadam(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.8944, 1.1056])

    Reference:
        Dozat, "Incorporating Nesterov momentum into Adam", ICLR 2016 workshop, algorithm 2; the
        schedule of momentum and the defaults are torch.optim.NAdam's.
    """
    return chain(
        maximized(maximize),
        choose_weight_decay(weight_decay, decoupled_weight_decay),
        NADAM(lr=lr, betas=betas, eps=eps, momentum_decay=momentum_decay),
    )
