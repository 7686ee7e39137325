"""RMSprop: Tieleman & Hinton 2012, centered as in Graves 2013, in the form of torch.optim.RMSprop.

v_t = alpha * v_{t-1} + (1 - alpha) * g_t^2
a_t = alpha * a_{t-1} + (1 - alpha) * g_t    (centered only)
r_t = sqrt(v_t), or sqrt(v_t - a_t^2) if centered
p_t = p_{t-1} - lr * g_t / (r_t + eps), or with momentum
b_t = mu * b_{t-1} + g_t / (r_t + eps),  p_t = p_{t-1} - lr * b_t

With ``eps_root`` e, r_t = sqrt(v_t + e), or sqrt(v_t - a_t^2 + e).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.hyper import Scalar, is_zero
from functional_optim.core.stage import Link, Rule, Transform
from functional_optim.numeric import add, addcdiv, addcmul, is_active, lerp, mul, shift
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class RMSpropState(NamedTuple):
    square_avg: Tensor  # v, of the parameter's shape and dtype
    momentum_buffer: list[Tensor]  # [b], the same; [] without momentum
    grad_avg: list[Tensor]  # [a], the same; [] if not centered


class RMSpropHyper(NamedTuple):
    lr: float  # learning rate
    alpha: float  # decay of both averages
    eps: float
    momentum: float  # mu
    centered: bool


class RMSpropCoefficients(NamedTuple):
    lr: float
    alpha: float
    weight: float  # 1 - alpha
    eps: float
    momentum: float
    active: bool  # True if there is momentum
    centered: bool


def rmsprop_init(param: Tensor, hyper: Any) -> RMSpropState:
    return RMSpropState(
        torch.zeros_like(param),
        [torch.zeros_like(param)] if is_active(hyper.momentum) else [],
        [torch.zeros_like(param)] if hyper.centered else [],
    )


def rmsprop_coefficients(step: float, hyper: RMSpropHyper) -> RMSpropCoefficients:
    return RMSpropCoefficients(
        hyper.lr,
        hyper.alpha,
        1 - hyper.alpha,
        hyper.eps,
        hyper.momentum,
        is_active(hyper.momentum),
        hyper.centered,
    )


def rmsprop_averages(
    grad: Tensor, state: RMSpropState, alpha: float, weight: float, centered: bool
) -> tuple[RMSpropState, Tensor]:
    """Return the state with updated averages, and the estimate of the variance."""
    square_avg = addcmul(mul(state.square_avg, alpha), grad, grad, weight)
    grad_avg = state.grad_avg
    variance = square_avg
    if centered:
        mean = lerp(grad_avg[0], grad, weight)
        grad_avg = [mean]
        variance = torch.addcmul(square_avg, mean, mean, value=-1.0)
    return RMSpropState(square_avg, state.momentum_buffer, grad_avg), variance


def rmsprop_denominator(variance: Tensor, eps: float) -> Tensor:
    """Return the divisor of the gradient."""
    return shift(variance.sqrt(), eps)


def rmsprop_step(
    param: Tensor,
    grad: Tensor,
    state: RMSpropState,
    denominator: Tensor,
    lr: float,
    momentum: float,
    active: bool,
) -> tuple[Tensor, RMSpropState]:
    """Return parameter and state after a step along the gradient over the denominator."""
    if not active:
        return addcdiv(param, grad, denominator, -lr), state
    buffer = torch.addcdiv(mul(state.momentum_buffer[0], momentum), grad, denominator)
    return add(param, buffer, -lr), RMSpropState(state.square_avg, [buffer], state.grad_avg)


def rmsprop_rule(
    param: Tensor, grad: Tensor, state: RMSpropState, c: RMSpropCoefficients
) -> tuple[Tensor, RMSpropState]:
    state, variance = rmsprop_averages(grad, state, c.alpha, c.weight, c.centered)
    denominator = rmsprop_denominator(variance, c.eps)
    return rmsprop_step(param, grad, state, denominator, c.lr, c.momentum, c.active)


class RMSpropRootHyper(NamedTuple):
    lr: float  # learning rate
    alpha: float  # decay of both averages
    eps: float
    momentum: float  # mu
    centered: bool
    eps_root: float  # e


class RMSpropRootCoefficients(NamedTuple):
    lr: float
    alpha: float
    weight: float  # 1 - alpha
    eps: float
    momentum: float
    active: bool  # True if there is momentum
    centered: bool
    eps_root: float  # e


def rmsprop_root_coefficients(step: float, hyper: RMSpropRootHyper) -> RMSpropRootCoefficients:
    plain = RMSpropHyper(hyper.lr, hyper.alpha, hyper.eps, hyper.momentum, hyper.centered)
    return RMSpropRootCoefficients(*rmsprop_coefficients(step, plain), hyper.eps_root)


def rmsprop_root_rule(
    param: Tensor, grad: Tensor, state: RMSpropState, c: RMSpropRootCoefficients
) -> tuple[Tensor, RMSpropState]:
    state, variance = rmsprop_averages(grad, state, c.alpha, c.weight, c.centered)
    denominator = rmsprop_denominator(shift(variance, c.eps_root), c.eps)
    return rmsprop_step(param, grad, state, denominator, c.lr, c.momentum, c.active)


RMSPROP = Rule(
    name="rmsprop",
    hyper=RMSpropHyper,
    state=RMSpropState,
    init=rmsprop_init,
    state_depends_on=("momentum", "centered"),
    coefficients=rmsprop_coefficients,
    rule=rmsprop_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("alpha", NON_NEGATIVE),
        ("eps", NON_NEGATIVE),
        ("momentum", NON_NEGATIVE),
    ),
)


RMSPROP_ROOT = Rule(
    name="rmsprop_eps_root",
    hyper=RMSpropRootHyper,
    state=RMSpropState,
    init=rmsprop_init,
    state_depends_on=("momentum", "centered"),
    coefficients=rmsprop_root_coefficients,
    rule=rmsprop_root_rule,
    bounds=(*RMSPROP.bounds, ("eps_root", NON_NEGATIVE)),
)
"""A second rule, so that programs, groups and checkpoints do not change if e is 0."""


class ScaleByRmsHyper(NamedTuple):
    alpha: float  # decay of both averages
    eps: float
    centered: bool


class ScaleByRmsCoefficients(NamedTuple):
    alpha: float
    weight: float  # 1 - alpha
    eps: float
    centered: bool


def scale_by_rms_init(param: Tensor, hyper: ScaleByRmsHyper) -> RMSpropState:
    return rmsprop_init(param, RMSpropHyper(1.0, hyper.alpha, hyper.eps, 0.0, hyper.centered))


def scale_by_rms_coefficients(step: float, hyper: ScaleByRmsHyper) -> ScaleByRmsCoefficients:
    return ScaleByRmsCoefficients(hyper.alpha, 1 - hyper.alpha, hyper.eps, hyper.centered)


def scale_by_rms_transform(
    grad: Tensor, param: Tensor, state: RMSpropState, c: ScaleByRmsCoefficients
) -> tuple[Tensor, RMSpropState]:
    state, variance = rmsprop_averages(grad, state, c.alpha, c.weight, c.centered)
    return grad / rmsprop_denominator(variance, c.eps), state


SCALE_BY_RMS = Transform(
    name="scale_by_rms",
    hyper=ScaleByRmsHyper,
    state=RMSpropState,
    init=scale_by_rms_init,
    state_depends_on=("centered",),
    coefficients=scale_by_rms_coefficients,
    transform=scale_by_rms_transform,
    bounds=(("alpha", NON_NEGATIVE), ("eps", NON_NEGATIVE)),
)


@constructor
def rmsprop(
    lr: Scalar = 1e-2,
    alpha: Scalar = 0.99,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    momentum: Scalar = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
    eps_root: Scalar = 0.0,
) -> Optimizer:
    """RMSprop: steps divided by the root of a running average of squared gradients.

    ``p = p - lr * g / (sqrt(v) + eps)``; with momentum the quotient goes through a buffer.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        alpha: decay of the averages, >= 0.
        eps: added to the root, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        momentum: factor of the buffer, >= 0; 0 keeps no buffer.
        centered: divide by the estimated standard deviation instead.
        maximize: ascend instead of descend.
        eps_root: added under the root, >= 0. The slope of the root at 0 is infinite. So without
            ``eps_root``, a derivative through the step is NaN for an element whose gradients were
            all 0. A value such as 1e-8 makes it finite. With 0, the default, the chain has no
            hyper-parameter ``eps_root``.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.RMSprop(foreach=False),
        which has no ``eps_root``.

    Example::

        >>> import torch
        >>> optimizer = rmsprop(lr=0.1, alpha=0.0)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Tieleman & Hinton, "Lecture 6.5: RMSProp", COURSERA, 2012; centered: Graves, "Generating
        sequences with recurrent neural networks", arXiv:1308.0850, eq. 38-45.
    """
    rule = RMSPROP(lr=lr, alpha=alpha, eps=eps, momentum=momentum, centered=centered)
    if not is_zero(eps_root):
        rule = RMSPROP_ROOT(
            lr=lr, alpha=alpha, eps=eps, momentum=momentum, centered=centered, eps_root=eps_root
        )
    return chain(maximized(maximize), coupled_weight_decay(weight_decay), rule)


def scale_by_rms(alpha: Scalar = 0.99, eps: Scalar = 1e-8, centered: bool = False) -> Link:
    """RMSprop's direction: the gradient over the root of its average square.

    ``u = g / (sqrt(v) + eps)``, where ``v = alpha * v + (1 - alpha) * g^2``. With ``centered`` the
    squared average gradient is subtracted from ``v`` under the root.

    Args:
        alpha: decay of the averages, >= 0.
        eps: added to the root, >= 0.
        centered: subtract the squared average gradient.

    Returns:
        A link for :func:`~functional_optim.chain`. Before :func:`~functional_optim.descend` it is
        :func:`~functional_optim.rmsprop`. The state has equal bits. Parameters differ by at most 4
        units in the last place per step, of the parameter or of the step, whichever is larger.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(scale_by_rms(alpha=0.75), descend(lr=0.5))
        >>> optimizer.update(torch.ones(2), torch.tensor([3.0, -2.0]),
        ...                  optimizer.init(torch.ones(2)))[0]
        tensor([0., 2.])

    Reference:
        Tieleman & Hinton, "Lecture 6.5: rmsprop", Coursera, 2012.
    """
    return SCALE_BY_RMS(alpha=alpha, eps=eps, centered=centered)
