"""Adam and AMSGrad: Kingma & Ba 2015, algorithm 1; Reddi et al. 2018, algorithm 2.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    u_t = v_t, or with AMSGrad max(u_{t-1}, v_t)
    p_t = p_{t-1} - lr / (1 - b1^t) * m_t / (sqrt(u_t) / sqrt(1 - b2^t) + eps)

As in torch.optim, AMSGrad takes the maximum before the bias correction. With ``eps_root`` e the
denominator is sqrt(u_t / (1 - b2^t) + e) + eps.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.hyper import Scalar, is_zero
from functional_optim.core.stage import Link, Rule, Transform
from functional_optim.numeric import addcdiv, addcmul, div, lerp, mul, shift
from functional_optim.transforms.weight_decay import choose_weight_decay


class AdamState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, the same
    max_exp_avg_sq: list[Tensor]  # [u], the same; [] without amsgrad


class AdamHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    amsgrad: bool


class AdamCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    root: float  # sqrt(1 - b2^t)
    eps: float
    step_size: float  # -lr / (1 - b1^t)
    amsgrad: bool


def adam_init(param: Tensor, hyper: Any) -> AdamState:
    return AdamState(
        torch.zeros_like(param),
        torch.zeros_like(param),
        [torch.zeros_like(param)] if hyper.amsgrad else [],
    )


def adam_coefficients(step: float, hyper: AdamHyper) -> AdamCoefficients:
    beta_1, beta_2 = hyper.betas
    return AdamCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        (1 - beta_2**step) ** 0.5,
        hyper.eps,
        -(hyper.lr / (1 - beta_1**step)),
        hyper.amsgrad,
    )


def adam_averages(
    grad: Tensor, state: AdamState, weight_1: float, beta_2: float, weight_2: float, amsgrad: bool
) -> tuple[AdamState, Tensor]:
    """Return the state with updated averages, and the second average or its maximum."""
    exp_avg = lerp(state.exp_avg, grad, weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, beta_2), grad, grad, weight_2)
    second = exp_avg_sq
    maximum = state.max_exp_avg_sq
    if amsgrad:
        second = torch.maximum(maximum[0], exp_avg_sq)
        maximum = [second]
    return AdamState(exp_avg, exp_avg_sq, maximum), second


def adam_denominator(second: Tensor, root: float, eps: float) -> Tensor:
    """Return the divisor of the first average."""
    return shift(div(second.sqrt(), root), eps)


def adam_rule(
    param: Tensor, grad: Tensor, state: AdamState, c: AdamCoefficients
) -> tuple[Tensor, AdamState]:
    state, second = adam_averages(grad, state, c.weight_1, c.beta_2, c.weight_2, c.amsgrad)
    denominator = adam_denominator(second, c.root, c.eps)
    return addcdiv(param, state.exp_avg, denominator, c.step_size), state


class AdamRootHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    amsgrad: bool
    eps_root: float  # e


class AdamRootCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    root: float  # sqrt(1 - b2^t)
    eps: float
    step_size: float  # -lr / (1 - b1^t)
    amsgrad: bool
    inside: float  # e * (1 - b2^t), to be added to u before the division by 1 - b2^t


def adam_root_coefficients(step: float, hyper: AdamRootHyper) -> AdamRootCoefficients:
    plain = AdamHyper(hyper.lr, hyper.betas, hyper.eps, hyper.amsgrad)
    c = adam_coefficients(step, plain)
    inside = hyper.eps_root * (1 - hyper.betas[1] ** step)
    return AdamRootCoefficients(
        c.weight_1, c.beta_2, c.weight_2, c.root, c.eps, c.step_size, c.amsgrad, inside
    )


def adam_root_rule(
    param: Tensor, grad: Tensor, state: AdamState, c: AdamRootCoefficients
) -> tuple[Tensor, AdamState]:
    state, second = adam_averages(grad, state, c.weight_1, c.beta_2, c.weight_2, c.amsgrad)
    denominator = adam_denominator(shift(second, c.inside), c.root, c.eps)
    return addcdiv(param, state.exp_avg, denominator, c.step_size), state


ADAM = Rule(
    name="adam",
    hyper=AdamHyper,
    state=AdamState,
    init=adam_init,
    state_depends_on=("amsgrad",),
    coefficients=adam_coefficients,
    rule=adam_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("betas", BELOW_ONE), ("eps", NON_NEGATIVE)),
)


ADAM_ROOT = Rule(
    name="adam_eps_root",
    hyper=AdamRootHyper,
    state=AdamState,
    init=adam_init,
    state_depends_on=("amsgrad",),
    coefficients=adam_root_coefficients,
    rule=adam_root_rule,
    bounds=(*ADAM.bounds, ("eps_root", NON_NEGATIVE)),
)
"""A second rule, so that programs, kernels, groups and checkpoints do not change if e is 0."""


class ScaleByAdamHyper(NamedTuple):
    betas: tuple[float, float]  # decay of m and of v
    eps: float
    amsgrad: bool


def scale_by_adam_coefficients(step: float, hyper: ScaleByAdamHyper) -> AdamCoefficients:
    """Return Adam's coefficients for the learning rate -1, so that the step is the direction."""
    return adam_coefficients(step, AdamHyper(-1.0, hyper.betas, hyper.eps, hyper.amsgrad))


