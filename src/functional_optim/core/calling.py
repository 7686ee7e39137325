"""A stage is called, and what it returns is what it promised: a pair, of the kinds it was given."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from functional_optim.core.brief import brief
from functional_optim.core.stage import Rule, Stage, Transform

TENSORS = (Tensor, fx.Proxy)
"""A tensor, and what stands for one while a stage is traced."""


def called(
    stage: Stage,
    param: Any,
    grad: Any,
    state: Any,
    coefficients: Any,
    totals: Sequence[Any] = (),
    raw: Any = None,
) -> tuple[Any, Any, Any]:
    """Call a stage.

    Args:
        stage: a rule or a transform.
        param: the parameter.
        grad: its gradient, as the stages before have left it.
        state: the stage's State.
        coefficients: the stage's Coefficients.
        totals: the sum that the stage measures, if it measures one.
        raw: the gradient that the chain was given, as leading stages and the last gate left it.

    Returns:
        ``(param, grad, state)`` behind the stage.

    Raises:
        TypeError: it returned something else than a pair of a tensor and its own State.
        RuntimeError: it made a gradient of another shape.
    """
    if isinstance(stage, Rule):
        made = stage.rule(param, grad, state, coefficients)
        param, state = _pair(stage, "param", made, state)
        return param, grad, state
    assert isinstance(stage, Transform)
    more = (raw,) if stage.raw else ()
    made = stage.transform(grad, param, state, coefficients, *totals, *more)
    new, state = _pair(stage, "grad", made, state)
    if isinstance(new, Tensor) and isinstance(grad, Tensor) and new.shape != grad.shape:
        raise RuntimeError(
            f"{stage.name} made of a gradient of shape {tuple(grad.shape)} one of shape "
            f"{tuple(new.shape)}; it must keep the shape"
        )
    return param, new, state


def renews_raw(stage: Stage) -> bool:
    """Return True if the gradient behind a stage is the raw one for all that follow.

    It is behind a gate, and behind a stage that leads: a descent sees the gradient negated.
    """
    return stage.gate is not None or (isinstance(stage, Transform) and stage.leads)


def started(stage: Stage, param: Tensor, hyper: Any) -> Any:
    """The State that a stage's ``init`` makes of a parameter.

    Raises:
        TypeError: it made something else.
    """
    made = stage.init(param, hyper)
    _require_state(stage, "init must return", made)
    for one in stage.inputs:
        if getattr(made, one.name) != []:
            raise TypeError(
                f"{stage.name}: init must leave the input {one.name!r} of its state [], which a "
                f"step fills; it returned {brief(getattr(made, one.name))}"
            )
    return made


def _pair(stage: Stage, first: str, made: Any, before: Any) -> tuple[Any, Any]:
    """Return a stage's result, if it is a tensor and a State."""
    if not isinstance(made, tuple) or len(made) != 2:
        count = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise TypeError(
            f"{stage.name}: must return the pair ({first}, state), the state {_own(stage)}; it "
            f"returned a {type(made).__name__}{count}: write `return {first}, state`"
        )
    value, after = made
    if not isinstance(value, TENSORS):
        raise TypeError(
            f"{stage.name}: must return the pair ({first}, state); in the place of {first} it "
            f"returned {brief(value)}, which is no tensor"
        )
    _require_state(stage, "must return", after)
    for field, old, new in zip(getattr(before, "_fields", ()), before, after, strict=True):
        if not _alike(old, new):
            many = f"a list of {len(old)} tensors" if isinstance(old, list) else "a tensor"
            raise TypeError(
                f"{stage.name}: must return {many} as the field {field} of its state; it "
                f"returned {brief(new)}"
            )
    for one in stage.inputs:
        pairs = zip(getattr(before, one.name), getattr(after, one.name), strict=True)
        if not all(new is old for old, new in pairs):
            raise TypeError(
                f"{stage.name}: must hand back the input {one.name!r} of its state as it was given "
                "it, for inputs are only read; keep what is made of it in another field"
            )
    return value, after


def _require_state(stage: Stage, must: str, made: Any) -> None:
    kind = stage.state if stage.stateful else tuple
    if not isinstance(made, kind) or (made and not stage.stateful):
        raise TypeError(
            f"{stage.name}: {must} {_own(stage)} as its state; it returned {brief(made)}"
        )


def _own(stage: Stage) -> str:
    return f"its {stage.state.__name__}" if stage.stateful else "(), which it was given"


def _alike(old: Any, new: Any) -> bool:
    if isinstance(old, list):
        return (
            isinstance(new, list)
            and len(new) == len(old)
            and all(isinstance(one, TENSORS) for one in new)
        )
    return isinstance(new, TENSORS)
