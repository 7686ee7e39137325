"""D-Adaptation for Adam: Defazio & Mishchenko 2023, algorithm 5, as its authors run it.

It finds the step size itself. With n the number of the step, sums over all elements of all tensors,
and b = sqrt(b2):

    l_t = d_{t-1} * lr                        (* sqrt(1 - b2^n) / (1 - b1^n), if corrected)
    r_t = b * r_{t-1} + (1 - b) * l_t * sum g_t * s_{t-1} / (sqrt(v_{t-1}) + eps)
    s_t = b * s_{t-1} + (1 - b) * l_t * g_t
    m_t = b1 * m_{t-1} + (1 - b1) * l_t * g_t
    v_t = b2 * v_{t-1} + (1 - b2) * g_t^2
    d_t = max(d_{t-1}, min(r_t / ((1 - b) * sum |s_t|), growth_rate * d_{t-1}))
    p_t = (1 - l_t * weight_decay) * p_{t-1} - m_t / (sqrt(v_t) + eps)

A step in which all gradients and s are 0 changes nothing. Defaults, and v_{t-1} in r, are those of
the authors' program and of optax.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import (
    BELOW_ONE,
    FINITE_NON_NEGATIVE,
    FINITE_POSITIVE,
    NON_NEGATIVE,
    Interval,
)
from functional_optim.core.block_sums import finite_or_zero, sum_in_blocks
from functional_optim.numeric import (
    add,
    addcdiv,
    addcmul,
    choose,
    choose_record,
    is_active,
    larger,
    mul,
    shift,
    smaller,
)


class DadaptAdamState(NamedTuple):
    s: Tensor  # weighted sum of gradients, of the parameter's shape and dtype
    exp_avg: Tensor  # m, of the parameter's shape and dtype
    exp_avg_sq: Tensor  # v, of the parameter's shape and dtype


class DadaptAdamHyper(NamedTuple):
    lr: float  # factor of the step size that is found
    betas: tuple[float, float]  # b1, b2: decay of m and of v
    eps: float
    weight_decay: float
    decouple: bool  # True if the decay shrinks the parameter; else it is added to the gradient
    use_bias_correction: bool
    d0: float  # first d
    growth_rate: float


class DadaptAdamShared(NamedTuple):
    d: float  # of the next step
    numerator: float  # r
    denominator: float  # sum |s| at the last step; 0 if it moved nothing
    k: float  # number of steps that have moved anything
    d_used: float  # by the last step


class DadaptAdamCoefficients(NamedTuple):
    next_length: float  # l of the step to come
    next_weight: float  # of g in s at the step to come
    root_2: float  # b
    weight: float  # of g in s
    beta_1: float
    weight_1: float  # l * (1 - b1)
    beta_2: float
    weight_2: float  # 1 - b2
    eps: float
    added_decay: float  # of the parameter to the gradient
    decay: float  # -l * weight_decay
    step_size: float  # -1, or 0 where nothing moves
    adds_decay: bool
    decays: bool
    is_active: bool  # True if lr is not 0


def dadapt_adam_init_shared(hyper: DadaptAdamHyper) -> DadaptAdamShared:
    return DadaptAdamShared(hyper.d0, 0.0, 0.0, 0.0, hyper.d0)


def dadapt_adam_coefficients(
    step: float, hyper: DadaptAdamHyper, shared: DadaptAdamShared
) -> DadaptAdamCoefficients:
    beta_1, beta_2 = hyper.betas
    is_still = shared.denominator == 0.0
    length, next_length = shared.d_used * hyper.lr, shared.d * hyper.lr
    if hyper.use_bias_correction:
        number = choose(is_still, shared.k + 1.0, shared.k)
        length = length * bias_correction(hyper.betas, number)
        next_length = next_length * bias_correction(hyper.betas, shared.k + 1.0)
    root_2 = beta_2**0.5
    has_decay = is_active(hyper.weight_decay)
    return DadaptAdamCoefficients(
        next_length=next_length,
        next_weight=next_length * (1 - root_2),
        root_2=root_2,
        weight=length * (1 - root_2),
        beta_1=beta_1,
        weight_1=length * (1 - beta_1),
        beta_2=beta_2,
        weight_2=1 - beta_2,
        eps=hyper.eps,
        added_decay=hyper.weight_decay,
        decay=choose(is_still, 0.0, -length * hyper.weight_decay),
        step_size=choose(is_still, 0.0, -1.0),
        adds_decay=has_decay and not hyper.decouple,
        decays=has_decay and hyper.decouple,
        is_active=is_active(hyper.lr),
    )


def bias_correction(betas: tuple[float, float], number: float) -> float:
    """Return the factor of Adam's step size at step ``number``."""
    beta_1, beta_2 = betas
    correction: float = ((1 - beta_2**number) ** 0.5) / (1 - beta_1**number)
    return correction


def grow(d: Any, estimate: Any, growth_rate: Any) -> Any:
    """Return the larger of d and the limited estimate."""
    return larger(d, limit_growth(estimate, d, growth_rate))


def limit_growth(estimate: Any, d: Any, growth_rate: Any) -> Any:
    """Return the smaller of an estimate and ``growth_rate * d``."""
    # A product with infinity would have the derivative NaN.
    is_free = isinstance(growth_rate, float) and math.isinf(growth_rate)
    return estimate if is_free else smaller(estimate, d * growth_rate)


def add_decay(grad: Tensor, param: Tensor, c: DadaptAdamCoefficients) -> Tensor:
    """Return the gradient plus the weight decay, if the decay is not decoupled."""
    return add(grad, param, c.added_decay) if c.adds_decay else grad


