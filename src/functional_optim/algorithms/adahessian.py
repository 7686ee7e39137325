"""AdaHessian: Yao, Gholami, Shen, Mustafa, Keutzer & Mahoney 2021, algorithm 1.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t                  (m_0 = 0)
    v_t = b2 * v_{t-1} + (1 - b2) * e_t^2                (v_0 = 0)
    d_t = sqrt(v_t / (1 - b2^t))^k + eps
    p_t = (1 - lr * lambda) * p_{t-1} - lr * m_t / (1 - b1^t) / d_t

e_t is an estimate of the diagonal of the Hessian at p_{t-1}, computed in every step, and k the
Hessian power. The paper has no eps, and averages e_t over blocks of a parameter first. This rule
uses e_t unchanged.
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, NON_NEGATIVE, UNIT
from functional_optim.core.hyper import Scalar, is_zero
from functional_optim.core.leaf_input import LeafInput
from functional_optim.core.stage import Link, Transform
from functional_optim.numeric import addcmul, div, lerp, mul, power, shift
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay
from functional_optim.transforms.descend import descend


class AdahessianState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_hessian_diag_sq: Tensor  # v, the same
    hessian: list[Tensor]  # [e], the same, during a step; else []


class AdahessianHyper(NamedTuple):
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    hessian_power: float  # k


class AdahessianCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    root: float  # sqrt(1 - b2^t)
    eps: float
    scale: float  # 1 / (1 - b1^t)
    hessian_power: float
    is_root: bool  # True if hessian_power is 1


def adahessian_coefficients(step: float, hyper: AdahessianHyper) -> AdahessianCoefficients:
    beta_1, beta_2 = hyper.betas
    return AdahessianCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        (1 - beta_2**step) ** 0.5,
        hyper.eps,
        1 / (1 - beta_1**step),
        hyper.hessian_power,
        is_zero(hyper.hessian_power - 1.0),
    )


def adahessian_transform(
    grad: Tensor, param: Tensor, state: AdahessianState, c: AdahessianCoefficients
) -> tuple[Tensor, AdahessianState]:
    estimate = state.hessian[0]
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    square = addcmul(mul(state.exp_hessian_diag_sq, c.beta_2), estimate, estimate, c.weight_2)
    curvature = div(square.sqrt(), c.root)
    if not c.is_root:
        curvature = power(curvature, c.hessian_power)
    direction = mul(exp_avg, c.scale) / shift(curvature, c.eps)
    return direction, AdahessianState(exp_avg, square, state.hessian)


SCALE_BY_ADAHESSIAN = Transform(
    name="scale_by_adahessian",
    hyper=AdahessianHyper,
    state=AdahessianState,
    coefficients=adahessian_coefficients,
    transform=adahessian_transform,
    bounds=(("betas", BELOW_ONE), ("eps", NON_NEGATIVE), ("hessian_power", UNIT)),
    inputs=(LeafInput("hessian"),),
)


@constructor
def adahessian(
    lr: Scalar = 0.15,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-4,
    weight_decay: Scalar = 0.0,
    *,
    hessian_power: Scalar = 1.0,
    maximize: bool = False,
) -> Optimizer:
    """AdaHessian: Adam with the diagonal of the Hessian in place of the gradient in the root.

    ``p = (1 - lr * weight_decay) * p - lr * m_hat / (sqrt(v_hat)^hessian_power + eps)`` with
    bias-corrected averages ``m_hat`` of the gradient and ``v_hat`` of ``hessian^2``.

    Pass ``extra={"hessian": ...}`` to each step: an estimate of the Hessian's diagonal for each
    parameter that is stepped, such as the result of :func:`~functional_optim.hutchinson`. The paper
    averages estimates over blocks of a parameter; this rule uses them unchanged.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        hessian_power: exponent of the root, in [0, 1]; 0 is momentum SGD.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`: ``chain(decoupled_weight_decay(...),
        scale_by_adahessian(betas, eps, hessian_power), descend(lr))``. torch has no AdaHessian.

    Example::

        >>> import torch
        >>> optimizer = adahessian(lr=0.5, eps=0.0)
        >>> params = torch.ones(2)
        >>> optimizer.update(params, torch.tensor([1.0, -3.0]), optimizer.init(params),
        ...                  extra={"hessian": torch.tensor([4.0, -2.0])})[0]
        tensor([0.8750, 1.7500])

    Reference:
        Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, "ADAHESSIAN: an adaptive second order
        optimizer for machine learning", AAAI 2021 (arXiv 2006.00719), algorithm 1.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        scale_by_adahessian(betas, eps, hessian_power),
        descend(lr),
    )


def scale_by_adahessian(
    betas: tuple[Scalar, Scalar] = (0.9, 0.999), eps: Scalar = 1e-4, hessian_power: Scalar = 1.0
) -> Link:
    """AdaHessian's direction: ``m_hat / (sqrt(v_hat)^hessian_power + eps)``.

    Pass ``extra={"hessian": ...}`` to each step, as for :func:`~functional_optim.adahessian`.

    Args:
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        hessian_power: exponent of the root, in [0, 1].

    Returns:
        A link for :func:`~functional_optim.chain`. Before :func:`~functional_optim.descend` it is
        :func:`~functional_optim.adahessian` without decay, bit for bit.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(scale_by_adahessian(eps=0.0), descend(lr=0.5))
        >>> params = torch.ones(1)
        >>> optimizer.update(params, torch.ones(1), optimizer.init(params),
        ...                  extra={"hessian": torch.full((1,), 4.0)})[0]
        tensor([0.8750])

    Reference:
        Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, "ADAHESSIAN: an adaptive second order
        optimizer for machine learning", AAAI 2021 (arXiv 2006.00719), algorithm 1.
    """
    return SCALE_BY_ADAHESSIAN(betas=betas, eps=eps, hessian_power=hessian_power)
