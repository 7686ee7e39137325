"""D-Adaptation for SGD: Defazio & Mishchenko 2023, algorithm 4, as its authors run it.

It finds the step size itself. With sums and norms over all elements of all tensors, ||g_1|| the
norm of the first gradients that are not all 0, and p_0 the parameters that ``init`` was given:

    l_t = d_{t-1} * lr / ||g_1||
    r_t = r_{t-1} + l_t * sum g_t * s_{t-1}
    s_t = s_{t-1} + l_t * g_t
    d_t = max(d_{t-1}, min(2 * r_t / ||s_t||, growth_rate * d_{t-1}))
    p_t = mu * p_{t-1} + (1 - mu) * (p_0 - s_t)

A step in which all gradients and s are 0 changes nothing. Defaults are those of the authors'
program. That program leaves the weight decay out of ||g_1||; here all gradients contain it.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.dadapt_adam import grow
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import BELOW_ONE, FINITE_NON_NEGATIVE, FINITE_POSITIVE, Interval
from functional_optim.core.block_sums import finite_or_zero, sum_in_blocks
from functional_optim.numeric import add, choose, choose_record, is_active, mul
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class DadaptSGDState(NamedTuple):
    s: Tensor  # weighted sum of gradients, of the parameter's shape and dtype
    p0: Tensor  # the first parameter, of its shape and dtype


class DadaptSGDHyper(NamedTuple):
    lr: float  # factor of the step size that is found
    momentum: float  # mu
    d0: float  # first d
    growth_rate: float


class DadaptSGDShared(NamedTuple):
    d: float  # of the next step
    numerator: float  # r
    s_sq: float  # ||s||^2 at the last step; 0 if it moved nothing
    g0_norm: float  # ||g_1||; 0 before the first gradient that is not 0
    d_used: float  # by the last step


class DadaptSGDCoefficients(NamedTuple):
    next_length: float  # l of the next step; 0 for the first step, where s is 0
    next_weight: float  # weight of g in s at the next step; lr for the first step
    weight: float  # of g in s
    keep: float  # mu; 1 where nothing moves
    gain: float  # 1 - mu; 0 where nothing moves
    is_active: bool  # True if lr is not 0


def dadapt_sgd_init(param: Tensor, hyper: DadaptSGDHyper) -> DadaptSGDState:
    return DadaptSGDState(torch.zeros_like(param), torch.clone(param))


def dadapt_sgd_init_shared(hyper: DadaptSGDHyper) -> DadaptSGDShared:
    return DadaptSGDShared(hyper.d0, 0.0, 0.0, 0.0, hyper.d0)


def dadapt_sgd_coefficients(
    step: float, hyper: DadaptSGDHyper, shared: DadaptSGDShared
) -> DadaptSGDCoefficients:
    is_first, is_still = shared.g0_norm == 0.0, shared.s_sq == 0.0
    norm = choose(is_first, 1.0, shared.g0_norm)
    length = shared.d * hyper.lr / norm
    return DadaptSGDCoefficients(
        next_length=choose(is_first, 0.0, length),
        next_weight=choose(is_first, hyper.lr, length),
        weight=choose(is_still, 0.0, shared.d_used * hyper.lr / norm),
        keep=choose(is_still, 1.0, hyper.momentum),
        gain=choose(is_still, 0.0, 1 - hyper.momentum),
        is_active=is_active(hyper.lr),
    )


def products_and_squares(weight: float, grad: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Return the sums over a block: of ``g * s``, of the squares of the new s, and of ``g^2``."""
    new = add(s, grad, weight)
    return tuple(one.sum(dtype=torch.float64) for one in (grad * s, new.square(), grad.square()))


def dadapt_sgd_reduce(
    param: Tensor, grad: Tensor, state: DadaptSGDState, c: DadaptSGDCoefficients
) -> tuple[Tensor, ...]:
    """Return the terms of a tensor in r, ``||s||^2`` and ``||g||^2``.

    At the first step ``||g_1||`` is not known yet, so ``lr * g`` replaces s.
    """
    addends = partial(products_and_squares, c.next_weight)
    product, size, slope = sum_in_blocks(addends, (grad, state.s))
    active = 1.0 if c.is_active else 0.0
    return finite_or_zero((c.next_length * product, active * size, active * slope))


