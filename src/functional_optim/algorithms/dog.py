"""DoG and L-DoG: Ivgi, Hinder & Carmon 2023, the formula (DoG) and its layer-wise form.

Distance over gradients. Norms are over all elements of all tensors for DoG, and over each tensor
for L-DoG (layer-wise). p_0 are the parameters at ``init``:

    r_t = max(r_{t-1}, ||p_{t-1} - p_0||)               (r_0 = reps_rel * (1 + ||p_0||))
    G_t = G_{t-1} + ||g_t||^2                           (G_0 = 0)
    p_t = p_{t-1} - lr * r_t / sqrt(G_t + eps) * g_t

Defaults are the paper's, and those of its authors' program.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.soap import widen
from functional_optim.authoring import Optimizer, Rule, Scalar, chain, constructor, maximized
from functional_optim.bounds import FINITE_NON_NEGATIVE, FINITE_POSITIVE, NON_NEGATIVE
from functional_optim.core.block_sums import finite_or_zero, sum_in_blocks
from functional_optim.numeric import add, choose, fill_like, larger, may_hold, mul, select, shift
from functional_optim.transforms.scale_by_trust_ratio import norm_of
from functional_optim.transforms.weight_decay import weight_decay as coupled_weight_decay


class DogState(NamedTuple):
    p0: Tensor  # the first parameter, of its shape and dtype


class DogHyper(NamedTuple):
    lr: float  # factor of the step size
    reps_rel: float  # first distance, relative to 1 + ||p_0||
    eps: float


class DogShared(NamedTuple):
    k: float  # number of steps
    max_distance: float  # r
    grad_sum: float  # G


class DogCoefficients(NamedTuple):
    step_size: float  # -lr * r / sqrt(G + eps)
    is_first: bool  # True if no step has been made


def dog_init(param: Tensor, hyper: DogHyper) -> DogState:
    return DogState(torch.clone(param))


def dog_init_shared(hyper: DogHyper) -> DogShared:
    return DogShared(0.0, 0.0, 0.0)


def dog_coefficients(step: float, hyper: DogHyper, shared: DogShared) -> DogCoefficients:
    total = shared.grad_sum + hyper.eps
    root = choose(total == 0.0, 1.0, total) ** 0.5
    return DogCoefficients(
        -hyper.lr * shared.max_distance / root, is_first=may_hold(shared.k == 0.0)
    )


def squared_norms(param: Tensor, p0: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norms of ``p - p_0`` and of the gradient, over a block."""
    way = param - p0
    return way.square().sum(dtype=torch.float64), grad.square().sum(dtype=torch.float64)


def squared_norm(x: Tensor) -> tuple[Tensor]:
    return (x.square().sum(dtype=torch.float64),)


def dog_reduce(
    param: Tensor, grad: Tensor, state: DogState, c: DogCoefficients
) -> tuple[Tensor, ...]:
    """Return the squared norms of ``p - p_0``, of the gradient and, at first, of ``p_0``."""
    way, slope = sum_in_blocks(squared_norms, (param, state.p0, grad))
    start = sum_in_blocks(squared_norm, (state.p0,))[0] if c.is_first else torch.zeros_like(way)
    return finite_or_zero((way, slope, start))


def dog_combine(
    shared: DogShared, totals: tuple[float, float, float], hyper: DogHyper
) -> DogShared:
    way, slope, start = totals
    least = choose(shared.k == 0.0, hyper.reps_rel * (1.0 + start**0.5), shared.max_distance)
    return DogShared(shared.k + 1.0, larger(least, way**0.5), shared.grad_sum + slope)


def dog_rule(
    param: Tensor, grad: Tensor, state: DogState, c: DogCoefficients
) -> tuple[Tensor, DogState]:
    return add(param, grad, c.step_size), state


_BOUNDS = (("lr", FINITE_NON_NEGATIVE), ("reps_rel", FINITE_POSITIVE), ("eps", NON_NEGATIVE))

DOG = Rule(
    name="dog",
    hyper=DogHyper,
    state=DogState,
    init=dog_init,
    state_depends_on=(),
    coefficients=dog_coefficients,
    rule=dog_rule,
    bounds=_BOUNDS,
    shared=DogShared,
    shared_by=("reps_rel",),
    init_shared=dog_init_shared,
    reduce=dog_reduce,
    totals=3,
    combine=dog_combine,
)


class LdogState(NamedTuple):
    p0: Tensor  # the first parameter, of its shape and dtype
    # Both 0-d, in the parameter's dtype, or in float32 if that has 16 bits:
    max_distance: Tensor  # r
    grad_sum: Tensor  # G


