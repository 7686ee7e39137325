"""QHAdam, quasi-hyperbolic Adam: Ma & Yarats 2019, section 4.3.

    m_t = b1 * m_{t-1} + (1 - b1) * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    a_t = (1 - nu1) * g_t + nu1 * m_t / (1 - b1^t)
    s_t = (1 - nu2) * g_t^2 + nu2 * v_t / (1 - b2^t)
    p_t = p_{t-1} - lr * a_t / (sqrt(s_t) + eps)

With nu1 = nu2 = 1 it is Adam.
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, UNIT
from functional_optim.numeric import add, addcdiv, addcmul, lerp, mul, shift
from functional_optim.transforms.weight_decay import choose_weight_decay


class QHAdamState(NamedTuple):
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of the same shape and dtype


class QHAdamHyper(NamedTuple):
    lr: float  # learning rate
    betas: tuple[float, float]  # decay of m and of v
    nus: tuple[float, float]  # nu1 and nu2, weights of m and of v in the step
    eps: float


class QHAdamCoefficients(NamedTuple):
    weight_1: float  # 1 - b1
    beta_2: float
    weight_2: float  # 1 - b2
    grad_weight: float  # 1 - nu1
    average_weight: float  # nu1 / (1 - b1^t)
    square_weight: float  # 1 - nu2
    average_square_weight: float  # nu2 / (1 - b2^t)
    eps: float
    lr: float


def qhadam_coefficients(step: float, hyper: QHAdamHyper) -> QHAdamCoefficients:
    (beta_1, beta_2), (nu_1, nu_2) = hyper.betas, hyper.nus
    return QHAdamCoefficients(
        1 - beta_1,
        beta_2,
        1 - beta_2,
        1 - nu_1,
        nu_1 / (1 - beta_1**step),
        1 - nu_2,
        nu_2 / (1 - beta_2**step),
        hyper.eps,
        hyper.lr,
    )


def qhadam_rule(
    param: Tensor, grad: Tensor, state: QHAdamState, c: QHAdamCoefficients
) -> tuple[Tensor, QHAdamState]:
    exp_avg = lerp(state.exp_avg, grad, c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    direction = add(mul(grad, c.grad_weight), exp_avg, c.average_weight)
    square = addcmul(mul(exp_avg_sq, c.average_square_weight), grad, grad, c.square_weight)
    param = addcdiv(param, direction, shift(square.sqrt(), c.eps), -c.lr)
    return param, QHAdamState(exp_avg, exp_avg_sq)


QHADAM = Rule(
    name="qhadam",
    hyper=QHAdamHyper,
    state=QHAdamState,
    coefficients=qhadam_coefficients,
    rule=qhadam_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("nus", UNIT),
        ("eps", NON_NEGATIVE),
    ),
)


@constructor
def qhadam(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.995, 0.999),
    nus: tuple[Scalar, Scalar] = (0.7, 1.0),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """QHAdam: Adam with a weighted plain gradient in its two averages.

    ``p = p - lr * a / (sqrt(s) + eps)`` with ``a = (1 - nu_1) * g + nu_1 * m_hat`` and
    ``s = (1 - nu_2) * g^2 + nu_2 * v_hat``, where ``m_hat`` and ``v_hat`` are Adam's averages.

    The state has 2 tensors of the parameter's shape and dtype: 8 bytes per float32 parameter. A
    step reads 4 numbers and writes 3 for each element.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        betas: decay of the two averages, each in [0, 1).
        nus: weights of the averages in the step, each in [0, 1]. ``(1, 1)`` is Adam; ``nus[0] =
            betas[0]`` is close to NAdam.
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decay, >= 0.
        decoupled_weight_decay: shrink the parameter by ``1 - lr * weight_decay`` (QHAdamW); else
            add ``weight_decay * p`` to the gradient.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no QHAdam.

    Example::

        >>> import torch
        >>> optimizer = qhadam(lr=0.1)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.9000, 1.1000])

    Reference:
        Ma & Yarats, "Quasi-hyperbolic momentum and Adam for deep learning", ICLR 2019, section 4.3.
        The defaults are those that the authors' package qhoptim recommends.
    """
    return chain(
        maximized(maximize),
        choose_weight_decay(weight_decay, decoupled_weight_decay),
        QHADAM(lr=lr, betas=betas, nus=nus, eps=eps),
    )
