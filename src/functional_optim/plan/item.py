"""Item: a leaf of a step; StepScalars: its hyper-parameters and coefficients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.hyper import resolve, to_floats
from functional_optim.core.leaf import Scalars
from functional_optim.core.named_tuples import from_fields
from functional_optim.core.stage import Stage
from functional_optim.core.stage_contract import call_coefficients
from functional_optim.core.state import LeafState


class Item(NamedTuple):
    """Parameter with its gradient, state and hyper-parameters."""

    param: Tensor
    grad: Tensor
    state: LeafState
    hypers: tuple[Any, ...]
    """One Hyper per stage. Leaves of one group share one tuple."""
    name: str


def next_step(step: Tensor, device: torch.device | None = None) -> float | Tensor:
    """Return the number of the next step: a float, or a tensor inside torch.func transforms.

    A batched number is moved to the device of the parameter, because torch mixes CPU tensors with
    tensors on other devices only if they are 0-d.
    """
    if torch.compiler.is_compiling():  # the same graph runs all steps
        return step.to(torch.float64) + 1.0
    try:
        return float(step.item()) + 1.0
    except RuntimeError:
        return step.to(device or step.device, torch.float64) + 1.0


def coefficients_at(
    stages: Sequence[Stage], hypers: tuple[Any, ...], step: float | Tensor
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the hyper-parameters and the coefficients of every stage for a step."""
    number: Any = step  # stages expect a float; inside torch.func it is a tensor
    resolved = tuple(
        resolve(stage.name, stage.bounds, stage.check, hyper, step)
        for stage, hyper in zip(stages, hypers, strict=True)
    )
    coefficients = []
    for stage, hyper in zip(stages, resolved, strict=True):
        try:
            coefficients.append(to_floats(call_coefficients(stage, number, hyper)))
        except ArithmeticError as error:
            raise coefficients_error(stage, number, hyper, error) from error
    return resolved, tuple(coefficients)


def coefficients_error(stage: Stage, step: Any, hyper: Any, error: ArithmeticError) -> ValueError:
    """Return the error for hyper-parameters with which Python cannot compute coefficients."""
    given = ", ".join(f"{name}={value!r}" for name, value in hyper._asdict().items())
    return ValueError(
        f"{stage.name}: the coefficients of step {step:g} cannot be computed with {given} "
        f"({type(error).__name__}: {error}); choose numbers whose powers and quotients are finite"
    )


class StepScalars(NamedTuple):
    """Hyper-parameters and coefficients of an item in one step."""

    hypers: tuple[Any, ...]
    coefficients: tuple[Any, ...]
    """Items at the same step and in the same group share one tuple."""
    step: float | Tensor
    scalars: Scalars = Scalars.HOST
    """The origin of the coefficients: the host or the device."""


step_scalars = from_fields(StepScalars)


def on_host(stages: Sequence[Stage]) -> Callable[[Item], StepScalars]:
    """Return a function that computes the coefficients of an item on the host."""
    shared: dict[tuple[float, int], StepScalars] = {}

    def scalars_of(item: Item) -> StepScalars:
        step = next_step(item.state.step, item.param.device)
        key = None if isinstance(step, Tensor) else (step, id(item.hypers))
        made = None if key is None else shared.get(key)
        if made is None:
            made = StepScalars(*coefficients_at(stages, item.hypers, step), step)
            if key is not None:
                shared[key] = made
        return made

    return scalars_of
