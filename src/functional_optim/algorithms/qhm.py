"""QHM, quasi-hyperbolic momentum: Ma & Yarats 2019, eq. 3 and 4.

    b_t = beta * b_{t-1} + (1 - beta) * g_t      (b_0 = 0)
    p_t = p_{t-1} - lr * ((1 - nu) * g_t + nu * b_t)

With nu = 0 it is plain SGD. With nu = 1 it is momentum SGD whose dampening equals the momentum, and
whose buffer starts at zero.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE
from functional_optim.numeric import add, lerp
from functional_optim.transforms.weight_decay import choose_weight_decay


class QHMState(NamedTuple):
    momentum_buffer: Tensor  # b, of the parameter's shape and dtype


class QHMHyper(NamedTuple):
    lr: float  # learning rate
    momentum: float  # beta
    nu: float  # weight of the buffer in the step


class QHMCoefficients(NamedTuple):
    lr: float
    weight: float  # 1 - beta
    nu: float


def qhm_coefficients(step: float, hyper: QHMHyper) -> QHMCoefficients:
    return QHMCoefficients(hyper.lr, 1 - hyper.momentum, hyper.nu)


def qhm_rule(
    param: Tensor, grad: Tensor, state: QHMState, c: QHMCoefficients
) -> tuple[Tensor, QHMState]:
    buffer = lerp(state.momentum_buffer, grad, c.weight)
    return add(param, lerp(grad, buffer, c.nu), -c.lr), QHMState(buffer)


QHM = Rule(
    name="qhm",
    hyper=QHMHyper,
    state=QHMState,
    coefficients=qhm_coefficients,
    rule=qhm_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("momentum", BELOW_ONE)),
)


@constructor
def qhm(
    lr: Scalar = 1.0,
    momentum: Scalar = 0.999,
    nu: Scalar = 0.7,
    weight_decay: Scalar = 0.0,
    *,
    weight_decay_type: Literal["grad", "direct"] = "grad",
    maximize: bool = False,
) -> Optimizer:
    """QHM: steps along an average of the plain gradient and of the momentum buffer.

    ``b = momentum * b + (1 - momentum) * g``, then ``p = p - lr * ((1 - nu) * g + nu * b)``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        momentum: beta, decay of the buffer, in [0, 1).
        nu: weight of the buffer; 0 is plain SGD.
        weight_decay: coefficient of the decay, >= 0.
        weight_decay_type: "grad" adds ``weight_decay * p`` to the gradient; "direct" shrinks the
            parameter by ``1 - lr * weight_decay`` before the step.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. torch has no QHM.

    Raises:
        ValueError: a value outside the bounds above, or another ``weight_decay_type``.

    Example::

        >>> import torch
        >>> optimizer = qhm(lr=1.0, momentum=0.5, nu=0.5)
        >>> params, state = optimizer.update(
        ...     torch.ones(1), torch.ones(1), optimizer.init(torch.ones(1)))
        >>> params
        tensor([0.2500])

    Reference:
        Ma & Yarats, "Quasi-hyperbolic momentum and Adam for deep learning", ICLR 2019, eq. 3-4;
        defaults of section 6.
    """
    if weight_decay_type not in ("grad", "direct"):
        raise ValueError(
            f'qhm: weight_decay_type must be "grad" or "direct", got {weight_decay_type!r}'
        )
    decay = choose_weight_decay(weight_decay, weight_decay_type == "direct")
    return chain(maximized(maximize), decay, QHM(lr=lr, momentum=momentum, nu=nu))
