"""LaProp: Ziyin et al. 2020, algorithm 1.

    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    m_t = b1 * m_{t-1} + (1 - b1) * g_t / (sqrt(v_t / (1 - b2^t)) + eps)
    p_t = p_{t-1} - lr / (1 - b1^t) * m_t

The authors' program averages lr times the quotient. This rule multiplies by the lr of the step, as
in the paper. Both are equal if lr is constant.
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.algorithms.adam import (
    AdamCoefficients,
    AdamHyper,
    adam_coefficients,
    adam_denominator,
)
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.numeric import add, addcmul, lerp, mul
from functional_optim.transforms.decoupled_weight_decay import decoupled_weight_decay


class LaPropState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of the same shape and dtype


class LaPropHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    eps: float


def laprop_coefficients(step: float, hyper: LaPropHyper) -> AdamCoefficients:
    return adam_coefficients(step, AdamHyper(hyper.lr, hyper.betas, hyper.eps, False))


def laprop_rule(
    param: Tensor, grad: Tensor, state: LaPropState, c: AdamCoefficients
) -> tuple[Tensor, LaPropState]:
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    normed = grad / adam_denominator(exp_avg_sq, c.root, c.eps)
    exp_avg = lerp(state.exp_avg, normed, c.weight_1)
    return add(param, exp_avg, c.step_size), LaPropState(exp_avg, exp_avg_sq)


LAPROP = Rule(
    name="laprop",
    hyper=LaPropHyper,
    state=LaPropState,
    coefficients=laprop_coefficients,
    rule=laprop_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("betas", BELOW_ONE), ("eps", NON_NEGATIVE)),
)


@constructor
def laprop(
    lr: Scalar = 4e-4,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-15,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """LaProp: momentum of gradients that are divided by the root of their average square first.

    ``m = beta_1 * m + (1 - beta_1) * g / (sqrt(v_hat) + eps)``, then ``p = p - lr * m_hat``. Adam
    divides the average gradient instead. The order makes any pair of ``betas`` stable.

    The state has 2 tensors of the parameter's shape and dtype: 8 bytes per float32 parameter. A
    step reads 4 numbers and writes 3 for each element.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the momentum and of the average square, each in [0, 1).
        eps: added to the root, >= 0. With 0, an element whose gradients were all 0 becomes NaN;
            float16 rounds the default to 0.
        weight_decay: coefficient of the decoupled decay, >= 0.
        maximize: ascend instead of descend (the decay still shrinks).

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no LaProp.

    Example::

        >>> import torch
        >>> optimizer = laprop(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Ziyin, Wang, Ueda, "LaProp: separating momentum and adaptivity in Adam", 2020, algorithm 1.
        The defaults are those of the authors' program.
    """
    return chain(
        maximized(maximize),
        decoupled_weight_decay(weight_decay),
        LAPROP(lr=lr, betas=betas, eps=eps),
    )
