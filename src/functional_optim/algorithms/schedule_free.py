"""Schedule-free SGD and AdamW: Defazio et al. 2024, equations 9-11 and algorithm 1.

Gradients g are taken at y, which is the parameter p. The sequence z makes the steps. Evaluate with
x, a weighted mean of all z:

    l_t = lr * min(1, t / warmup_steps)
    w_t = t^r * (largest l so far)^weight_lr_power,  c_t = w_t / (w_1 + ... + w_t)
    z_t = z_{t-1} - l_t * u_t
    x_t = (1 - c_t) * x_{t-1} + c_t * z_t
    p_t = y_t = (1 - b) * z_t + b * x_t

with u_t = g_t + weight_decay * y_{t-1} for SGD, and for AdamW
v_t = b2 * v_{t-1} + (1 - b2) * g_t^2,
u_t = g_t / (sqrt(v_t / (1 - b2^t)) + eps) + weight_decay * y_{t-1}.

x is not in the state: y_t = y_{t-1} + c_t * (z_{t-1} - y_{t-1}) - l_t * (1 - b * (1 - c_t)) * u_t.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, NON_NEGATIVE, Interval
from functional_optim.numeric import (
    add,
    addcmul,
    choose,
    div,
    is_active,
    larger,
    lerp,
    mul,
    shift,
    smaller,
)


class ScheduleFreeShared(NamedTuple):
    k: float  # step count, t
    weight_sum: float  # w_1 + ... + w_t
    lr_max: float  # the largest l so far
    weight: float  # c of the last step
    warmup: float  # min(1, t / warmup_steps) of the last step


class ScheduleFreeSGDState(NamedTuple):
    z: Tensor  # of the parameter's shape and dtype


class ScheduleFreeSGDHyper(NamedTuple):
    lr: float
    momentum: float  # b
    weight_decay: float
    warmup_steps: int
    r: float
    weight_lr_power: float


class ScheduleFreeSGDCoefficients(NamedTuple):
    weight: float  # c
    step_size: float  # -l, of z
    y_step_size: float  # -l * (1 - b * (1 - c)), of y
    weight_decay: float
    decays: bool


class ScheduleFreeAdamWState(NamedTuple):
    z: Tensor  # of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, the same


class ScheduleFreeAdamWHyper(NamedTuple):
    lr: float
    betas: tuple[float, float]  # b and b2
    eps: float
    weight_decay: float
    warmup_steps: int
    r: float
    weight_lr_power: float


class ScheduleFreeAdamWCoefficients(NamedTuple):
    weight: float  # c
    step_size: float  # -l, of z
    y_step_size: float  # -l * (1 - b * (1 - c)), of y
    weight_decay: float
    decays: bool
    beta_2: float
    weight_2: float  # 1 - b2
    correction: float  # 1 - b2^t
    eps: float


def sgd_init(param: Tensor, hyper: ScheduleFreeSGDHyper) -> ScheduleFreeSGDState:
    return ScheduleFreeSGDState(torch.clone(param))


def adamw_init(param: Tensor, hyper: ScheduleFreeAdamWHyper) -> ScheduleFreeAdamWState:
    return ScheduleFreeAdamWState(torch.clone(param), torch.zeros_like(param))


def init_shared(hyper: Any) -> ScheduleFreeShared:
    return ScheduleFreeShared(0.0, 0.0, 0.0, 0.0, 0.0)


def combine(shared: ScheduleFreeShared, totals: tuple[()], hyper: Any) -> ScheduleFreeShared:
    """Return the shared scalars after one more step, for both rules."""
    k = shared.k + 1.0
    warmup = smaller(1.0, k / hyper.warmup_steps) if hyper.warmup_steps else 1.0
    lr_max = larger(shared.lr_max, hyper.lr * warmup)
    weight = k**hyper.r * lr_max**hyper.weight_lr_power
    weight_sum = shared.weight_sum + weight
    is_none = weight_sum == 0.0  # while lr is 0
    share = choose(is_none, 0.0, weight / choose(is_none, 1.0, weight_sum))
    return ScheduleFreeShared(k, weight_sum, lr_max, share, warmup)


def sgd_coefficients(
    step: float, hyper: ScheduleFreeSGDHyper, shared: ScheduleFreeShared
) -> ScheduleFreeSGDCoefficients:
    lr, c = hyper.lr * shared.warmup, shared.weight
    y_step_size = lr * (hyper.momentum * (1 - c) - 1)
    decay = hyper.weight_decay
    return ScheduleFreeSGDCoefficients(c, -lr, y_step_size, decay, is_active(decay))


def adamw_coefficients(
    step: float, hyper: ScheduleFreeAdamWHyper, shared: ScheduleFreeShared
) -> ScheduleFreeAdamWCoefficients:
    beta_1, beta_2 = hyper.betas
    lr, c = hyper.lr * shared.warmup, shared.weight
    y_step_size = lr * (beta_1 * (1 - c) - 1)
    decay = hyper.weight_decay
    # This is 0 before the first step. Coefficients of step 0 are not used.
    correction = 1 - beta_2**shared.k
    return ScheduleFreeAdamWCoefficients(
        c, -lr, y_step_size, decay, is_active(decay), beta_2, 1 - beta_2, correction, hyper.eps
    )


def move(
    y: Tensor, z: Tensor, direction: Tensor, weight: float, y_step_size: float, step_size: float
) -> tuple[Tensor, Tensor]:
    """Return (y, z) after a step along a direction."""
    return add(lerp(y, z, weight), direction, y_step_size), add(z, direction, step_size)


def mean_of(y: Tensor, z: Tensor, momentum: float) -> Tensor:
    """Return x, where ``y = (1 - momentum) * z + momentum * x``."""
    return lerp(y, z, 1 - 1 / momentum)


def sgd_rule(
    param: Tensor, grad: Tensor, state: ScheduleFreeSGDState, c: ScheduleFreeSGDCoefficients
) -> tuple[Tensor, ScheduleFreeSGDState]:
    direction = add(grad, param, c.weight_decay) if c.decays else grad
    y, z = move(param, state.z, direction, c.weight, c.y_step_size, c.step_size)
    return y, ScheduleFreeSGDState(z)


def adamw_rule(
    param: Tensor, grad: Tensor, state: ScheduleFreeAdamWState, c: ScheduleFreeAdamWCoefficients
) -> tuple[Tensor, ScheduleFreeAdamWState]:
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    direction = grad / shift(div(exp_avg_sq, c.correction).sqrt(), c.eps)
    if c.decays:
        direction = add(direction, param, c.weight_decay)
    y, z = move(param, state.z, direction, c.weight, c.y_step_size, c.step_size)
    return y, ScheduleFreeAdamWState(z, exp_avg_sq)


def sgd_view(param: Tensor, state: ScheduleFreeSGDState, hyper: ScheduleFreeSGDHyper) -> Tensor:
    return mean_of(param, state.z, hyper.momentum)


def adamw_view(
    param: Tensor, state: ScheduleFreeAdamWState, hyper: ScheduleFreeAdamWHyper
) -> Tensor:
    return mean_of(param, state.z, hyper.betas[0])


def adamw_check(hyper: ScheduleFreeAdamWHyper) -> None:
    if hyper.betas[0] == 0.0:
        raise ValueError(
            "schedule_free_adamw: betas[0] must be a number > 0 and < 1, got 0.0: the parameters "
            "to evaluate with could not be found from those that are kept"
        )


_WEIGHTS = (
    ("weight_decay", NON_NEGATIVE),
    ("warmup_steps", Interval(0)),
    ("r", Interval(finite=True)),
    ("weight_lr_power", FINITE_NON_NEGATIVE),
)

_SHARED_BY = ("lr", "warmup_steps", "r", "weight_lr_power")

SCHEDULE_FREE_SGD = Rule(
    name="schedule_free_sgd",
    hyper=ScheduleFreeSGDHyper,
    state=ScheduleFreeSGDState,
    init=sgd_init,
    state_depends_on=(),
    coefficients=sgd_coefficients,
    rule=sgd_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("momentum", Interval(0.0, 1.0, low_open=True, high_open=True)),
        *_WEIGHTS,
    ),
    shared=ScheduleFreeShared,
    shared_by=_SHARED_BY,
    init_shared=init_shared,
    combine=combine,
    view=sgd_view,
)

SCHEDULE_FREE_ADAMW = Rule(
    name="schedule_free_adamw",
    hyper=ScheduleFreeAdamWHyper,
    state=ScheduleFreeAdamWState,
    init=adamw_init,
    state_depends_on=(),
    coefficients=adamw_coefficients,
    rule=adamw_rule,
    bounds=(("lr", FINITE_NON_NEGATIVE), ("betas", BELOW_ONE), ("eps", NON_NEGATIVE), *_WEIGHTS),
    check=adamw_check,
    shared=ScheduleFreeShared,
    shared_by=_SHARED_BY,
    init_shared=init_shared,
    combine=combine,
    view=adamw_view,
)


@constructor
def schedule_free_sgd(
    lr: Scalar = 1.0,
    momentum: Scalar = 0.9,
    weight_decay: Scalar = 0.0,
    warmup_steps: int = 0,
    r: Scalar = 0.0,
    weight_lr_power: Scalar = 2.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Schedule-free SGD: SGD with a running mean instead of a falling learning rate.

    The parameters are ``y``, at which gradients are computed. :meth:`Optimizer.view` returns ``x``,
    the mean to evaluate with. There are no modes, and checkpoints contain parameters and state
    unchanged. ``y = (1 - momentum) * z + momentum * x`` with ``z = z - lr * g``.

    The weight of a step in the mean is one number for all parameters, so ``lr``, ``warmup_steps``,
    ``r`` and ``weight_lr_power`` must be the same for all parameters. To train some with another
    ``lr``, give them another optimizer in a :func:`~functional_optim.partition`.

    Args:
        lr: learning rate, a finite number >= 0; usually larger than for SGD.
        momentum: weight of ``x`` in ``y``, in (0, 1): the same in all steps.
        weight_decay: coefficient of ``y`` added to the gradient, >= 0.
        warmup_steps: number of steps in which ``lr`` rises from near 0, a whole number >= 0.
        r: a finite number. The weight of step ``t`` in the mean has the factor ``t ** r``.
        weight_lr_power: exponent of the largest learning rate so far in that weight, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit schedulefree.SGDScheduleFree, with
        ``view`` for its ``eval()``.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> optimizer = schedule_free_sgd(lr=1.0, momentum=0.5)
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     params, state = optimizer.update(params, torch.ones(1), state)
        ...     print(params.item(), optimizer.view(params, state).item())  # z: -1, then -2
        -1.0 -1.0
        -1.75 -1.5

    Reference:
        Defazio, Yang, Mehta, Mishchenko, Khaled, Cutkosky, "The road less scheduled", NeurIPS 2024,
        equations 9-11.
    """
    return chain(
        maximized(maximize),
        SCHEDULE_FREE_SGD(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            r=r,
            weight_lr_power=weight_lr_power,
        ),
    )


