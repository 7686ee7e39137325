"""Calls of a stage's functions, and checks of their results."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from functional_optim._torch.tensors import has_versions, version_of
from functional_optim.core.format import format_value
from functional_optim.core.stage import Rule, Stage, Transform

TENSORS = (Tensor, fx.Proxy)
"""Types of tensors: while a stage is traced, tensors are Proxies."""


def call_stage(
    stage: Stage,
    param: Any,
    grad: Any,
    state: Any,
    coefficients: Any,
    totals: Sequence[Any] = (),
    raw: Any = None,
) -> tuple[Any, Any, Any]:
    """Call a rule or a transform, check its result, and return ``(param, grad, state)``."""
    if isinstance(stage, Rule):
        result = stage.rule(param, grad, state, coefficients)
        param, state = _check_result(stage, "param", result, state)
        return param, grad, state
    assert isinstance(stage, Transform)
    more = (raw,) if stage.raw else ()
    result = stage.transform(grad, param, state, coefficients, *totals, *more)
    new, state = _check_result(stage, "grad", result, state)
    if isinstance(new, Tensor) and isinstance(grad, Tensor) and new.shape != grad.shape:
        raise RuntimeError(
            f"{stage.name} returned a gradient of shape {tuple(new.shape)} for one of shape "
            f"{tuple(grad.shape)}; it must keep the shape"
        )
    return param, new, state


def is_raw_source(stage: Stage) -> bool:
    """Return True if the gradient after the stage is the raw gradient of later stages.

    This holds for gates that keep gradients, such as ``accumulate``, and for leading transforms,
    such as the negation for ``maximize=True``.
    """
    keeps = stage.gate is not None and stage.gate.holds == "gradient"
    return keeps or (isinstance(stage, Transform) and stage.leads)


def call_coefficients(stage: Stage, step: Any, hyper: Any, *shared: Any) -> Any:
    """Call a stage's ``coefficients``, and raise TypeError if the result is no named tuple."""
    return checked_coefficients(stage, stage.coefficients(step, hyper, *shared))


def checked_coefficients(stage: Stage, made: Any) -> Any:
    """Return a result of ``coefficients``. Raise TypeError if it is no named tuple."""
    if not hasattr(made, "_fields"):
        raise TypeError(
            f"{stage.name}: coefficients must return a NamedTuple of numbers, which its function "
            f"gets; it returned {format_value(made)}"
        )
    return made


def call_measure(stage: Stage, grad: Tensor) -> Tensor:
    """Call a stage's ``measure``, and check that it reads the gradient and returns a 0-d tensor."""
    assert isinstance(stage, Transform)
    assert stage.measure is not None
    counts = has_versions and not torch.compiler.is_compiling() and not grad.is_inference()
    before = version_of(grad) if counts else 0
    made: Any = stage.measure(grad)
    if not isinstance(made, Tensor) or made.dim():
        raise TypeError(
            f"{stage.name}: measure must return a 0-d tensor, what one gradient adds to the total "
            f"of all; it returned {format_value(made)}"
        )
    if counts and version_of(grad) != before:
        raise RuntimeError(f"{stage.name}: measure{_WROTE}")
    return made


def call_reduce(
    stage: Stage, param: Tensor, grad: Tensor, state: Any, coefficients: Any
) -> tuple[Tensor, ...]:
    """Call a stage's ``reduce``, and check that it reads its tensors and returns all totals."""
    assert stage.reduce is not None
    counts = has_versions and not torch.compiler.is_compiling()
    counts = counts and not (param.is_inference() or grad.is_inference())
    before = (version_of(param), version_of(grad)) if counts else None
    made: Any = stage.reduce(param, grad, state, coefficients)
    try:
        sizes = tuple(map(Tensor.numel, made))
    except TypeError:  # not a tuple of tensors
        sizes = ()
    if sizes != (1,) * stage.totals:
        raise TypeError(
            f"{stage.name}: reduce must return a tuple of {stage.totals} tensors of one element "
            f"each, as totals={stage.totals} declares; it returned {format_value(made)}"
        )
    if counts and (version_of(param), version_of(grad)) != before:
        raise RuntimeError(f"{stage.name}: reduce{_WROTE}")
    return cast("tuple[Tensor, ...]", made)


_WROTE = (
    " wrote to its arguments, which it may only read: compute with new tensors, as by `grad * 2` "
    "in place of `grad.mul_(2)`"
)


def init_state(stage: Stage, param: Tensor, hyper: Any) -> Any:
    """Call a stage's ``init``, and raise TypeError if the result is not its State."""
    state = stage.init(param, hyper)
    if type(state) is not stage.state or not stage.stateful:
        _check_state(stage, "init must return", state)
    for one in stage.inputs:
        if getattr(state, one.name) != []:
            raise TypeError(
                f"{stage.name}: init must leave the input {one.name!r} of its state [], which a "
                f"step fills; it returned {format_value(getattr(state, one.name))}"
            )
    return state


def _check_result(stage: Stage, first: str, result: Any, before: Any) -> tuple[Any, Any]:
    """Return the result of a stage, after checks against its state before the step."""
    if not isinstance(result, tuple) or len(result) != 2:
        count = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise TypeError(
            f"{stage.name}: must return the pair ({first}, state), the state {_state_name(stage)}; "
            f"it returned a {type(result).__name__}{count}: write `return {first}, state`"
        )
    value, after = result
    if not isinstance(value, TENSORS):
        raise TypeError(
            f"{stage.name}: must return the pair ({first}, state); in the place of {first} it "
            f"returned {format_value(value)}, which is not a tensor"
        )
    _check_state(stage, "must return", after)
    for field, old, new in zip(getattr(before, "_fields", ()), before, after, strict=True):
        if not _has_form(old, new):
            many = f"a list of {len(old)} tensors" if isinstance(old, list) else "a tensor"
            raise TypeError(
                f"{stage.name}: must return {many} as the field {field} of its state; it "
                f"returned {format_value(new)}"
            )
    for one in stage.inputs:
        pairs = zip(getattr(before, one.name), getattr(after, one.name), strict=True)
        if not all(new is old for old, new in pairs):
            raise TypeError(
                f"{stage.name}: must return the input {one.name!r} of its state unchanged, because "
                "inputs are only read; store a value computed from it in another field"
            )
    return value, after


def _check_state(stage: Stage, must: str, state: Any) -> None:
    kind = stage.state if stage.stateful else tuple
    if not isinstance(state, kind) or (state and not stage.stateful):
        raise TypeError(
            f"{stage.name}: {must} {_state_name(stage)} as its state; it returned "
            f"{format_value(state)}"
        )


def _state_name(stage: Stage) -> str:
    return f"its {stage.state.__name__}" if stage.stateful else "(), which it was given"


def _has_form(old: Any, new: Any) -> bool:
    """Return True if a new field is a tensor, or a list of as many tensors, as the old field."""
    if isinstance(old, list):
        return (
            isinstance(new, list)
            and len(new) == len(old)
            and all(isinstance(one, TENSORS) for one in new)
        )
    return isinstance(new, TENSORS)
