"""Rprop: Riedmiller & Braun 1993, in the variant of torch.optim.Rprop (Igel & Huesken's iRprop-).

s_t = sign(g_t * g_{t-1})
e_t = clamp(e_{t-1} * (eta_plus if s_t > 0, eta_minus if s_t < 0, else 1), low, high)
h_t = 0 where s_t < 0, else g_t              (kept as g_t for the next step)
p_t = p_{t-1} - sign(h_t) * e_t              (e_0 = lr)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE
from functional_optim.numeric import clamp, fill_like, select


class RpropState(NamedTuple):
    prev: Tensor  # h, the last gradient that was used, of the parameter's shape and dtype
    step_size: Tensor  # e, the same


class RpropHyper(NamedTuple):
    lr: float  # the first step size
    etas: tuple[float, float]  # eta_minus, eta_plus
    step_sizes: tuple[float, float]  # low, high


class RpropCoefficients(NamedTuple):
    eta_minus: float
    eta_plus: float
    low: float
    high: float


def rprop_init(param: Tensor, hyper: RpropHyper) -> RpropState:
    return RpropState(torch.zeros_like(param), fill_like(param, hyper.lr))


def rprop_coefficients(step: float, hyper: RpropHyper) -> RpropCoefficients:
    eta_minus, eta_plus = hyper.etas
    low, high = hyper.step_sizes
    return RpropCoefficients(eta_minus, eta_plus, low, high)


def rprop_rule(
    param: Tensor, grad: Tensor, state: RpropState, c: RpropCoefficients
) -> tuple[Tensor, RpropState]:
    sign = (grad * state.prev).sign()
    # Start from the sign, so that NaN, which is in none of the three masks, stays NaN.
    factor = select(select(sign, sign > 0, c.eta_plus), sign < 0, c.eta_minus)
    factor = factor.masked_fill(sign == 0, 1.0)
    step_size = clamp(state.step_size * factor, c.low, c.high)
    used = grad.masked_fill(sign < 0, 0.0)
    param = torch.addcmul(param, used.sign(), step_size, value=-1.0)
    return param, RpropState(used, step_size)


def rprop_check(hyper: RpropHyper) -> None:
    low, high = hyper.etas
    if not 0.0 < low < 1.0 < high:
        raise ValueError(f"rprop: etas must satisfy 0 < etas[0] < 1 < etas[1], got {hyper.etas}")


RPROP = Rule(
    name="rprop",
    hyper=RpropHyper,
    state=RpropState,
    init=rprop_init,
    state_depends_on=(),
    coefficients=rprop_coefficients,
    rule=rprop_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE),),
    check=rprop_check,
)


@constructor
def rprop(
    lr: Scalar = 1e-2,
    etas: tuple[Scalar, Scalar] = (0.5, 1.2),
    step_sizes: tuple[Scalar, Scalar] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> Optimizer:
    """Rprop: a step size per element, from the signs of successive gradients alone.

    The step size grows while the sign stays. If the sign flips, the step size shrinks, and the
    element is not stepped.

    Args:
        lr: the first step size, a finite number >= 0 (or a 0-d tensor).
        etas: factors for shrinking and growing, ``0 < etas[0] < 1 < etas[1]``.
        step_sizes: smallest and largest step size.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.Rprop(foreach=False).

    Example::

        >>> import torch
        >>> optimizer = rprop(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Riedmiller & Braun, "A direct adaptive method for faster backpropagation learning: the
        RPROP algorithm", ICNN 1993; Igel & Huesken, "Improving the Rprop learning algorithm",
        NC 2000, section 2.3 (iRprop-).
    """
    return chain(maximized(maximize), RPROP(lr=lr, etas=etas, step_sizes=step_sizes))
