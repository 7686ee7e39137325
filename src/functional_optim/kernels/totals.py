"""Totals of measured stages: what every gradient adds, summed in the order of the leaves."""

import functools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from functional_optim.core.calling import called
from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.stage import Stage, Transform
from functional_optim.kernels.each import number_of_each


def added(addends: Iterable[Tensor]) -> Tensor:
    """The sum of 0-d tensors, one after the other, on the device of the first."""
    total = None
    for one in addends:
        before = one.new_zeros((), dtype=torch.float64) if total is None else total
        total = before + one.to(before.device)
    return torch.zeros((), dtype=torch.float64, device="cpu") if total is None else total


def total_of(stage: Stage, gradients: list[Tensor], *, on_device: bool = False) -> Tensor:
    """The total of a measured stage over gradients that reach it: a 0-d tensor in float64.

    Args:
        stage: that measures.
        gradients: of all leaves, in their order.
        on_device: whether no number may be read, since the step is perhaps captured.
    """
    assert isinstance(stage, Transform)
    assert stage.measure is not None
    numbers = None
    if len(gradients) > 1 and not on_device:
        numbers = number_of_each(stage.measure, gradients)
    if numbers is None:
        return added(map(stage.measure, gradients))
    total = functools.reduce(operator.add, numbers, 0.0)  # no sum(): it need not go in order
    return torch.tensor(total, dtype=torch.float64, device="cpu")


def hand_on(stages: Sequence[Stage], leaf: Leaf) -> bool:
    """Whether stages give the gradient of a leaf on as it is.

    So they do for every leaf of its shape and dtype that has the same coefficients.
    """
    if any(map(is_measured, stages)):
        return False
    grad = leaf.grad
    for stage, state, coefficients in zip(stages, leaf.states, leaf.coefficients, strict=False):
        _, grad, _ = called(stage, leaf.param, grad, state, coefficients, (), leaf.grad)
        if grad is not leaf.grad:
            return False
    return True