@constructor
def schedule_free_adamw(
    lr: Scalar = 0.0025,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    warmup_steps: int = 0,
    r: Scalar = 0.0,
    weight_lr_power: Scalar = 2.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Schedule-free AdamW: AdamW with a running mean instead of a falling learning rate.

    The parameters are ``y``, at which gradients are computed. :meth:`Optimizer.view` returns ``x``,
    the mean to evaluate with. There are no modes, and checkpoints contain parameters and state
    unchanged. ``y = (1 - b) * z + b * x`` with ``z = z - lr * (g / (sqrt(v_hat) + eps) +
    weight_decay * y)``.

    ``lr``, ``warmup_steps``, ``r`` and ``weight_lr_power`` must be the same for all parameters, as
    for :func:`schedule_free_sgd`.

    Args:
        lr: learning rate, a finite number >= 0; usually larger than for AdamW.
        betas: ``b``, the weight of ``x`` in ``y``, in (0, 1) and the same in all steps; and the
            decay of ``v``, in [0, 1).
        eps: added to the root, >= 0.
        weight_decay: coefficient of the decay at ``y``, >= 0.
        warmup_steps: number of steps in which ``lr`` rises from near 0, a whole number >= 0.
        r: a finite number. The weight of step ``t`` in the mean has the factor ``t ** r``.
        weight_lr_power: exponent of the largest learning rate so far in that weight, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`; bit for bit schedulefree.AdamWScheduleFree, with
        ``view`` for its ``eval()``.

    Raises:
        TypeError, ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> optimizer = schedule_free_adamw(lr=0.5, betas=(0.5, 0.999))
        >>> params, state = torch.ones(1), optimizer.init(torch.ones(1))
        >>> for _ in range(20):
        ...     params, state = optimizer.update(params, 2 * params, state)  # of p^2
        >>> bool(optimizer.view(params, state).abs() < 0.2)
        True

    Reference:
        Defazio, Yang, Mehta, Mishchenko, Khaled, Cutkosky, "The road less scheduled", NeurIPS 2024,
        algorithm 1.
    """
    return chain(
        maximized(maximize),
        SCHEDULE_FREE_ADAMW(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            r=r,
            weight_lr_power=weight_lr_power,
        ),
    )
