"""Gradient accumulation: one step with the mean of the gradients of k calls.

s_i = s_{i-1} + g_i / k            i = 1 .. k, s_0 = 0
g = s_k at each k-th call; the stages after it run only then
"""

from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.gate import Gate
from functional_optim.core.stage import Link, Transform
from functional_optim.numeric import add, mul


class AccumulateState(NamedTuple):
    accumulated: Tensor  # s, of the parameter's shape and dtype


class AccumulateHyper(NamedTuple):
    every: int  # k


class AccumulateShared(NamedTuple):
    calls: float  # since the last step, from 1; every at the step itself
    every: float  # k


class AccumulateCoefficients(NamedTuple):
    weight: float  # 1 / k
    is_first: bool  # True if this is the first gradient of the leaf since its last step


def accumulate_init_shared(hyper: AccumulateHyper) -> AccumulateShared:
    return AccumulateShared(0.0, float(hyper.every))


def accumulate_combine(
    shared: AccumulateShared, totals: tuple[()], hyper: AccumulateHyper
) -> AccumulateShared:
    calls = shared.calls if shared.calls < shared.every else 0.0
    # A change of k takes effect at the start of a batch.
    every = float(hyper.every) if calls == 0.0 else shared.every
    return AccumulateShared(calls + 1.0, every)


def accumulate_coefficients(
    step: float, hyper: AccumulateHyper, shared: AccumulateShared
) -> AccumulateCoefficients:
    return AccumulateCoefficients(1.0 / shared.every, step == 1.0)


def accumulate_transform(
    grad: Tensor, param: Tensor, state: AccumulateState, c: AccumulateCoefficients
) -> tuple[Tensor, AccumulateState]:
    total = mul(grad, c.weight) if c.is_first else add(state.accumulated, grad, c.weight)
    return total, AccumulateState(total)


def is_full(shared: AccumulateShared) -> bool:
    return shared.calls >= shared.every


ACCUMULATE = Transform(
    name="accumulate",
    hyper=AccumulateHyper,
    state=AccumulateState,
    coefficients=accumulate_coefficients,
    transform=accumulate_transform,
    bounds=(("every", Interval(1)),),
    shared=AccumulateShared,
    shared_by=("every",),
    init_shared=accumulate_init_shared,
    combine=accumulate_combine,
    gate=Gate(is_full, "gradient"),
)


def accumulate(every: int) -> Link:
    """Step at every ``every``-th call, with the mean of the gradients since the last step.

    ``s = s + g / every``. At the ``every``-th call the stages after this one run, with ``s`` as
    the gradient. Step counts, schedules and bias corrections of these stages count such steps only,
    and so does :func:`~functional_optim.on_global_step`. After another gate (such as
    ``apply_if_finite``), calls that the gate stops do not count.

    A missing gradient counts as zero. A leaf whose gradient is missing in all calls of a step does
    not change.

    Args:
        every: number of calls per step, a whole number >= 1. A change takes effect at the next
            batch. It must be the same for all parameters.

    Returns:
        A link for :func:`~functional_optim.chain`. The step is that of the large batch. Bits are
        equal if the large batch adds the same numbers in the same order.

    Raises:
        TypeError, ValueError: not a whole number, or a number below 1.

    Example::

        >>> import torch
        >>> from functional_optim import accumulate, chain, sgd
        >>> optimizer = chain(accumulate(2), sgd(lr=1.0))
        >>> params, state = torch.zeros(1), optimizer.init(torch.zeros(1))
        >>> for gradient in (1.0, 3.0):
        ...     params, state = optimizer.update(params, torch.tensor([gradient]), state)
        ...     print(params.item(), int(state.leaves.step))
        0.0 0
        -2.0 1
    """
    return ACCUMULATE(every=every)