def products_and_sizes(
    c: DadaptAdamCoefficients, grad: Tensor, s: Tensor, exp_avg_sq: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``sum g * s / (sqrt(v) + eps)``, and ``sum |s|`` of the new s, over a block."""
    product = grad * (s / shift(exp_avg_sq.sqrt(), c.eps))
    new = add(mul(s, c.root_2), grad, c.next_weight)
    return product.sum(dtype=torch.float64), new.abs().sum(dtype=torch.float64)


def dadapt_adam_reduce(
    param: Tensor, grad: Tensor, state: DadaptAdamState, c: DadaptAdamCoefficients
) -> tuple[Tensor, ...]:
    """Return the terms of a tensor in the change of r, without the weight 1 - b, and in sum |s|."""
    tensors = add_decay(grad, param, c), state.s, state.exp_avg_sq
    product, size = sum_in_blocks(partial(products_and_sizes, c), tensors)
    active = 1.0 if c.is_active else 0.0
    return finite_or_zero((c.next_length * product, active * size))


def dadapt_adam_combine(
    shared: DadaptAdamShared, totals: tuple[float, float], hyper: DadaptAdamHyper
) -> DadaptAdamShared:
    gain, size = totals
    root_2 = hyper.betas[1] ** 0.5
    is_still = size == 0.0
    numerator = root_2 * shared.numerator + (1 - root_2) * gain
    estimate = numerator / ((1 - root_2) * choose(is_still, 1.0, size))
    d = grow(shared.d, estimate, hyper.growth_rate)
    moved = DadaptAdamShared(d, numerator, size, shared.k + 1.0, shared.d)
    d, numerator, _, k, _ = shared
    return choose_record(is_still, DadaptAdamShared(d, numerator, size, k, d), moved)


def dadapt_adam_rule(
    param: Tensor, grad: Tensor, state: DadaptAdamState, c: DadaptAdamCoefficients
) -> tuple[Tensor, DadaptAdamState]:
    if not c.is_active:
        return param, state
    grad = add_decay(grad, param, c)
    exp_avg = add(mul(state.exp_avg, c.beta_1), grad, c.weight_1)
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    s = add(mul(state.s, c.root_2), grad, c.weight)
    if c.decays:
        param = add(param, param, c.decay)
    moved = addcdiv(param, exp_avg, shift(exp_avg_sq.sqrt(), c.eps), c.step_size)
    return moved, DadaptAdamState(s, exp_avg, exp_avg_sq)


DADAPT_ADAM = Rule(
    name="dadapt_adam",
    hyper=DadaptAdamHyper,
    state=DadaptAdamState,
    coefficients=dadapt_adam_coefficients,
    rule=dadapt_adam_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("eps", FINITE_POSITIVE),
        ("weight_decay", NON_NEGATIVE),
        ("d0", FINITE_POSITIVE),
        ("growth_rate", Interval(1.0)),
    ),
    shared=DadaptAdamShared,
    shared_by=("betas", "d0", "growth_rate"),
    init_shared=dadapt_adam_init_shared,
    reduce=dadapt_adam_reduce,
    totals=2,
    combine=dadapt_adam_combine,
)


@constructor
def dadapt_adam(
    lr: Scalar = 1.0,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    decouple: bool = False,
    use_bias_correction: bool = False,
    d0: Scalar = 1e-6,
    growth_rate: Scalar = math.inf,
    *,
    maximize: bool = False,
) -> Optimizer:
    """D-Adaptation for Adam: Adam that finds its learning rate from its own sum of gradients.

    ``p = p - m / (sqrt(v) + eps)`` with averages ``m`` of ``d * lr * g`` and ``v`` of ``g^2``. All
    parameters share ``d``, a lower bound of the distance to the solution. It grows from ``d0`` on,
    and never shrinks; :meth:`Optimizer.shared` returns it. ``betas``, ``d0`` and ``growth_rate``
    must be the same for all parameters.

    Args:
        lr: factor of the step size, a finite number >= 0: 1, or a schedule. Parameters may have
            different factors. Parameters with factor 0 stay, and do not contribute to ``d``.
        betas: decay of the two averages, each in [0, 1).
        eps: added to the root, > 0.
        weight_decay: coefficient of the decay, >= 0.
        decouple: shrink the parameter by ``1 - d * lr * weight_decay`` (AdamW); else add
            ``weight_decay * p`` to the gradient.
        use_bias_correction: scale a step by Adam's ``sqrt(1 - betas[1]^n) / (1 - betas[0]^n)``.
        d0: first ``d``, > 0.
        growth_rate: largest factor by which ``d`` grows at a step, >= 1.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is three tensors of the parameter's shape
        and dtype, 12 bytes per float32 parameter, and five numbers for all parameters. The sums for
        ``d`` are computed in float64 over all tensors, shards and ranks; a tensor whose sums are
        not finite is left out. In float64 it equals the authors' package, up to the order of sums.

    Example::

        >>> import torch
        >>> optimizer = dadapt_adam(d0=0.01)
        >>> params = torch.ones(2)
        >>> state = optimizer.init(params)
        >>> for _ in range(100):
        ...     params, state = optimizer.update(params, 2 * params, state)  # of sum p^2
        >>> bool(params.abs().max() < 0.01), 1.0 < optimizer.shared(state)["dadapt_adam"].d < 3.0
        (True, True)

    Reference:
        Defazio, Mishchenko, "Learning-rate-free learning by D-adaptation", ICML 2023, algorithm 5.
    """
    return chain(
        maximized(maximize),
        DADAPT_ADAM(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decouple=decouple,
            use_bias_correction=use_bias_correction,
            d0=d0,
            growth_rate=growth_rate,
        ),
    )
