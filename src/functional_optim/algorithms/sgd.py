"""SGD with momentum: Sutskever et al. 2013, in the form of torch.optim.SGD.

    b_t = mu * b_{t-1} + (1 - tau) * g_t        (b_1 = g_1: the first gradient is not damped)
    d_t = g_t + mu * b_t   if nesterov, else b_t
    p_t = p_{t-1} - lr * d_t

Without momentum d_t = g_t, and no buffer is kept.
"""

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.authoring import Optimizer, Scalar, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, NON_NEGATIVE
from functional_optim.core.stage import Link, Rule, Sparse, Transform
from functional_optim.numeric import add, at_first_step, fill_like, is_active, mul
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class SGDState(NamedTuple):
    momentum_buffer: list[Tensor]  # [b] of the parameter's shape and dtype; [] without momentum


class SGDHyper(NamedTuple):
    lr: float  # learning rate
    momentum: float  # mu
    dampening: float  # tau
    nesterov: bool


class SGDCoefficients(NamedTuple):
    lr: float
    momentum: float
    gain: float  # weight of the new gradient in the buffer
    nesterov: bool
    active: bool  # True if there is momentum


def sgd_init(param: Tensor, hyper: Any) -> SGDState:
    # Minus zero is the neutral element of addition, so the first buffer has the bits of the first
    # gradient, also for signed zeros.
    return SGDState([fill_like(param, -0.0)] if is_active(hyper.momentum) else [])


def sgd_coefficients(step: float, hyper: SGDHyper) -> SGDCoefficients:
    gain = at_first_step(step, 1.0, 1 - hyper.dampening)
    active = is_active(hyper.momentum)
    return SGDCoefficients(hyper.lr, hyper.momentum, gain, hyper.nesterov, active)


def sgd_direction(
    grad: Tensor, state: SGDState, momentum: float, gain: float, nesterov: bool, active: bool
) -> tuple[Tensor, SGDState]:
    """Return the direction of a step, and the new state."""
    if not active:
        return grad, state
    buffer = add(mul(state.momentum_buffer[0], momentum), grad, gain)
    return (add(grad, buffer, momentum) if nesterov else buffer), SGDState([buffer])


def sgd_rule(
    param: Tensor, grad: Tensor, state: SGDState, c: SGDCoefficients
) -> tuple[Tensor, SGDState]:
    direction, state = sgd_direction(grad, state, c.momentum, c.gain, c.nesterov, c.active)
    return add(param, direction, -c.lr), state


def require_nesterov(name: str, hyper: Any) -> None:
    if hyper.nesterov and (hyper.momentum == 0.0 or hyper.dampening != 0.0):
        raise ValueError(
            f"{name}: nesterov needs momentum > 0 and dampening == 0, got "
            f"momentum={hyper.momentum}, dampening={hyper.dampening}"
        )


def sgd_check(hyper: SGDHyper) -> None:
    require_nesterov("sgd", hyper)


def sgd_sparse(hyper: Any) -> Sparse:
    return "dense" if is_active(hyper.momentum) else "rows"


SGD = Rule(
    name="sgd",
    hyper=SGDHyper,
    state=SGDState,
    init=sgd_init,
    state_depends_on=("momentum",),
    coefficients=sgd_coefficients,
    rule=sgd_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("momentum", NON_NEGATIVE)),
    check=sgd_check,
    as_gradient=("momentum_buffer",),
    sparse=sgd_sparse,
)


class TraceHyper(NamedTuple):
    momentum: float  # mu
    dampening: float  # tau
    nesterov: bool


class TraceCoefficients(NamedTuple):
    momentum: float
    gain: float  # weight of the new gradient in the buffer
    nesterov: bool
    active: bool  # True if there is momentum


def trace_coefficients(step: float, hyper: TraceHyper) -> TraceCoefficients:
    c = sgd_coefficients(step, SGDHyper(1.0, hyper.momentum, hyper.dampening, hyper.nesterov))
    return TraceCoefficients(c.momentum, c.gain, c.nesterov, c.active)


def trace_transform(
    grad: Tensor, param: Tensor, state: SGDState, c: TraceCoefficients
) -> tuple[Tensor, SGDState]:
    return sgd_direction(grad, state, c.momentum, c.gain, c.nesterov, c.active)


def trace_check(hyper: TraceHyper) -> None:
    require_nesterov("trace", hyper)


TRACE = Transform(
    name="trace",
    hyper=TraceHyper,
    state=SGDState,
    init=sgd_init,
    state_depends_on=("momentum",),
    coefficients=trace_coefficients,
    transform=trace_transform,
    bounds=(("momentum", NON_NEGATIVE),),
    check=trace_check,
    as_gradient=("momentum_buffer",),
    sparse=sgd_sparse,
)


@constructor
def sgd(
    lr: Scalar = 1e-3,
    momentum: Scalar = 0.0,
    dampening: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Stochastic gradient descent, with optional momentum.

    ``b = momentum * b + (1 - dampening) * g`` (undamped at the first step), then
    ``p = p - lr * b``, or ``p - lr * (g + momentum * b)`` with ``nesterov``.

    Args:
        lr: learning rate, a finite number >= 0. Any number may be a 0-d tensor or a schedule.
        momentum: factor of the buffer, >= 0; 0 keeps no buffer.
        dampening: reduction of the weight of each new gradient after the first.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        nesterov: step along ``g + momentum * b``; needs momentum > 0 and dampening == 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.SGD(foreach=False). In 16
        bits the rounding of torch's kernels depends on strides. There it holds if all gradients of
        a parameter have the same strides.

    Example::

        >>> import torch
        >>> optimizer = sgd(lr=0.5)
        >>> params, state = optimizer.update(
        ...     torch.ones(2), torch.ones(2), optimizer.init(torch.ones(2)))
        >>> params
        tensor([0.5000, 0.5000])

    Reference:
        Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in
        deep learning", ICML 2013; Nesterov's form after its eq. 3-4.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        SGD(lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov),
    )


def trace(momentum: Scalar = 0.9, dampening: Scalar = 0.0, nesterov: bool = False) -> Link:
    """Heavy-ball momentum: a decaying sum of the updates ``u`` of the stages before.

    ``b = momentum * b + (1 - dampening) * u`` (undamped at the first step). The new update is
    ``b``, or ``u + momentum * b`` with ``nesterov``.

    Args:
        momentum: factor of the buffer, >= 0; 0 keeps no buffer.
        dampening: reduction of the weight of each new update after the first.
        nesterov: return ``u + momentum * b``; needs momentum > 0 and dampening == 0.

    Returns:
        A link for :func:`~functional_optim.chain`. Before :func:`~functional_optim.descend` it is
        :func:`~functional_optim.sgd`, bit for bit.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(trace(momentum=0.5), descend(lr=1.0))
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     params, state = optimizer.update(params, torch.ones(1), state)
        >>> params
        tensor([-2.5000])

    Reference:
        Polyak, "Some methods of speeding up the convergence of iteration methods", 1964, in the
        form of Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum
        in deep learning", ICML 2013, eq. 1-2, with the learning rate outside of the sum.
    """
    return TRACE(momentum=momentum, dampening=dampening, nesterov=nesterov)
