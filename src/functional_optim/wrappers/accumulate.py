"""Accumulation: k gradients of small batches, and then a step by their mean.

s_i = s_{i-1} + g_i / k            i = 1 .. k, s_0 = 0
g = s_k at each k-th call; the stages behind run only then
"""

from typing import NamedTuple

import torch
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
    is_first: bool  # whether this is the leaf's first gradient since its last step


def accumulate_init(param: Tensor, hyper: AccumulateHyper) -> AccumulateState:
    return AccumulateState(torch.zeros_like(param))


def accumulate_init_shared(hyper: AccumulateHyper) -> AccumulateShared:
    return AccumulateShared(0.0, float(hyper.every))


def accumulate_combine(
    shared: AccumulateShared, totals: tuple[()], hyper: AccumulateHyper
) -> AccumulateShared:
    calls = shared.calls if shared.calls < shared.every else 0.0
    # A batch that is begun is finished as it was begun.
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
    init=accumulate_init,
    state_depends_on=(),
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
    """Let every ``every``-th call step, by the mean of the gradients since the last step.

    ``s = s + g / every``; at the ``every``-th call the stages behind this one run, with ``s`` in
    place of the gradient. Their step counts, schedules and bias corrections know of these steps
    only; :func:`~functional_optim.on_global_step` counts these steps too. Behind another gate (such
    as ``apply_if_finite``) a call that does not come through is no part of the mean.

    A leaf without a gradient in some of the calls adds nothing in them; without one in all of them,
    it is left alone.

    Args:
        every: how many calls make a step, a whole number >= 1. Changed in mid-batch, it holds from
            the next batch on. It must be the same for all parameters.

    Returns:
        A link for :func:`~functional_optim.chain`. The step is that of the large batch, bit for bit
        where that adds the same numbers in the same order.

    Raises:
        TypeError, ValueError: no whole number, or one below 1.

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
