"""Yogi: Zaheer et al. 2018, algorithm 2.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t                              (m_0 = 0)
    v_t = v_{t-1} - (1 - b2) * sign(v_{t-1} - g_t^2) * g_t^2         (v_0 = initial value)
    m_hat = m_t / (1 - b1^t),    v_hat = v_t / (1 - b2^t)
    p_t = p_{t-1} - lr * m_hat / (sqrt(v_hat) + eps)

The paper has no bias correction, and starts v at the average square of some first gradients.
Published programs correct the bias, and start v at a small constant.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.adam import adam_denominator
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import addcdiv, addcmul, fill_like, lerp
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class YogiState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of the same shape and dtype


class YogiHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m, and 1 less the rate at which v changes
    eps: float
    initial_accumulator_value: float  # v_0
    bias_correction: bool


class YogiCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    change: float  # -(1 - b2)
    root: float  # sqrt(1 - b2^t), or 1
    eps: float
    step_size: float  # -lr / (1 - b1^t), or -lr


def yogi_init(param: Tensor, hyper: YogiHyper) -> YogiState:
    return YogiState(torch.zeros_like(param), fill_like(param, hyper.initial_accumulator_value))


def yogi_coefficients(step: float, hyper: YogiHyper) -> YogiCoefficients:
    beta_1, beta_2 = hyper.betas
    root, step_size = 1.0, -hyper.lr
    if hyper.bias_correction:
        root = (1 - beta_2**step) ** 0.5
        step_size = -(hyper.lr / (1 - beta_1**step))
    return YogiCoefficients(1 - beta_1, -(1 - beta_2), root, hyper.eps, step_size)


def yogi_rule(
    param: Tensor, grad: Tensor, state: YogiState, c: YogiCoefficients
) -> tuple[Tensor, YogiState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    square = grad * grad
    direction = (state.exp_avg_sq - square).sign()
    exp_avg_sq = addcmul(state.exp_avg_sq, direction, square, c.change)
    denominator = adam_denominator(exp_avg_sq, c.root, c.eps)
    param = addcdiv(param, exp_avg, denominator, c.step_size)
    return param, YogiState(exp_avg, exp_avg_sq)


YOGI = Rule(
    name="yogi",
    hyper=YogiHyper,
    state=YogiState,
    init=yogi_init,
    state_depends_on=(),
    coefficients=yogi_coefficients,
    rule=yogi_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", NON_NEGATIVE),
        ("initial_accumulator_value", NON_NEGATIVE),
    ),
)


@constructor
def yogi(
    lr: Scalar = 1e-2,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-3,
    weight_decay: Scalar = 0.0,
    initial_accumulator_value: Scalar = 1e-6,
    bias_correction: bool = True,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Yogi: Adam whose average square changes by a multiple of the squared gradient only.

    ``v = v - (1 - beta_2) * sign(v - g^2) * g^2``, then ``p = p - lr * m_hat / (sqrt(v_hat) +
    eps)``. Adam's ``v`` falls by ``(1 - beta_2) * (v - g^2)``, which is fast where ``v`` is large;
    Yogi's falls slowly, so that the step size grows slowly.

    The state has 2 tensors of the parameter's shape and dtype: 8 bytes per float32 parameter. A
    step reads 4 numbers and writes 3 for each element.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the average gradient, and 1 less the rate at which ``v`` changes; each in
            [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        initial_accumulator_value: ``v`` before the first step, >= 0.
        bias_correction: divide both averages by Adam's bias corrections, as all programs do; the
            paper does not.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no Yogi. Some other packages also start
        the average gradient at ``initial_accumulator_value``; here it starts at 0, as in the paper.

    Example::

        >>> import torch
        >>> optimizer = yogi(lr=0.1, eps=0.0, initial_accumulator_value=0.0)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Zaheer, Reddi, Sachan, Kale, Kumar, "Adaptive methods for nonconvex optimization", NeurIPS
        2018, algorithm 2. The defaults of ``lr``, ``betas`` and ``eps`` are those of its
        experiments.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        YOGI(
            lr=lr,
            betas=betas,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            bias_correction=bias_correction,
        ),
    )