def ldog_init(param: Tensor, hyper: DogHyper) -> LdogState:
    zero = widen(param.new_zeros(()))
    first = fill_like(zero, hyper.reps_rel) * shift(norm_of(param), 1.0).to(zero.dtype)
    return LdogState(torch.clone(param), first, zero)


def ldog_rule(
    param: Tensor, grad: Tensor, state: LdogState, c: DogHyper
) -> tuple[Tensor, LdogState]:
    dtype = state.grad_sum.dtype
    way = norm_of(widen(param) - widen(state.p0)).to(dtype)
    distance = torch.maximum(state.max_distance, way)
    total = state.grad_sum + norm_of(grad).square().to(dtype)
    shifted = shift(total, c.eps)
    root = select(shifted, shifted == 0.0, 1.0).sqrt()
    size = mul(distance / root, c.lr).to(grad.dtype)
    return param - grad * size, LdogState(state.p0, distance, total)


LDOG = Rule(
    name="ldog",
    hyper=DogHyper,
    state=LdogState,
    init=ldog_init,
    state_depends_on=(),
    rule=ldog_rule,
    bounds=_BOUNDS,
    kind="per_matrix",
)


@constructor
def dog(
    lr: Scalar = 1.0,
    reps_rel: Scalar = 1e-6,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """DoG: SGD that finds its learning rate, as distance over gradients.

    ``p = p - lr * r / sqrt(G + eps) * g``, where ``r`` is the largest distance so far of all
    parameters from their start, and ``G`` the sum of all squared gradients. Except for ``eps``, a
    constant factor of all gradients changes no step.

    The step size does not decay, so the authors evaluate an average of the parameters:
    ``chain(dog(), ema(0.999))``. A tensor without a gradient does not count in the norms of that
    step. :meth:`Optimizer.shared` returns ``r`` and ``G``.

    Args:
        lr: factor of the step size, a finite number >= 0: 1, or a schedule.
        reps_rel: first distance, relative to 1 plus the norm of the first parameters, > 0; the
            authors suggest 1e-4 for models with batch normalisation. It must be the same for all
            parameters.
        eps: added to the sum of squared gradients, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is the first parameter, 4 bytes per
        float32 parameter, and three numbers for all parameters. Norms are computed in float64 over
        all tensors, shards and ranks. A tensor whose norms are not finite is left out. torch has no
        DoG.

    Example::

        >>> import torch
        >>> optimizer = dog()
        >>> params = torch.ones(2)
        >>> state = optimizer.init(params)
        >>> for _ in range(200):
        ...     params, state = optimizer.update(params, 2 * params, state)  # of sum p^2
        >>> bool(params.abs().max() < 0.1), 1.0 < optimizer.shared(state)["dog"].max_distance < 2.0
        (True, True)

    Reference:
        Ivgi, Hinder, Carmon, "DoG is SGD's best friend: a parameter-free dynamic step size
        schedule", ICML 2023.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        DOG(lr=lr, reps_rel=reps_rel, eps=eps),
    )


@constructor
def ldog(
    lr: Scalar = 1.0,
    reps_rel: Scalar = 1e-6,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> Optimizer:
    """L-DoG: DoG with a step size per tensor, from the distance and the gradients of the tensor.

    ``p = p - lr * r / sqrt(G + eps) * g``, where ``r`` is the largest distance so far of a tensor
    from its start, and ``G`` the sum of its squared gradients.

    Args:
        lr: factor of the step size, a finite number >= 0: 1, or a schedule.
        reps_rel: first distance, relative to 1 plus the norm of the first parameter, > 0.
        eps: added to the sum of squared gradients, >= 0.
        weight_decay: coefficient of ``p`` added to the gradient, >= 0.
        maximize: ascend instead of descend.

    Returns:
        An :class:`~functional_optim.Optimizer`. Its state is the first parameter, and two numbers
        for each tensor: 4 bytes per float32 parameter. It needs whole tensors
        (``kind="per_matrix"``). torch has no L-DoG.

    Example::

        >>> import torch
        >>> optimizer = ldog(reps_rel=0.1, eps=0.0)
        >>> params, state = optimizer.update(
        ...     torch.zeros(2), torch.tensor([3.0, -4.0]), optimizer.init(torch.zeros(2)))
        >>> params
        tensor([-0.0600,  0.0800])

    Reference:
        Ivgi, Hinder, Carmon, "DoG is SGD's best friend: a parameter-free dynamic step size
        schedule", ICML 2023.
    """
    return chain(
        maximized(maximize),
        coupled_weight_decay(weight_decay),
        LDOG(lr=lr, reps_rel=reps_rel, eps=eps),
    )
