"""SignSGD and Signum: Bernstein, Wang, Azizzadenesheli & Anandkumar 2018, algorithms 1 and 2.

    SignSGD:  p_t = (1 - lr * lambda) * p_{t-1} - lr * sign(g_t)

    Signum:   m_t = mu * m_{t-1} + (1 - mu) * g_t              (m_0 = 0)
              p_t = (1 - lr * lambda) * p_{t-1} - lr * sign(m_t)

Signum without momentum is SignSGD, and keeps no state. The paper's algorithms have no decay; the
decoupled decay and the default ``lr=0.01`` are those of its authors' Signum in MXNet.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE
from functional_optim.core.stage import Rule, Sparse
from functional_optim.numeric import add, is_active, lerp
from functional_optim.transforms.descend import descend
from functional_optim.transforms.scale_by_sign import scale_by_sign
from functional_optim.transforms.weight_decay import choose_weight_decay


class SignumState(NamedTuple):
    momentum_buffer: list[Tensor]  # [m] of the parameter's shape and dtype; [] without momentum


class SignumHyper(NamedTuple):
    lr: float  # learning rate
    momentum: float  # mu


class SignumCoefficients(NamedTuple):
    lr: float
    weight: float  # 1 - mu
    active: bool  # True if there is momentum


def signum_init(param: Tensor, hyper: SignumHyper) -> SignumState:
    return SignumState([torch.zeros_like(param)] if is_active(hyper.momentum) else [])


def signum_coefficients(step: float, hyper: SignumHyper) -> SignumCoefficients:
    return SignumCoefficients(hyper.lr, 1 - hyper.momentum, is_active(hyper.momentum))


def signum_rule(
    param: Tensor, grad: Tensor, state: SignumState, c: SignumCoefficients
) -> tuple[Tensor, SignumState]:
    if not c.active:
        return add(param, grad.sign(), -c.lr), state
    buffer = lerp(state.momentum_buffer[0], grad, c.weight)
    return add(param, buffer.sign(), -c.lr), SignumState([buffer])


def signum_sparse(hyper: SignumHyper) -> Sparse:
    return "refuse" if is_active(hyper.momentum) else "rows"


SIGNUM = Rule(
    name="signum",
    hyper=SignumHyper,
    state=SignumState,
    init=signum_init,
    state_depends_on=("momentum",),
    coefficients=signum_coefficients,
    rule=signum_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("momentum", BELOW_ONE)),
    sparse=signum_sparse,
)


@constructor
def signum(
    lr: Scalar = 1e-2,
    momentum: Scalar = 0.9,
    weight_decay: Scalar = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    maximize: bool = False,
) -> Optimizer:
    """Signum: steps of one size, along the sign of an average of gradients.

    ``m = momentum * m + (1 - momentum) * g``, then ``p = p - lr * (sign(m) + weight_decay * p)``.

    Args:
        lr: size of each step, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        momentum: decay of the average, in [0, 1).
        weight_decay: coefficient of the decay, >= 0.
        decoupled_weight_decay: shrink the parameter by ``1 - lr * weight_decay``; else add
            ``weight_decay * p`` to the gradient, which changes a step only if a sign changes.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is one tensor of the parameter's shape
        and dtype (4 bytes per float32 parameter), and none with ``momentum=0``. torch has no
        Signum.

    Example::

        >>> import torch
        >>> optimizer = signum(lr=0.5)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.5000, 1.5000])

    Reference:
        Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: compressed optimisation for
        non-convex problems", ICML 2018, algorithm 2.
    """
    return chain(
        maximized(maximize),
        choose_weight_decay(weight_decay, decoupled_weight_decay),
        SIGNUM(lr=lr, momentum=momentum),
    )


@constructor
def sign_sgd(
    lr: Scalar = 1e-2,
    weight_decay: Scalar = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    maximize: bool = False,
) -> Optimizer:
    """SignSGD: steps of one size, along the sign of the gradient.

    ``p = p - lr * (sign(g) + weight_decay * p)``.

    Args:
        lr: size of each step, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        weight_decay: coefficient of the decay, >= 0.
        decoupled_weight_decay: shrink the parameter by ``1 - lr * weight_decay``; else add
            ``weight_decay * p`` to the gradient, which changes a step only if a sign changes.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer` without state: ``chain(decoupled_weight_decay(...),
        scale_by_sign(), descend(lr))``. Without decay, a sparse gradient changes only the rows it
        stores. torch has no SignSGD.

    Example::

        >>> import torch
        >>> optimizer = sign_sgd(lr=0.5)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.tensor([3.0, -2.0]), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.5000, 1.5000])

    Reference:
        Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: compressed optimisation for
        non-convex problems", ICML 2018, algorithm 1.
    """
    return chain(
        maximized(maximize),
        choose_weight_decay(weight_decay, decoupled_weight_decay),
        scale_by_sign(),
        descend(lr),
    )
