"""Steps by finite gradients only: a step whose gradients hold an infinity or NaN is left out.

b = the number of elements, over all leaves and ranks, that are not finite
the stages behind run if b = 0
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import foreach_vector_norm
from functional_optim.bounds import Interval
from functional_optim.core.gate import Gate
from functional_optim.core.stage import Link, NoState, Transform


class ApplyIfFiniteHyper(NamedTuple):
    max_skips: int  # in a row


class ApplyIfFiniteShared(NamedTuple):
    not_finite: float  # b, elements of the gradients of the last step
    skipped_in_a_row: float
    skipped: float  # since the beginning


class ApplyIfFiniteCoefficients(NamedTuple):
    pass


def apply_if_finite_init_shared(hyper: ApplyIfFiniteHyper) -> ApplyIfFiniteShared:
    return ApplyIfFiniteShared(0.0, 0.0, 0.0)


def count_not_finite(
    param: Tensor, grad: Tensor, state: NoState, c: ApplyIfFiniteCoefficients
) -> tuple[Tensor]:
    return ((~torch.isfinite(grad)).sum(dtype=torch.float64),)


def count_not_finite_each(
    params: list[Tensor], grads: list[Tensor], state: NoState, c: ApplyIfFiniteCoefficients
) -> tuple[Tensor]:
    """Count by norms: where one is not finite, an element may be too large or not finite."""
    counts = torch.zeros(len(grads), dtype=torch.float64, device="cpu")
    filled = [k for k, one in enumerate(grads) if one.numel()]
    norms = foreach_vector_norm([grads[k] for k in filled]) if filled else []
    numbers = torch.stack(norms).tolist() if norms else []
    for k, number in zip(filled, numbers, strict=True):
        if not math.isfinite(number):
            (counts[k],) = count_not_finite(params[k], grads[k], state, c)
    return (counts,)


def apply_if_finite_combine(
    shared: ApplyIfFiniteShared, totals: tuple[float], hyper: ApplyIfFiniteHyper
) -> ApplyIfFiniteShared:
    (not_finite,) = totals
    if not_finite == 0:
        return ApplyIfFiniteShared(not_finite, 0.0, shared.skipped)
    in_a_row = shared.skipped_in_a_row + 1.0
    if in_a_row > hyper.max_skips:
        raise FloatingPointError(
            f"apply_if_finite: {int(in_a_row)} steps in a row have gradients that are not finite "
            f"({int(not_finite)} elements in this one), and max_skips={hyper.max_skips} may be "
            "left out; nothing was changed: find out why, or allow more"
        )
    return ApplyIfFiniteShared(not_finite, in_a_row, shared.skipped + 1.0)


def apply_if_finite_coefficients(
    step: float, hyper: ApplyIfFiniteHyper, shared: ApplyIfFiniteShared
) -> ApplyIfFiniteCoefficients:
    return ApplyIfFiniteCoefficients()


def apply_if_finite_transform(
    grad: Tensor, param: Tensor, state: NoState, c: ApplyIfFiniteCoefficients
) -> tuple[Tensor, NoState]:
    return grad, state


def is_finite(shared: ApplyIfFiniteShared) -> bool:
    return shared.not_finite == 0


APPLY_IF_FINITE = Transform(
    name="apply_if_finite",
    hyper=ApplyIfFiniteHyper,
    coefficients=apply_if_finite_coefficients,
    transform=apply_if_finite_transform,
    bounds=(("max_skips", Interval(0)),),
    shared=ApplyIfFiniteShared,
    shared_by=("max_skips",),
    init_shared=apply_if_finite_init_shared,
    reduce=count_not_finite,
    reduce_each=count_not_finite_each,
    totals=1,
    combine=apply_if_finite_combine,
    gate=Gate(is_finite),
)


def apply_if_finite(max_skips: int) -> Link:
    """Leave out steps whose gradients hold infinities or NaN, but not more than some in a row.

    All leaves are stepped, or none: what stands behind this link does not run, nor counts the step.
    How many steps were left out, :meth:`Optimizer.shared` says.

    In front of :func:`accumulate` it leaves out single micro-batches: the mean is then of more
    calls. Behind it, it leaves out a whole step whose mean is not finite.

    Args:
        max_skips: how many steps in a row may be left out, a whole number >= 0, the same for all
            parameters; of the next one an error is made, with nothing changed.

    Returns:
        A link for :func:`~functional_optim.chain`. Each step reads one number on the host.

    Raises:
        TypeError, ValueError: no whole number, or a negative one. From a step:
            FloatingPointError, where one more step would have to be left out.

    Example::

        >>> import torch
        >>> from functional_optim import apply_if_finite, chain, sgd
        >>> optimizer = chain(apply_if_finite(3), sgd(lr=1.0))
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for gradient in (1.0, float("nan")):
        ...     params, state = optimizer.update(params, torch.tensor([gradient]), state)
        >>> params.item(), int(state.leaves.step)
        (-1.0, 1)
        >>> optimizer.shared(state)["apply_if_finite"].skipped
        1.0
    """
    return APPLY_IF_FINITE(max_skips=max_skips)
