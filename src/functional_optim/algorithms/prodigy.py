"""Prodigy: Mishchenko & Defazio 2024, algorithm 4 (Prodigy for Adam), as its authors run it.

It finds the step size itself. With n the number of the step, g the gradients at p_{t-1}, sums over
all elements of all tensors, and everything else as in Adam:

    l_t = d_{t-1} * lr                       (* sqrt(1 - b2^n) / (1 - b1^n), if corrected)
    r_t = b3 * r_{t-1} + d_{t-1} / d_0 * l_t * sum g * (p_0 - p_{t-1})
    s_t = b3 * s_{t-1} + d_{t-1} / d_0 * l_t * g
    m_t = b1 * m_{t-1} + (1 - b1) * d_{t-1} * g
    v_t = b2 * v_{t-1} + (1 - b2) * d_{t-1}^2 * g^2
    e_t = k * r_t / sum |s_t|,  d_t = the largest e so far, and at most growth_rate * d_{t-1}
    p_t = (1 - l_t * weight_decay) * p_{t-1} - l_t * m_t / (sqrt(v_t) + d_t * eps)

Without m (b1 = 0), d_t * g replaces m.
"""

import functools
import math
import operator
from dataclasses import replace
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_abs, foreach_add, foreach_mul, foreach_sub
from functional_optim.algorithms.dadapt_adam import bias_correction, limit_growth
from functional_optim.algorithms.prodigy_records import (
    ProdigyCoefficients,
    ProdigyHyper,
    ProdigyShared,
    ProdigyState,
)
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import (
    BELOW_ONE,
    FINITE_NON_NEGATIVE,
    FINITE_POSITIVE,
    NON_NEGATIVE,
    UNIT,
    Interval,
)
from functional_optim.core.block_sums import SUM_BLOCK
from functional_optim.core.dtensors import full_tensor
from functional_optim.numeric import (
    add,
    addcdiv,
    addcmul,
    choose,
    choose_record,
    is_active,
    larger,
    may_hold,
    mul,
    shift,
)
from functional_optim.schedules.arithmetic import root_at


def prodigy_init(param: Tensor, hyper: ProdigyHyper) -> ProdigyState:
    start = param if hyper.slice_p == 1 else full_tensor(param).reshape(-1)[:: hyper.slice_p]
    return ProdigyState(
        torch.zeros_like(start),
        torch.clone(start),
        [torch.zeros_like(param)] if is_active(hyper.betas[0]) else [],
        torch.zeros_like(param),
    )


def prodigy_init_shared(hyper: ProdigyHyper) -> ProdigyShared:
    return ProdigyShared(hyper.d0, hyper.d0, 0.0, 0.0, hyper.d0, 0.0, hyper.d0)


def prodigy_coefficients(
    step: float, hyper: ProdigyHyper, shared: ProdigyShared
) -> ProdigyCoefficients:
    beta_1, beta_2 = hyper.betas
    decay, d0, d, d_next = hyper.weight_decay, hyper.d0, shared.d_used, shared.d
    is_still = shared.d_denom == 0.0
    length, length_next = d * hyper.lr, d_next * hyper.lr
    if hyper.use_bias_correction:
        number = choose(is_still, shared.k + 1.0, shared.k)
        length = length * bias_correction(hyper.betas, number)
        length_next = length_next * bias_correction(hyper.betas, shared.k + 1.0)
    moved = choose(is_still, 0.0, length)
    averages, has_decay = is_active(beta_1), is_active(decay)
    return ProdigyCoefficients(
        next_addend=(d_next / d0) * length_next,
        next_weight=(d_next / d0) * (d_next if hyper.safeguard_warmup else length_next),
        weight=(d / d0) * (d if hyper.safeguard_warmup else length),
        beta_1=beta_1,
        weight_1=d * (1 - beta_1),
        beta_2=beta_2,
        weight_2=d * d * (1 - beta_2),
        beta_3=hyper.beta3,
        eps=d_next * hyper.eps,
        step_size=-moved if averages else -moved * d_next,
        added_decay=decay,
        decay=-decay * moved,
        slice_p=hyper.slice_p,
        slices=hyper.slice_p > 1,
        averages=averages,
        adds_decay=has_decay and not hyper.decouple,
        decays=has_decay and hyper.decouple,
        is_active=is_active(hyper.lr),
        moves=is_still is False or may_hold(shared.d_denom != 0.0),
    )