def scale_by_adam_transform(
    grad: Tensor, param: Tensor, state: AdamState, c: AdamCoefficients
) -> tuple[Tensor, AdamState]:
    state, second = adam_averages(grad, state, c.weight_1, c.beta_2, c.weight_2, c.amsgrad)
    quotient = state.exp_avg / adam_denominator(second, c.root, c.eps)
    return mul(quotient, c.step_size), state


SCALE_BY_ADAM = Transform(
    name="scale_by_adam",
    hyper=ScaleByAdamHyper,
    state=AdamState,
    init=adam_init,
    state_depends_on=("amsgrad",),
    coefficients=scale_by_adam_coefficients,
    transform=scale_by_adam_transform,
    bounds=(("betas", BELOW_ONE), ("eps", NON_NEGATIVE)),
)


@constructor
def adam(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    eps_root: Scalar = 0.0,
) -> Optimizer:
    """Adam: steps scaled by running averages of the gradient and of its square.

    ``p = p - lr * m_hat / (sqrt(v_hat) + eps)`` with bias-corrected averages ``m_hat, v_hat``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decay, >= 0: added to the gradient as ``weight_decay * p``.
        amsgrad: divide by the largest second average so far.
        maximize: ascend instead of descend.
        decoupled_weight_decay: shrink the parameter by ``1 - lr * weight_decay`` instead (AdamW).
        eps_root: added under the root, >= 0. The slope of the root at 0 is infinite. So without
            ``eps_root``, a derivative through the step is NaN for an element whose gradients were
            all 0. A value such as 1e-8 makes it finite. With 0, the default, the chain has no
            hyper-parameter ``eps_root``.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.Adam(foreach=False), which
        has no ``eps_root``.

    Example::

        >>> import torch
        >>> optimizer = adam(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Kingma & Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1;
        Reddi, Kale, Kumar, "On the convergence of Adam and beyond", ICLR 2018, algorithm 2.
    """
    rule = ADAM(lr=lr, betas=betas, eps=eps, amsgrad=amsgrad)
    if not is_zero(eps_root):
        rule = ADAM_ROOT(lr=lr, betas=betas, eps=eps, amsgrad=amsgrad, eps_root=eps_root)
    return chain(
        maximized(maximize), choose_weight_decay(weight_decay, decoupled_weight_decay), rule
    )


def scale_by_adam(
    betas: tuple[Scalar, Scalar] = (0.9, 0.999), eps: Scalar = 1e-8, amsgrad: bool = False
) -> Link:
    """Adam's direction: the average gradient over the root of the average square.

    ``u = m_hat / (sqrt(v_hat) + eps)`` with bias-corrected averages ``m_hat, v_hat``.

    Args:
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, >= 0.
        amsgrad: divide by the largest second average so far.

    Returns:
        A link for :func:`~functional_optim.chain`. Before :func:`~functional_optim.descend` it is
        :func:`~functional_optim.adam`. The state has equal bits. Parameters differ by at most 4
        units in the last place per step, of the parameter or of the step, whichever is larger.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(scale_by_adam(), descend(lr=0.1))
        >>> optimizer.update(torch.ones(2), torch.tensor([3.0, -2.0]),
        ...                  optimizer.init(torch.ones(2)))[0]
        tensor([0.9000, 1.1000])

    Reference:
        Kingma & Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1.
    """
    return SCALE_BY_ADAM(betas=betas, eps=eps, amsgrad=amsgrad)
