"""Steps with finite gradients only: a step with an infinity or NaN in a gradient is skipped.

b = the number of elements, over all leaves and ranks, that are not finite
the stages after it run if b = 0
"""

import math
from itertools import compress, count
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_vector_norm
from functional_optim.bounds import Interval
from functional_optim.core.gate import Gate
from functional_optim.core.stage import Link, NoState, Transform
from functional_optim.native import LOOPS, SHARED, native_norms


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
    """Count elements only in tensors whose norm is not finite. A norm may also overflow."""
    counts = torch.zeros(len(grads), dtype=torch.float64, device="cpu")
    filled = list(compress(count(), map(Tensor.numel, grads)))
    numbers = _norms(list(map(grads.__getitem__, filled)))
    for k, number in zip(filled, numbers, strict=True):
        if not math.isfinite(number):
            (counts[k],) = count_not_finite(params[k], grads[k], state, c)
    return (counts,)


def _norms(grads: list[Tensor]) -> list[float]:
    """Return the norm of each gradient. None may be empty, and all are on one device."""
    small = list(map(SHARED.__gt__, map(Tensor.numel, grads)))
    use_native = LOOPS.loaded is not None and bool(grads) and grads[0].is_cpu
    found = native_norms(list(compress(grads, small))) if use_native else None
    if found is not None and len(found) == len(grads):
        return found
    left = grads if found is None else list(compress(grads, map(not_, small)))
    others: list[float] = torch.stack(foreach_vector_norm(left)).tolist() if left else []
    if found is None:
        return others
    by_native, by_torch = iter(found), iter(others)
    return [next(by_native if is_small else by_torch) for is_small in small]


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
    """Skip steps with an infinity or NaN in a gradient, up to a number of steps in a row.

    Either all leaves are stepped, or none. In a skipped step the stages after this link do not run,
    and do not count the step. :meth:`Optimizer.shared` returns the number of skipped steps.

    Before :func:`accumulate` it skips single micro-batches, and the mean is over more calls. After
    :func:`accumulate`, it skips a whole step if the mean is not finite.

    Args:
        max_skips: largest number of skipped steps in a row, a whole number >= 0, the same for all
            parameters. One more step raises an error, and changes nothing.

    Returns:
        A link for :func:`~functional_optim.chain`. Each step reads one number on the host.

    Raises:
        TypeError, ValueError: not a whole number, or a negative number.
        FloatingPointError: in a step, after ``max_skips`` skipped steps in a row.

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