def add_decay(grad: Tensor, param: Tensor, c: ProdigyCoefficients) -> Tensor:
    """Return the gradient plus the weight decay, if the decay is not decoupled."""
    return add(grad, param, c.added_decay) if c.adds_decay else grad


def slice_elements(x: Tensor, c: ProdigyCoefficients) -> Tensor:
    """Return the elements that r and s are computed from."""
    return full_tensor(x).reshape(-1)[:: c.slice_p] if c.slices else x


def prodigy_reduce(
    param: Tensor, grad: Tensor, state: ProdigyState, c: ProdigyCoefficients
) -> tuple[Tensor, Tensor]:
    """Return the terms of a tensor in the change of r, and in sum |s|.

    Products are in float32 at least, and sums in double precision. The authors' package computes
    both in the dtype of the parameter. A tensor whose terms are not finite is left out.
    """
    slope = slice_elements(add_decay(grad, param, c), c)
    every = slice_elements(param, c), slope, state.p0, state.s
    blocks: Any = [tuple([full_tensor(one).reshape(-1) for one in every])]
    if state.s.numel() > SUM_BLOCK:
        blocks = zip(*(one.split(SUM_BLOCK) for one in blocks[0]), strict=True)
    wide, double = torch.promote_types(grad.dtype, torch.float32), torch.float64
    products, sizes = [], []
    for p, g, p0, s in blocks:
        way, slope = p0.to(wide) - p.to(wide), g.to(wide)
        inner = torch.dot(slope, way) if wide == double else (slope * way).sum(dtype=double)
        products.append(inner)
        sizes.append(add(mul(s, c.beta_3), g, c.next_weight).abs().sum(dtype=double))
    product, size = functools.reduce(operator.add, products), functools.reduce(operator.add, sizes)
    addend = c.next_addend * product
    counts = torch.isfinite(addend + size) & c.is_active
    return torch.where(counts, addend, 0.0), torch.where(counts, size, 0.0)


def prodigy_reduce_each(
    params: list[Tensor], grads: list[Tensor], state: Any, c: ProdigyCoefficients
) -> tuple[Tensor, Tensor] | None:
    """Return the terms of many small tensors; None if a tensor needs sums over blocks."""
    s, p0 = state.s, state.p0
    if max(map(Tensor.numel, s)) > SUM_BLOCK:
        return None
    wide, double = torch.promote_types(grads[0].dtype, torch.float32), torch.float64
    slopes = foreach_add(grads, params, alpha=c.added_decay) if c.adds_decay else grads
    if c.slices:
        params, slopes = ([slice_elements(one, c) for one in every] for every in (params, slopes))
    widened, summed = methodcaller("to", wide), methodcaller("sum", dtype=double)
    ways = foreach_sub(list(map(widened, p0)), list(map(widened, params)))
    if wide == double:
        pairs = zip(slopes, ways, strict=True)
        products = [torch.dot(slope.reshape(-1), way.reshape(-1)) for slope, way in pairs]
    else:
        products = list(map(summed, foreach_mul(list(map(widened, slopes)), ways)))
    sums = foreach_abs(foreach_add(foreach_mul(s, c.beta_3), slopes, alpha=c.next_weight))
    sizes = torch.stack(list(map(summed, sums)))
    addends = c.next_addend * torch.stack(products)
    counts = torch.isfinite(addends + sizes) & c.is_active
    return torch.where(counts, addends, 0.0), torch.where(counts, sizes, 0.0)