def dadapt_sgd_combine(
    shared: DadaptSGDShared, totals: tuple[float, float, float], hyper: DadaptSGDHyper
) -> DadaptSGDShared:
    gain, size, slope = totals
    is_first, is_still = shared.g0_norm == 0.0, size == 0.0
    norm = choose(is_first, slope**0.5, shared.g0_norm)
    scale = shared.d / choose(norm == 0.0, 1.0, norm)
    s_sq = choose(is_first, size * scale * scale, size)
    numerator = shared.numerator + gain
    estimate = 2 * numerator / choose(is_still, 1.0, s_sq) ** 0.5
    d = grow(shared.d, estimate, hyper.growth_rate)
    moved = DadaptSGDShared(d, numerator, s_sq, norm, shared.d)
    d, numerator, _, norm, _ = shared
    return choose_record(is_still, DadaptSGDShared(d, numerator, s_sq, norm, d), moved)


def dadapt_sgd_rule(
    param: Tensor, grad: Tensor, state: DadaptSGDState, c: DadaptSGDCoefficients
) -> tuple[Tensor, DadaptSGDState]:
    if not c.is_active:
        return param, state
    s = add(state.s, grad, c.weight)
    moved = add(mul(param, c.keep), state.p0 - s, c.gain)
    return moved, DadaptSGDState(s, state.p0)


DADAPT_SGD = Rule(
    name="dadapt_sgd",
    hyper=DadaptSGDHyper,
    state=DadaptSGDState,
    init=dadapt_sgd_init,
    state_depends_on=(),
    coefficients=dadapt_sgd_coefficients,
    rule=dadapt_sgd_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("momentum", BELOW_ONE),
        ("d0", FINITE_POSITIVE),
        ("growth_rate", Interval(1.0)),
    ),
    shared=DadaptSGDShared,
    shared_by=("d0", "growth_rate"),
    init_shared=dadapt_sgd_init_shared,
    reduce=dadapt_sgd_reduce,
    totals=3,
    combine=dadapt_sgd_combine,
)


@constructor
def dadapt_sgd(
    lr: Scalar = 1.0,
    momentum: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    d0: Scalar = 1e-6,
    growth_rate: Scalar = math.inf,
    *,
    maximize: bool = False,
) -> Optimizer:
    """D-Adaptation for SGD: SGD that finds its learning rate from its own sum of gradients.

    ``s = s + d * lr / ||g_1|| * g``, then ``p = momentum * p + (1 - momentum) * (p_0 - s)``. All
    parameters share ``d``, a lower bound of the distance to the solution. It grows from ``d0`` on,
    and never shrinks; :meth:`Optimizer.shared` returns it. ``d0`` and ``growth_rate`` must be the
    same for all parameters. With ``growth_rate=1`` it is SGD with ``lr = d0 / ||g_1||``.

    Args:
        lr: factor of the step size, a finite number >= 0: 1, or a schedule. Parameters may have
            different factors. Parameters with factor 0 stay, and do not contribute to ``d``.
        momentum: weight of the last parameters in the new ones, in [0, 1).
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        d0: first ``d``, > 0.
        growth_rate: largest factor by which ``d`` grows at a step, >= 1.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is two tensors of the parameter's shape
        and dtype, 8 bytes per float32 parameter, and five numbers for all parameters. The sums for
        ``d`` are computed in float64 over all tensors, shards and ranks; a tensor whose sums are
        not finite is left out.

    Example::

        >>> import torch
        >>> optimizer = dadapt_sgd(d0=0.01)
        >>> params = torch.ones(2)
        >>> state = optimizer.init(params)
        >>> for _ in range(50):
        ...     params, state = optimizer.update(params, 2 * params, state)  # of sum p^2
        >>> 0.01 < optimizer.shared(state)["dadapt_sgd"].d < 2.0
        True

    Reference:
        Defazio, Mishchenko, "Learning-rate-free learning by D-adaptation", ICML 2023, algorithm 4.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        DADAPT_SGD(lr=lr, momentum=momentum, d0=d0, growth_rate=growth_rate),
    )
