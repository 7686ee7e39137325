"""Sharpness-aware minimisation: Foret, Kleiner, Mobahi & Neyshabur 2021, algorithm 1.

Two calls make a step. The first call moves p up along the gradient g at p. The second call gets the
gradient at the new point, moves p back, and the stages after it step p with this gradient:

    n = sqrt(sum over all tensors of sum g^2)
    1:  o = p,  p = p + rho * g / (n + 1e-12)
    2:  p = o
"""

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.bounds import NON_NEGATIVE
from functional_optim.core.gate import Gate
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import mul
from functional_optim.transforms.clip_by_global_norm import squares_of_each, sum_of_squares


class SamState(NamedTuple):
    origin: Tensor  # o, of the parameter's shape and dtype


class SamHyper(NamedTuple):
    rho: float


class SamShared(NamedTuple):
    call: float  # 1 or 2, of the last call; 0 before the first
    norm: float  # n, of the gradients of the last first call


class SamCoefficients(NamedTuple):
    scale: float  # rho / (n + 1e-12)
    goes_up: bool
    goes_back: bool  # True if the leaf went up in the first call


def sam_init(param: Tensor, hyper: SamHyper) -> SamState:
    return SamState(torch.clone(param))


def sam_init_shared(hyper: SamHyper) -> SamShared:
    return SamShared(0.0, 0.0)


def sam_reduce(param: Tensor, grad: Tensor, state: SamState, c: SamCoefficients) -> tuple[Tensor]:
    return (sum_of_squares(grad),)


def sam_reduce_each(
    params: list[Tensor], grads: list[Tensor], state: SamState, c: SamCoefficients
) -> tuple[Tensor]:
    return (squares_of_each(grads),)


def sam_combine(shared: SamShared, totals: tuple[float], hyper: SamHyper) -> SamShared:
    if shared.call == 1.0:
        return SamShared(2.0, shared.norm)
    (total,) = totals
    return SamShared(1.0, total**0.5)


def sam_coefficients(step: float, hyper: SamHyper, shared: SamShared) -> SamCoefficients:
    is_second = shared.call == 2.0
    went_up = is_second and step == 2.0
    return SamCoefficients(hyper.rho / (shared.norm + 1e-12), not is_second, went_up)


def sam_rule(
    param: Tensor, grad: Tensor, state: SamState, c: SamCoefficients
) -> tuple[Tensor, SamState]:
    if c.goes_up:
        # In two operations: float16 has no number above 65504, and torch refuses such an alpha.
        return param + mul(grad, c.scale), SamState(param)
    return (state.origin if c.goes_back else param), state


def is_back(shared: SamShared) -> bool:
    return shared.call == 2.0


SAM = Rule(
    name="sam",
    hyper=SamHyper,
    state=SamState,
    init=sam_init,
    state_depends_on=(),
    coefficients=sam_coefficients,
    rule=sam_rule,
    bounds=(("rho", NON_NEGATIVE),),
    shared=SamShared,
    shared_by=(),
    init_shared=sam_init_shared,
    reduce=sam_reduce,
    reduce_each=sam_reduce_each,
    totals=1,
    combine=sam_combine,
    gate=Gate(is_back, "parameter"),
)


def sam(rho: Scalar = 0.05) -> Link:
    """Step with the gradients at the worst point nearby. Each step takes two calls.

    The first call moves the parameters up along their gradients, by the distance ``rho``. Compute
    gradients there, and pass them to the second call, which moves the parameters back and runs the
    stages after this link. A leaf without a gradient in the first call does not move up. A leaf
    without a gradient in the second call moves back, and its gradient is missing for the stages
    after this link: a rule does not step it, and :func:`accumulate` counts zero.

    Args:
        rho: the distance, a number >= 0, or a schedule. The schedule counts calls, which are two
            per step.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it before a rule.

    Raises:
        ValueError: a negative number, or NaN.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sam, sgd
        >>> optimizer = chain(sam(rho=0.5), sgd(lr=1.0))
        >>> params, state = torch.ones(1), optimizer.init(torch.ones(1))
        >>> for _ in range(2):
        ...     params, state = optimizer.update(params, params * 2, state)  # of p^2
        ...     print(params.item())
        1.5
        -2.0

    Reference:
        Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-aware minimization for efficiently improving
        generalization", ICLR 2021, algorithm 1 and equation 2.
    """
    return SAM(rho=rho)