def prodigy_combine(
    shared: ProdigyShared, totals: tuple[float, float], hyper: ProdigyHyper
) -> ProdigyShared:
    gain, size = totals
    is_still = size == 0.0
    numerator = hyper.beta3 * shared.d_numerator + gain
    d_hat = hyper.d_coef * numerator / choose(is_still, 1.0, size)
    d = choose(shared.d == hyper.d0, larger(shared.d, d_hat), shared.d)
    d_max = larger(shared.d_max, d_hat)
    d = limit_growth(d_max, d, hyper.growth_rate)
    require_bounded(d, hyper.d0)
    moved = ProdigyShared(d, d_max, numerator, size, d_hat, shared.k + 1.0, shared.d)
    d, d_max, numerator, _, d_hat, k, _ = shared
    return choose_record(is_still, ProdigyShared(d, d_max, numerator, size, d_hat, k, d), moved)


def require_bounded(d: Any, d0: Any) -> None:
    """Raise FloatingPointError if the weights of gradients overflow float32."""
    if isinstance(d, float) and max(d, 1.0) * d / d0 > _LARGEST:
        raise FloatingPointError(
            f"prodigy: the distance d has grown to {d:.3g} from d0={d0:.3g}: the weights of "
            "gradients overflow float32. The distance grows without end if gradients never change "
            "direction, for example with a loss without a minimum, or with equal gradients at each "
            "step. Limit the growth by growth_rate (such as 1.02), or decay the parameters"
        )


def prodigy_rule(
    param: Tensor, grad: Tensor, state: ProdigyState, c: ProdigyCoefficients
) -> tuple[Tensor, ProdigyState]:
    if not c.is_active:
        return param, state
    grad = add_decay(grad, param, c)
    exp_avg = state.exp_avg
    direction = grad
    if c.averages:
        direction = add(mul(exp_avg[0], c.beta_1), grad, c.weight_1)
        exp_avg = [direction]
    exp_avg_sq = addcmul(mul(state.exp_avg_sq, c.beta_2), grad, grad, c.weight_2)
    s = add(mul(state.s, c.beta_3), slice_elements(grad, c), c.weight)
    after = ProdigyState(s, state.p0, exp_avg, exp_avg_sq)
    if not c.moves:
        return param, after
    denominator = shift(exp_avg_sq.sqrt(), c.eps)
    if c.decays:
        param = add(param, param, c.decay)
    return addcdiv(param, direction, denominator, c.step_size), after


_SLICES = "prodigy: slice_p must be {}, got {}: build prodigy(slice_p=...) anew, of another state"


def prodigy_check(hyper: ProdigyHyper) -> None:
    if hyper.slice_p != 1:
        raise ValueError(_SLICES.format("1 in a chain that was made with 1", hyper.slice_p))


def prodigy_sliced_check(hyper: ProdigyHyper) -> None:
    if hyper.slice_p == 1:
        raise ValueError(_SLICES.format("more than 1 in a chain that was made with more", 1))


_LARGEST = torch.finfo(torch.float32).max
PRODIGY = Rule(
    name="prodigy",
    hyper=ProdigyHyper,
    state=ProdigyState,
    init=prodigy_init,
    state_depends_on=("betas", "slice_p"),
    coefficients=prodigy_coefficients,
    rule=prodigy_rule,
    bounds=(
        ("lr", FINITE_NON_NEGATIVE),
        ("betas", BELOW_ONE),
        ("beta3", UNIT),
        ("eps", FINITE_POSITIVE),
        ("weight_decay", NON_NEGATIVE),
        ("d0", FINITE_POSITIVE),
        ("d_coef", FINITE_POSITIVE),
        ("growth_rate", Interval(1.0)),
        ("slice_p", Interval(1)),
    ),
    check=prodigy_check,
    shared=ProdigyShared,
    shared_by=("beta3", "d0", "d_coef", "growth_rate"),
    init_shared=prodigy_init_shared,
    reduce=prodigy_reduce,
    reduce_each=prodigy_reduce_each,
    totals=2,
    combine=prodigy_combine,
)

