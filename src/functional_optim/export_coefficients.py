"""Coefficients of an exported step: which numbers they can be computed from, and how.

They are tried on symbols first, which follow Python's arithmetic to the bit. Functions that need
a tensor to choose by (``at_first_step``) are given tensors instead. A number that decides a
choice (whether there is momentum at all) cannot be fed: it is fixed in the program.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.executors.trace import UntraceableError
from functional_optim.export_hyper import Slot, Slotted, filled, slots_in
from functional_optim.hyper import field_types, numbers
from functional_optim.stage import Stage


class Chosen(NamedTuple):
    """What can be fed, and how each group's coefficients are computed from it."""

    inputs: tuple[str, ...]
    tensors: tuple[tuple[bool, ...], ...]
    """For each group and stage, whether with tensors instead of symbols."""


def first_line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().split("\n")[0].partition("  (")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def coefficients(stage: Stage, hyper: Any, fed: Mapping[str, Any], step: Any) -> Any:
    """The coefficients of a stage: numbers as symbols, choices as they are.

    Args:
        stage: one of the chain.
        hyper: its Hyper, with slots.
        fed: what stands for the numbers that are fed, by name: all symbols, or all 0-d tensors.
        step: the number of the step, alike.

    Raises:
        UntraceableError: a choice that changes with what is fed.
    """
    plain = _plain(stage, hyper)
    made = stage.coefficients(step, filled(hyper, lambda slot: fed.get(slot.name, slot.value)))
    kinds = field_types(type(plain))
    return type(plain)(
        *(
            _joined(f"{stage.name}: {field}", kind, value, now)
            for (field, kind), value, now in zip(kinds.items(), plain, made, strict=True)
        )
    )


def _plain(stage: Stage, hyper: Any) -> Any:
    return numbers(stage.coefficients(1.0, filled(hyper, lambda slot: slot.value)))


def _joined(label: str, kind: Any, plain: Any, now: Any) -> Any:
    """A number as it is now; a choice, if it is still the same."""
    if isinstance(plain, tuple) and isinstance(now, tuple):
        return tuple(_joined(label, kind, a, b) for a, b in zip(plain, now, strict=True))
    if type(plain) is float or (kind is float and not isinstance(plain, bool)):
        value = now.item() if isinstance(now, Tensor) else now
        return value if isinstance(value, torch.SymFloat) else torch.sym_float(value)
    if type(now) is type(plain) and now == plain:
        return plain
    raise UntraceableError(f"{label} is a choice ({plain!r}), and changes with what is fed")


def choose(
    stages: Sequence[Stage], groups: Sequence[Slotted], names: Sequence[str], asked: Any
) -> Chosen:
    """Which numbers are inputs.

    Args:
        stages: of the chain.
        groups: the hyper-parameters of each group of leaves.
        names: of all numbers.
        asked: the names that are to be inputs; None for all that can be.

    Raises:
        ValueError: an unknown name, or one whose number decides a choice.
        UntraceableError: coefficients that branch on the step.
    """
    pairs = [pair for group in groups for pair in zip(stages, group, strict=True)]
    for stage, hyper in pairs:
        if (found := _how(stage, hyper, ())).tensors is None:
            raise UntraceableError(
                f"the coefficients of {stage.name} cannot be computed from a step count that is "
                f"fed: {found.why}. Write them with arithmetic (step ** 0.5 instead of math.sqrt) "
                "and functional_optim.numeric.at_first_step, without a branch on the step"
            )
    fixed: dict[str, str] = {}
    for stage, hyper in pairs:
        for slot in slots_in(hyper):
            if (found := _how(stage, hyper, (slot.name,))).tensors is None:
                fixed.setdefault(slot.name, f"{stage.name} decides by it ({found.why})")
    inputs = tuple(name for name in names if name not in fixed)
    if asked is not None:
        _require(asked, names, fixed)
        inputs = tuple(name for name in names if name in asked)
    together = [[_how(*pair, inputs) for pair in zip(stages, g, strict=True)] for g in groups]
    for (stage, _), found in zip(pairs, (one for row in together for one in row), strict=True):
        if found.tensors is None:
            raise UntraceableError(
                f"the coefficients of {stage.name} cannot be computed from all of "
                f"{', '.join(inputs)}: {found.why}. Name fewer inputs"
            )
    return Chosen(inputs, tuple(tuple(bool(one.tensors) for one in row) for row in together))


def _require(asked: Sequence[str], names: Sequence[str], fixed: Mapping[str, str]) -> None:
    """Names that can be inputs."""
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
    tensors: bool | None
    """Whether with tensors; None where in neither way."""
    why: str


def _how(stage: Stage, hyper: Any, fed: Sequence[str]) -> _How:
    """How coefficients can be computed from these numbers and the step."""
    why = []
    for tensors in (False, True):
        try:
            _try(stage, hyper, [s for s in slots_in(hyper) if s.name in fed], tensors=tensors)
        except Exception as error:  # noqa: BLE001  whatever a user's function raises on a symbol
            why.append(first_line(error))
        else:
            return _How(tensors, "")
    return _How(None, why[-1])


def _try(stage: Stage, hyper: Any, fed: Sequence[Slot], *, tensors: bool) -> None:
    """Compute the coefficients on stand-ins."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415  slow to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415

    with FakeTensorMode(shape_env=ShapeEnv()):
        given = {slot.name: torch.empty((), dtype=torch.float64, device="cpu") for slot in fed}
        step = torch.empty((), dtype=torch.int64, device="cpu")
        if tensors:
            coefficients(stage, hyper, given, step.to(torch.float64) + 1.0)
        else:
            symbols = {name: value.item() for name, value in given.items()}
            coefficients(stage, hyper, symbols, torch.sym_float(step.item()) + 1)

