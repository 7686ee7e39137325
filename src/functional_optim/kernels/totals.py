"""Totals of measured stages: what every gradient adds, summed in the order of the leaves."""

import functools
import operator
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor
from functional_optim.core.calling import called
from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import PLAIN, Leaf, is_measured
from functional_optim.core.stage import Stage, Transform
from functional_optim.kernels.chunks import why_not_pointwise
from functional_optim.kernels.pieces import sample_of
from functional_optim.kernels.plain_leaves import is_followed

_DEVICE, _LAYOUT = attrgetter("device"), attrgetter("layout")
_REQUIRES_GRAD = attrgetter("requires_grad")


def added(addends: Iterable[Tensor]) -> Tensor:
    """The sum of 0-d tensors, one after the other, on the device of the first."""
    total = None
    for one in addends:
        before = one.new_zeros((), dtype=torch.float64) if total is None else total
        total = before + one.to(before.device)
    return torch.zeros((), dtype=torch.float64, device="cpu") if total is None else total


def total_of(stage: Stage, gradients: list[Tensor], *, on_device: bool = False) -> Tensor:
    """Return the total of a measured stage over gradients that reach it: a 0-d float64 tensor.

    On the CPU numbers are added in the order of the gradients; elsewhere in torch's order, so that
    nothing waits for the device.

    Args:
        stage: that measures.
        gradients: of all leaves, in their order.
        on_device: True if no number may be read, since the step is perhaps captured.
    """
    assert isinstance(stage, Transform)
    assert stage.measure is not None
    numbers = None if on_device else measured_each(stage, gradients)
    if numbers is None:
        return added(map(stage.measure, gradients))
    if not numbers.is_cpu:
        return numbers.to(torch.float64).sum()
    return sum_in_order(numbers.tolist())


def sum_in_order(numbers: Iterable[float]) -> Tensor:
    """Return the sum of numbers, added from the first to the last: a 0-d float64 tensor.

    All totals are added up here, so they have the same bits on one process and on many. Python's
    ``sum()`` promises no order.
    """
    total = functools.reduce(operator.add, numbers, 0.0)
    return torch.tensor(total, dtype=torch.float64, device="cpu")


def measured_each(stage: Transform, gradients: list[Tensor]) -> Tensor | None:
    """Return what a stage measures of each gradient; None where it is asked one by one."""
    if stage.measure_each is None or len(gradients) < 2 or not _are_alike(gradients):
        return None
    return stage.measure_each(gradients)


def reduced_each(
    stage: Stage,
    params: list[Tensor],
    grads: list[Tensor],
    state: Any,
    coefficients: Any,
) -> list[list[float]] | None:
    """Return the numbers that a stage's ``reduce`` gives for each leaf, a list for each total.

    Args:
        stage: that reduces.
        params, grads: of the leaves.
        state: a State with a list of all leaves' tensors in the place of each tensor.
        coefficients: which the leaves share.

    Returns:
        None where the stage is asked one by one.
    """
    if stage.reduce_each is None or not is_plain(coefficients):
        return None
    if not (_are_alike(params) and _are_alike(grads)):
        return None
    found = stage.reduce_each(params, grads, state, coefficients)
    return None if found is None else [one.tolist() for one in found]


def columns_of(states: Sequence[Any]) -> Any:
    """Return a State with a list of all entries in the place of each entry."""

    def column(values: Sequence[Any]) -> Any:
        if isinstance(values[0], list):
            return [list(one) for one in zip(*values, strict=True)]
        return list(values)

    return type(states[0])(*map(column, zip(*states, strict=True))) if states[0] else ()


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Return True for dense tensors of one device, of which no derivative is taken."""
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, tensors)):
        return False
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)):
        return False
    if {*map(_LAYOUT, tensors)} != {torch.strided} or len({*map(_DEVICE, tensors)}) > 1:
        return False
    first = tensors[0]
    on_device = first.is_cpu or first.is_cuda
    return on_device and not any(map(is_functorch_wrapped_tensor, tensors))


class HandedOn:
    """Result of a check if stages pass on gradients and parameters unchanged.

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


def hand_on_gradients(stages: Sequence[Stage], leaves: Sequence[Leaf]) -> bool:
    """Return True if pointwise stages pass on the gradients of all leaves unchanged.

    Of leaves with the same coefficients and dtypes, some elements of the smallest one are tried.
    False if a rule must see all operations, as for autograd.
    """
    kinds: dict[Any, Leaf] = {}
    for leaf in leaves:
        key = id(leaf.coefficients), leaf.param.dtype, leaf.grad.dtype
        if key not in kinds or leaf.param.numel() < kinds[key].param.numel():
            kinds[key] = leaf
    if why_not_pointwise(stages) or any(map(is_followed, kinds.values())):
        return False
    found = HandedOn(stages)
    with torch.no_grad():
        found.look([], [sample_of(stages, leaf) for leaf in kinds.values()])
    return found.gradients
