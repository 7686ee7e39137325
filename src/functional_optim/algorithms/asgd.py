"""ASGD: averaged stochastic gradient descent; Polyak & Juditsky 1992, as in torch.optim.ASGD.

    p_t = (1 - lambda * e_t) * p_{t-1} - e_t * g_t
    a_t = a_{t-1} + u_t * (p_t - a_{t-1})                (a_t = p_t where u_t is 1)
    e_{t+1} = lr / (1 + lambda * lr * t)^alpha           (e_1 = lr)
    u_{t+1} = 1 / max(1, t - t0)                         (u_1 = 1)

A step computes the step size and weight of the next step from its own hyper-parameters, and keeps
them in the state. So a change of the learning rate takes effect one step later, as in torch. The
state has two numbers per parameter, so this rule runs as torch's own operations, without a compiled
kernel. As in torch.optim they are rounded to float32 (to float64 if that is torch's default dtype),
whatever the dtype of the parameter.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import ANY, FINITE_NON_NEGATIVE
from functional_optim.core.aliasing import match_strides
from functional_optim.core.recording import is_recorded, record_call
from functional_optim.core.scalars import default_scalar_dtype
from functional_optim.numeric import above, add, fill_like, mul, number
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class ASGDState(NamedTuple):
    eta: Tensor  # e, 0-d, in float32 unless torch's default dtype is float64
    mu: Tensor  # u, the same
    ax: Tensor  # a, of the parameter's shape and dtype


class ASGDHyper(NamedTuple):
    lr: float  # learning rate
    lambd: float  # lambda
    alpha: float
    t0: float


class ASGDCoefficients(NamedTuple):
    lambd: float
    eta: float  # of the next step
    mu: float  # of the next step


def asgd_init(param: Tensor, hyper: ASGDHyper) -> ASGDState:
    one = param.new_ones((), dtype=default_scalar_dtype())
    return ASGDState(fill_like(one, hyper.lr), one, torch.zeros_like(param))


def asgd_coefficients(step: float, hyper: ASGDHyper) -> ASGDCoefficients:
    lr, lambd = hyper.lr, hyper.lambd
    eta = lr / ((1 + lambd * lr * step) ** hyper.alpha)
    return ASGDCoefficients(lambd, eta, 1 / above(step - hyper.t0, 1.0, step - hyper.t0, 1.0))


def average(ax: Tensor, param: Tensor, weight: float) -> Tensor:
    """Return ``ax + weight * (param - ax)``; ``param`` itself if the weight is 1."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 1.0, param, ax + mul(param - ax, weight))
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript skips this condition alone
        if is_recorded(weight):
            result: Tensor = record_call(average, ax, param, weight)
            return result
    if weight == 1.0:
        return param
    return ax + mul(param - ax, weight)


def asgd_rule(
    param: Tensor, grad: Tensor, state: ASGDState, c: ASGDCoefficients
) -> tuple[Tensor, ASGDState]:
    eta = number(state.eta)
    param = add(match_strides(mul(param, 1 - c.lambd * eta), param), grad, -eta)
    ax = average(state.ax, param, number(state.mu))
    one = torch.ones_like(state.eta)
    return param, ASGDState(mul(one, c.eta), mul(one, c.mu), ax)


ASGD = Rule(
    name="asgd",
    hyper=ASGDHyper,
    state=ASGDState,
    init=asgd_init,
    state_depends_on=(),
    coefficients=asgd_coefficients,
    rule=asgd_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("lambd", ANY), ("alpha", ANY), ("t0", ANY)),
)


@constructor
def asgd(
    lr: Scalar = 1e-2,
    lambd: Scalar = 1e-4,
    alpha: Scalar = 0.75,
    t0: Scalar = 1e6,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """ASGD: stochastic gradient descent whose state is an average of the parameters.

    ``p = (1 - lambd * eta) * p - eta * g`` with a step size ``eta`` that falls from ``lr``, and
    ``ax``, the average of ``p`` from step ``t0 + 2`` on. Evaluate with ``ax``.

    Args:
        lr: the first step size, a finite number >= 0. Any number may be a 0-d tensor or a
            schedule. A change takes effect in the next step, as in torch.
        lambd: coefficient of the decay of the parameters and of ``eta``, not NaN.
        alpha: exponent of the decay of ``eta``, not NaN.
        t0: start of averaging, not NaN: ``ax`` is ``p`` itself until step ``t0 + 2``.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit torch.optim.ASGD(foreach=False). Its
        state is ``ax``, of the parameter's shape and dtype, and ``eta`` and ``mu``, two numbers in
        float32. Every executor runs its steps as torch's own operations.

    Example::

        >>> import torch
        >>> optimizer = asgd(lr=0.1, t0=0)
        >>> params, state = torch.ones(1), optimizer.init(torch.ones(1))
        >>> for _ in range(3):
        ...     params, state = optimizer.update(params, torch.ones(1), state)
        >>> params, state.leaves.stages[-1].ax
        (tensor([0.7000]), tensor([0.7500]))

    Reference:
        Polyak & Juditsky, "Acceleration of stochastic approximation by averaging", SIAM Journal on
        Control and Optimization, 1992; step size and defaults are torch.optim.ASGD's.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        ASGD(lr=lr, lambd=lambd, alpha=alpha, t0=t0),
    )
