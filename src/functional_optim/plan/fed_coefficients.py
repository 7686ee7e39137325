"""Coefficients computed from inputs of a program: which scalars can be inputs, and how.

Symbols are tried first, because they follow Python's arithmetic bit for bit. Functions that need a
tensor for a choice (``at_first_step``) get tensors instead. A scalar that a stage branches on (such
as momentum, if zero means no momentum) cannot be an input: it is a constant of the program.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.compilers import fake_tensor_mode
from functional_optim.core.hyper import field_types, to_floats
from functional_optim.core.hyper_inputs import InputHypers, fill_inputs, iter_inputs
from functional_optim.core.stage import Stage
from functional_optim.core.stage_contract import call_coefficients
from functional_optim.kernels.errors import UntraceableError


class Evaluation(Enum):
    """Way of computing a stage's coefficients."""

    SYMBOLS = "on symbols, which are the numbers that a rule gets"
    ITEMS = "on tensors, whose numbers are then taken out"
    TENSORS = "on tensors, which a rule gets as they are"


INTERPRETED = (Evaluation.SYMBOLS, Evaluation.ITEMS)
ON_DEVICE = (Evaluation.TENSORS,)


class Chosen(NamedTuple):
    """Scalars that are inputs, and how each group's coefficients are computed from them."""

    inputs: tuple[str, ...]
    ways: tuple[tuple[Evaluation, ...], ...]
    """For each group and stage."""


def first_line(error: Exception) -> str:
    """Return an error in one line."""
    text = str(error).strip().split("\n")[0].partition("  (")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def stand_in(way: Evaluation, tensor: Tensor) -> Any:
    """Return the stand-in for an input."""
    return tensor.item() if way is Evaluation.SYMBOLS else tensor


def next_step(way: Evaluation, steps: Tensor) -> Any:
    """Return the number of the step after ``steps`` steps."""
    return (
        torch.sym_float(steps.item()) if way is Evaluation.SYMBOLS else steps.to(torch.float64)
    ) + 1


def coefficients(
    stage: Stage, hyper: Any, way: Evaluation, fed: Mapping[str, Any], step: Any
) -> Any:
    """Return the coefficients of a stage: stand-ins for scalars, and static choices as they are."""
    plain = to_floats(
        call_coefficients(stage, 1.0, fill_inputs(hyper, lambda slot: slot.nonzero_value))
    )
    filled = fill_inputs(hyper, lambda slot: fed.get(slot.name, slot.nonzero_value))
    made = call_coefficients(stage, step, filled)
    coefficients_class: Any = type(plain)
    kinds = field_types(coefficients_class)

    def number(now: Any) -> Any:
        """Return a scalar as a rule gets it."""
        if not isinstance(now, Tensor):
            return torch.sym_float(now)
        return now if way is Evaluation.TENSORS else now.item()

    return coefficients_class(
        *(
            _joined(f"{stage.name}: {field}", number, kind, value, now)
            for (field, kind), value, now in zip(kinds.items(), plain, made, strict=True)
        )
    )


def _joined(label: str, number: Callable[[Any], Any], kind: Any, plain: Any, now: Any) -> Any:
    """Return a scalar as it is now, or a static choice if it has not changed."""
    if isinstance(plain, tuple) and isinstance(now, tuple):
        items = [_joined(label, number, kind, a, b) for a, b in zip(plain, now, strict=True)]
        return type(plain)(*items) if hasattr(plain, "_fields") else tuple(items)
    if type(plain) is float or (kind is float and not isinstance(plain, bool)):
        return number(now)
    if type(now) is type(plain) and now == plain:
        return plain
    raise UntraceableError(f"{label} is a choice ({plain!r}), and changes with what is fed")


def choose(
    stages: Sequence[Stage],
    groups: Sequence[InputHypers],
    ways: Sequence[Evaluation],
    names: Sequence[str],
    asked: Sequence[str] | None,
) -> Chosen:
    """Choose which scalars are inputs.

    Args:
        groups: the hyper-parameters of each group of leaves.
        ways: to compute coefficients, the best first.
        names: of all scalars.
        asked: the names of the inputs; None for all scalars that can be inputs.

    Raises:
        ValueError: an unknown name, or a scalar that a stage branches on.
        UntraceableError: coefficients that branch on the step.
    """
    pairs = [pair for group in groups for pair in zip(stages, group, strict=True)]
    for stage, hyper in pairs:
        if (how := _how(stage, hyper, ways, ())).way is None:
            raise UntraceableError(
                f"the coefficients of {stage.name} cannot be computed from a step count that is "
                f"fed: {how.why}. Write them with arithmetic (step ** 0.5 instead of math.sqrt) "
                "and functional_optim.numeric.at_first_step, without a branch on the step"
            )
    fixed: dict[str, str] = {}
    for stage, hyper in pairs:
        for slot in iter_inputs(hyper):
            if (how := _how(stage, hyper, ways, (slot.name,))).way is None:
                fixed.setdefault(slot.name, f"{stage.name} decides by it ({how.why})")
    inputs = tuple(name for name in names if name not in fixed)
    if asked is not None:
        _require(asked, names, fixed)
        inputs = tuple(name for name in names if name in asked)
    chosen = []
    for stage, hyper in pairs:
        way, why = _how(stage, hyper, ways, inputs)
        if way is None:
            raise UntraceableError(
                f"the coefficients of {stage.name} cannot be computed from all of "
                f"{', '.join(inputs)}: {why}. Name fewer inputs"
            )
        chosen.append(way)
    rows = range(0, len(chosen), len(stages))
    return Chosen(inputs, tuple(tuple(chosen[row : row + len(stages)]) for row in rows))


def _require(asked: Sequence[str], names: Sequence[str], fixed: Mapping[str, str]) -> None:
    """Raise ValueError if a name cannot be an input."""
    for name in asked:
        if name not in names:
            raise ValueError(
                f"inputs: this chain has no number {name!r}; it has {', '.join(names)}"
            )
        if name in fixed:
            raise ValueError(
                f"inputs: {name} cannot be fed, since {fixed[name]}: it is fixed in the program; "
                "export one program for each choice"
            )


class _How(NamedTuple):
    way: Evaluation | None
    """None if the coefficients cannot be computed."""
    why: str


def _how(stage: Stage, hyper: Any, ways: Sequence[Evaluation], fed: Sequence[str]) -> _How:
    """Return how coefficients can be computed from these scalars and the step."""
    why = ""
    for way in ways:
        try:
            _try(stage, hyper, way, [s.name for s in iter_inputs(hyper) if s.name in fed])
        except Exception as error:  # noqa: BLE001  a user's function may raise any error
            why = first_line(error)
        else:
            return _How(way, "")
    return _How(None, why)


def _try(stage: Stage, hyper: Any, way: Evaluation, fed: Sequence[str]) -> None:
    """Compute the coefficients on stand-ins without values."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415  slow to import

    with fake_tensor_mode(shape_env=ShapeEnv()):
        given = {
            name: stand_in(way, torch.empty((), dtype=torch.float64, device="cpu")) for name in fed
        }
        step = next_step(way, torch.empty((), dtype=torch.int64, device="cpu"))
        coefficients(stage, hyper, way, given, step)
