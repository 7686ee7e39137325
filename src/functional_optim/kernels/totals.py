"""Totals of measured stages: sums over all leaves, in the order of the leaves."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.derivatives import is_functorch_wrapped_tensor
from functional_optim.core.hyper import FIXED, is_plain
from functional_optim.core.leaf import PLAIN, Leaf, is_measured
from functional_optim.core.stage import Stage, Transform
from functional_optim.core.stage_contract import call_measure, call_stage

_DEVICE, _LAYOUT = attrgetter("device"), attrgetter("layout")
_REQUIRES_GRAD = attrgetter("requires_grad")


def sum_tensors(addends: Iterable[Tensor]) -> Tensor:
    """Return the sum of 0-d tensors, in their order, on the device of the first."""
    total = None
    for one in addends:
        before = one.new_zeros((), dtype=torch.float64) if total is None else total
        total = before + one.to(before.device)
    return torch.zeros((), dtype=torch.float64, device="cpu") if total is None else total


def total_of(
    stage: Stage, gradients: list[Tensor], *, on_device: bool = False, are_alike: bool = False
) -> Tensor:
    """Return the total of a measured stage over the gradients at the stage: a 0-d float64 tensor.

    On the CPU, numbers are added in the order of the gradients. On other devices they are added in
    the order that torch uses, so that the host does not wait for the device.

    Args:
        stage: a stage with a ``measure``.
        gradients: of all leaves, in their order.
        on_device: True if no number may be read from the device, as in a captured step.
        are_alike: as for :func:`try_measure_each`.
    """
    assert isinstance(stage, Transform)
    numbers = None if on_device else try_measure_each(stage, gradients, are_alike=are_alike)
    if numbers is None:
        return sum_tensors(call_measure(stage, one) for one in gradients)
    if not numbers.is_cpu:
        return numbers.to(torch.float64).sum()
    return torch.tensor(add_in_order(numbers.tolist()), dtype=torch.float64, device="cpu")


def add_in_order(numbers: Iterable[float]) -> float:
    """Return the sum of numbers, added from the first to the last.

    All totals are added up here, so they have the same bits on one process and on many. Python's
    ``sum()`` promises no order.
    """
    return functools.reduce(operator.add, numbers, 0.0)


def sum_in_order(numbers: Iterable[float]) -> Tensor:
    """Return :func:`add_in_order` of numbers as a 0-d float64 tensor."""
    return torch.tensor(add_in_order(numbers), dtype=torch.float64, device="cpu")


def try_measure_each(
    stage: Transform, gradients: list[Tensor], *, are_alike: bool = False
) -> Tensor | None:
    """Return ``measure`` of each gradient as one tensor; None if one call cannot compute it.

    ``are_alike``: the caller knows that all are plain dense tensors on one device that need no
    derivative.
    """
    if stage.measure_each is None or len(gradients) < 2:
        return None
    if not (are_alike or _are_alike(gradients)):
        return None
    return stage.measure_each(gradients)


def try_reduce_each(
    stage: Stage,
    params: list[Tensor],
    grads: list[Tensor],
    state: Any,
    coefficients: Any,
    *,
    are_alike: bool = False,
) -> list[list[float]] | None:
    """Return the results of ``reduce`` for all leaves, a list for each total.

    ``state`` is the State of the leaves, with a list of tensors instead of each tensor. The result
    is None if one call cannot compute it.
    """
    if stage.reduce_each is None:
        return None
    if not (FIXED.issuperset(map(type, coefficients)) or is_plain(coefficients)):
        return None
    if not (are_alike or (_are_alike(params) and _are_alike(grads))):
        return None
    found = stage.reduce_each(params, grads, state, coefficients)
    return None if found is None else list(map(Tensor.tolist, found))


def columns_of(states: Sequence[Any]) -> Any:
    """Return one State for many states, with a list of tensors instead of each tensor."""

    def column(values: Sequence[Any]) -> Any:
        if isinstance(values[0], list):
            return [list(one) for one in zip(*values, strict=True)]
        return list(values)

    return type(states[0])(*map(column, zip(*states, strict=True))) if states[0] else ()


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Return True if all are plain dense tensors on one device that need no derivative."""
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, tensors)):
        return False
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)):
        return False
    if {*map(_LAYOUT, tensors)} != {torch.strided} or len({*map(_DEVICE, tensors)}) > 1:
        return False
    first = tensors[0]
    on_device = first.is_cpu or first.is_cuda
    return on_device and not any(map(is_functorch_wrapped_tensor, tensors))


class Unchanged(NamedTuple):
    """Record of what stages return unchanged for certain coefficients."""

    coefficients: list[tuple[Any, ...]] | None
    gradients: bool
    """True if they return gradients unchanged."""
    params: bool
    """True if they return parameters unchanged."""


class UnchangedBy:
    """Test if stages return gradients and parameters unchanged, with a cached answer.

    The answer depends on shapes, dtypes and coefficients only. It is computed again if the
    coefficients change.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._last = Unchanged(None, gradients=not stages, params=not stages)

    def find(self, numbers: Iterable[Any], leaves: Callable[[], Iterable[Leaf]]) -> Unchanged:
        """Return the stored result for these coefficients, or compute it."""
        found = self._last  # other threads may replace it
        if not self._stages:
            return found
        coefficients = []
        for one in numbers:  # a comprehension would be one more Python call
            coefficients.append(one.coefficients[: len(self._stages)])  # noqa: PERF401
        if coefficients == found.coefficients:
            return found
        is_known = not any(map(is_measured, self._stages))
        same = [is_known, is_known]
        for leaf in leaves() if is_known else ():
            param, grad = leaf.param, leaf.grad
            numbers = zip(self._stages, leaf.states, leaf.coefficients, strict=False)
            for stage, state, own in numbers:
                param, grad, _ = call_stage(stage, param, grad, state, own, (), leaf.grad)
            same = [same[0] and grad is leaf.grad, same[1] and param is leaf.param]
        self._last = found = Unchanged(coefficients, *same)
        return found