PRODIGY_SLICED = replace(
    PRODIGY,
    name="prodigy_sliced",
    check=prodigy_sliced_check,
    kind="per_matrix",
    takes_dtensors=True,
)
"""A second rule, which needs whole tensors: it selects elements by their position."""


@constructor
def prodigy(
    lr: Scalar = 1.0,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    beta3: Scalar | None = None,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    decouple: bool = True,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
    d0: Scalar = 1e-6,
    d_coef: Scalar = 1.0,
    growth_rate: Scalar = math.inf,
    slice_p: int = 1,
    *,
    maximize: bool = False,
) -> Optimizer:
    """Prodigy: Adam that finds its learning rate from the distance that parameters have moved.

    ``p = p - d * lr * m / (sqrt(v) + d * eps)`` with averages ``m, v`` of ``d * g`` and its square.
    All parameters share ``d``, a lower bound of the distance to the solution. It grows from ``d0``
    on, and never shrinks; :meth:`Optimizer.shared` returns it. ``beta3``, ``d0``, ``d_coef`` and
    ``growth_rate`` must be the same for all parameters.

    Args:
        lr: factor of the step size, a finite number >= 0: 1, or a schedule; the same for all.
        betas: decay of the two averages, each in [0, 1). With ``betas[0]=0`` there is no ``m``.
        beta3: decay of the sums for ``d``, in [0, 1]; by default the root of ``betas[1]``.
        eps: added to the root, > 0.
        weight_decay: coefficient of the decay, >= 0.
        decouple: shrink the parameter by ``1 - d * lr * weight_decay`` (AdamW); else add
            ``weight_decay * p`` to the gradient.
        use_bias_correction: scale a step by Adam's ``sqrt(1 - betas[1]^n) / (1 - betas[0]^n)``.
        safeguard_warmup: leave ``lr`` out of the estimate's denominator, for schedules of warm-up.
        d0: the first ``d``, > 0.
        d_coef: factor of the estimate, > 0. If you tune anything, tune this.
        growth_rate: largest factor by which ``d`` grows at a step, >= 1.
        slice_p: estimate from every ``slice_p``-th element of each tensor, a whole number >= 1, to
            save memory. Above 1 the rule needs whole tensors.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. In float64 it is bit for bit the authors' package.
        For other dtypes, sums over tensors are in float64 here, and in the dtype of the parameter
        there. A tensor whose sums are not finite is left out of the estimate.

    Raises:
        TypeError, ValueError: a value outside the bounds above.
        FloatingPointError: in a step, if ``d`` has become too large. The step changes nothing.

    Example::

        >>> import torch
        >>> optimizer = prodigy(d0=0.01)
        >>> params = torch.ones(2)
        >>> state = optimizer.init(params)
        >>> for _ in range(100):
        ...     params, state = optimizer.update(params, 2 * params, state)  # of sum p^2
        >>> bool(params.abs().max() < 0.1), 0.1 < optimizer.shared(state)["prodigy"].d < 1.0
        (True, True)

    Reference:
        Mishchenko, Defazio, "Prodigy: an expeditiously adaptive parameter-free learner", ICML 2024.
    """
    stage = PRODIGY if slice_p == 1 else PRODIGY_SLICED
    return chain(
        maximized(maximize),
        stage(
            lr=lr,
            betas=betas,
            beta3=_default_beta3(betas) if beta3 is None else beta3,
            eps=eps,
            weight_decay=weight_decay,
            decouple=decouple,
            use_bias_correction=use_bias_correction,
            safeguard_warmup=safeguard_warmup,
            d0=d0,
            d_coef=d_coef,
            growth_rate=growth_rate,
            slice_p=slice_p,
        ),
    )


def _default_beta3(betas: Any) -> Scalar:
    """Return the root of ``betas[1]``; 0 for invalid betas, which the rule refuses later."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return 0.0
    beta_2 = betas[1]
    if isinstance(beta_2, Tensor):
        return beta_2**0.5
    if callable(beta_2):
        return functools.partial(root_at, beta_2)
    return math.sqrt(beta_2) if isinstance(beta_2, (int, float)) and beta_2 > 0 else 0.0
