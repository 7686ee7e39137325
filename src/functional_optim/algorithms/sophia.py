"""Sophia: Liu, Li, Hall, Liang & Ma 2023, algorithm 3.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t                                  (m_0 = 0)
    h_t = b2 * h_{t-1} + (1 - b2) * e_t  if e_t is given, else h_{t-1}   (h_0 = 0)
    p_t = (1 - lr * lambda) * p_{t-1} - lr * clip(m_t / max(gamma * h_t, eps), 1)

e_t is an estimate of the diagonal of the Hessian at p_{t-1}, which the paper computes in every
tenth step (k = 10). clip(u, 1) is min(max(u, -1), 1). If estimates are rare, noisy or negative, the
clip makes the step of an element a step along its sign.
"""

import math
from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Scalar, chain, constructor
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.leaf_input import LeafInput
from functional_optim.core.stage import Link, Transform
from functional_optim.numeric import clamp, lerp, mul
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay
from functional_optim.transforms.descend import descend


class SophiaState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    hessian_avg: Tensor  # h, the same
    hessian: list[Tensor]  # [e], the same, in a step that is given it; else []


class SophiaHyper(NamedTuple):
    betas: tuple[float, float]  # decay of m and of h
    gamma: float
    eps: float


class SophiaCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    weight_2: float  # 1 - b2
    gamma: float
    eps: float


def sophia_coefficients(step: float, hyper: SophiaHyper) -> SophiaCoefficients:
    beta_1, beta_2 = hyper.betas
    return SophiaCoefficients(1 - beta_1, 1 - beta_2, hyper.gamma, hyper.eps)


def sophia_transform(
    grad: Tensor, param: Tensor, state: SophiaState, c: SophiaCoefficients
) -> tuple[Tensor, SophiaState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    average = state.hessian_avg
    for estimate in state.hessian:
        average = lerp(average, estimate, c.weight_2)
    curvature = clamp(mul(average, c.gamma), c.eps, math.inf)
    direction = clamp(exp_avg / curvature, -1.0, 1.0)
    return direction, SophiaState(exp_avg, average, state.hessian)


SCALE_BY_SOPHIA = Transform(
    name="scale_by_sophia",
    hyper=SophiaHyper,
    state=SophiaState,
    coefficients=sophia_coefficients,
    transform=sophia_transform,
    bounds=(("betas", BELOW_ONE), ("gamma", FINITE_NON_NEGATIVE), ("eps", NON_NEGATIVE)),
    inputs=(LeafInput("hessian", required=False),),
)


@constructor
def sophia(
    lr: Scalar = 1e-4,
    betas: tuple[Scalar, Scalar] = (0.96, 0.99),
    gamma: Scalar = 0.01,
    eps: Scalar = 1e-12,
    weight_decay: Scalar = 0.2,
) -> Optimizer:
    """Sophia: an average gradient over an average Hessian diagonal, each element at most ``lr``.

    ``h = beta_2 * h + (1 - beta_2) * hessian`` where it is given, and then
    ``p = (1 - lr * weight_decay) * p - lr * min(max(m / max(gamma * h, eps), -1), 1)``.

    Pass ``extra={"hessian": ...}`` to some steps (to every tenth step in the paper): an estimate of
    the Hessian's diagonal for each parameter that is stepped, such as the result of
    :func:`~functional_optim.hutchinson`. In all other steps ``h`` does not change. There is no
    ``maximize``: to ascend, pass gradients and estimates of the negated function.

    Args:
        lr: the largest step of an element, a finite number >= 0. Any number may be a 0-d tensor or
            a schedule.
        betas: decay of the average gradient and of the average estimate, each in [0, 1).
        gamma: factor of the estimates, a finite number >= 0: the larger, the fewer elements are
            clipped. The paper has 0.01 for Hutchinson's estimates, 0.05 for Gauss-Newton estimates.
        eps: least divisor of an element, >= 0. In float16 use 1e-7 or more, since smaller numbers
            are 0 in float16, and 0 / 0 is NaN.
        weight_decay: coefficient of the decoupled decay, >= 0.

    Returns:
        An :class:`~functional_optim.Optimizer`: ``chain(decoupled_weight_decay(...),
        scale_by_sophia(betas, gamma, eps), descend(lr))``. torch has no Sophia.

    Example::

        >>> import torch
        >>> optimizer = sophia(lr=0.1, betas=(0.0, 0.5), gamma=1.0, weight_decay=0.0)
        >>> params, grads = torch.ones(2), torch.tensor([1.0, -9.0])
        >>> params, state = optimizer.update(
        ...     params, grads, optimizer.init(params), extra={"hessian": torch.tensor([4.0, 4.0])})
        >>> params
        tensor([0.9500, 1.1000])
        >>> optimizer.update(params, grads, state)[0]  # by the same h
        tensor([0.9000, 1.2000])

    Reference:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language
        model pre-training", ICLR 2024 (arXiv 2305.14342), algorithm 3 and equation 6.
    """
    return chain(
        decoupled_weight_decay(weight_decay), scale_by_sophia(betas, gamma, eps), descend(lr)
    )


def scale_by_sophia(
    betas: tuple[Scalar, Scalar] = (0.96, 0.99), gamma: Scalar = 0.01, eps: Scalar = 1e-12
) -> Link:
    """Sophia's direction: ``min(max(m / max(gamma * h, eps), -1), 1)``.

    It takes ``extra={"hessian": ...}`` as :func:`~functional_optim.sophia` does.

    Args:
        betas: decay of the average gradient and of the average estimate, each in [0, 1).
        gamma: factor of the estimates, a finite number >= 0.
        eps: least divisor of an element, >= 0.

    Returns:
        A link for :func:`~functional_optim.chain`. Before :func:`~functional_optim.descend` it is
        :func:`~functional_optim.sophia` without decay, bit for bit.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(scale_by_sophia((0.0, 0.0), gamma=0.5), descend(lr=0.5))
        >>> params = torch.ones(2)
        >>> optimizer.update(params, torch.tensor([1.0, -9.0]), optimizer.init(params),
        ...                  extra={"hessian": torch.tensor([4.0, 4.0])})[0]
        tensor([0.7500, 1.5000])

    Reference:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language
        model pre-training", ICLR 2024 (arXiv 2305.14342), algorithm 3.
    """
    return SCALE_BY_SOPHIA(betas=betas, gamma=gamma, eps=eps)
