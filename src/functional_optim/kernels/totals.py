"""Totals of measured stages: what every gradient adds, summed in the order of the leaves."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.calling import called
from functional_optim.core.leaf import Leaf, is_measured
from functional_optim.core.stage import Stage, Transform
from functional_optim.kernels.each import sum_over_each, tensor_of_each


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
        if not gradients[0].is_cpu:
            total_there = sum_over_each(stage.measure, gradients)
            return added(map(stage.measure, gradients)) if total_there is None else total_there
        numbers = tensor_of_each(stage.measure, gradients)
    if numbers is None:
        return added(map(stage.measure, gradients))
    # No sum(): it need not go in order.
    total = functools.reduce(operator.add, numbers.tolist(), 0.0)
    return torch.tensor(total, dtype=torch.float64, device="cpu")


class HandedOn:
    """Whether stages give on what they get of leaves, as it is.

    They do for every leaf of a shape and dtype that has the same coefficients, and are asked again
    only for others.

    Args:
        stages: before the one that is asked for.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.asked: list[tuple[Any, ...]] | None = [()] if not stages else None
        """For which coefficients of these stages, of every kind of leaves."""
        self.gradients = self.params = not stages
        """Whether they do so with gradients, and with parameters."""

    def look(self, now: list[tuple[Any, ...]], leaves: Iterable[Leaf]) -> None:
        """Find it out.

        Args:
            now: what :attr:`asked` is to be.
            leaves: one of each kind.
        """
        self.asked = now
        self.gradients = self.params = not any(map(is_measured, self._stages))
        for leaf in leaves if self.gradients else ():
            self._through(leaf)

    def _through(self, leaf: Leaf) -> None:
        param, grad = leaf.param, leaf.grad
        numbers = zip(self._stages, leaf.states, leaf.coefficients, strict=False)
        for stage, state, coefficients in numbers:
            param, grad, _ = called(stage, param, grad, state, coefficients, (), leaf.grad)
        self.gradients = self.gradients and grad is leaf.grad
        self.params = self.params and param is leaf.param
