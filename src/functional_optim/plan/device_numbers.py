"""Hyper-parameters and coefficients as scalars on a device, for CUDA graphs.

A captured step contains no Python, so the device must compute everything that depends on the step
count. Each hyper-parameter is a 0-d tensor on the device, which can be filled with another value
between replays. The ``coefficients`` functions of the stages compute coefficients from these
tensors and the step count, in double precision.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.compilers import fake_tensor_mode
from functional_optim.core.hyper import Schedule, format_hyper
from functional_optim.core.hyper_inputs import (
    HyperInput,
    InputHypers,
    collect_inputs,
    fill_inputs,
    iter_inputs,
)
from functional_optim.core.leaf import Scalars
from functional_optim.core.stage import Stage
from functional_optim.plan.fed_coefficients import (
    ON_DEVICE,
    Evaluation,
    choose,
    coefficients,
    first_line,
)
from functional_optim.plan.item import Item, StepScalars


class DeviceNumbers:
    """Hyper-parameters of all parameters on a device, and their coefficients."""

    def __init__(
        self,
        stages: Sequence[Stage],
        hypers: Sequence[tuple[Any, ...]],
        slots: Sequence[InputHypers],
        device: torch.device,
    ) -> None:
        self._stages = tuple(stages)
        self._places = _places(hypers)
        groups = self._groups = _once(slots)
        for slot in _each(groups):
            _check_device(slot, device)
        names = collect_inputs(groups)
        self._inputs = frozenset(choose(stages, groups, ON_DEVICE, list(names), None).inputs)
        for slot in _each(groups):
            if slot.given is not None and slot.name not in self._inputs:
                raise ValueError(
                    f"{slot.name} is {format_hyper(slot.given)}, but a stage decides by its "
                    "number what is to be done, which cannot change with the step here: give a "
                    "number"
                )
        with torch.inference_mode(mode=False):  # inference tensors could not be filled later
            self._numbers = {
                name: torch.full((), value, dtype=torch.float64, device=device)
                for name, value in names.items()
            }

    def scalars_of(self, item: Item) -> StepScalars:
        """Return the coefficients of the step after ``item.state.step`` steps."""
        count = item.state.step
        found = self.coefficients(item.hypers, count)
        return StepScalars(item.hypers, found, count + 1.0, Scalars.DEVICE)

    def coefficients(self, hypers: tuple[Any, ...], count: Tensor) -> tuple[Any, ...]:
        """Return the coefficients of the step after ``count`` steps, as 0-d float64 tensors.

        ``count`` is a 0-d integer tensor on the device.
        """
        own = self._groups[self._places[id(hypers)]]
        step = count.to(torch.float64) + 1
        fed = {
            slot.name: self._now(slot, step)
            for slot in iter_inputs(own)
            if slot.name in self._inputs
        }
        return tuple(
            coefficients(stage, hyper, Evaluation.TENSORS, fed, step)
            for stage, hyper in zip(self._stages, own, strict=True)
        )

    def _now(self, slot: HyperInput, step: Tensor) -> Tensor:
        """Return the value of a slot at a step."""
        if slot.given is None:
            return self._numbers[slot.name]
        if isinstance(slot.given, Tensor):
            return slot.given.detach().to(torch.float64)
        made = slot.given(step - 1)
        return made.to(torch.float64) if isinstance(made, Tensor) else step.new_full((), made)

    def fill(self, hypers: Sequence[tuple[Any, ...]], slots: Sequence[InputHypers]) -> str | None:
        """Write the values of other hyper-parameters to the device.

        If a change is not only another value, nothing is written, and the text that is returned
        says which change it is.
        """
        groups = _once(slots)
        if list(map(_kinds, groups)) != list(map(_kinds, self._groups)):
            return "a flag or a whole number among the hyper-parameters changes what is done"
        values: dict[str, float] = {}
        for old, new in zip(_each(self._groups), _each(groups), strict=True):
            if not _same_given(old.given, new.given):
                wanted = _told(new)
                if isinstance(old.given, Tensor) and isinstance(new.given, Tensor):
                    wanted = "another one (fill_ the one in optimizer.hyper)"
                return f"{old.name} was {_told(old)}, and is to be {wanted}"
            if old.name not in self._inputs and new.value != old.value:
                return f"a stage decides by {old.name} what is to be done"
            if values.setdefault(old.name, new.value) != new.value:
                return f"{old.name} was one number for several stages, and is to be several"
        for name, value in values.items():
            self._numbers[name].fill_(value)
        self._places = _places(hypers)
        return None


def _places(hypers: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    """Return the group of each tuple of hyper-parameters, by ``id``."""
    return {id(own): number for number, own in enumerate(_once(hypers))}


def _once(every: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list({id(one): one for one in every}.values())


def _same_given(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.device == b.device
    return a is b


def _each(groups: Sequence[InputHypers]) -> Iterator[HyperInput]:
    for group in groups:
        yield from iter_inputs(group)


def _kinds(group: InputHypers) -> Any:
    """Return hyper-parameters without their scalars: only flags and integers."""
    return fill_inputs(group, lambda slot: None)


def _told(slot: HyperInput) -> str:
    if slot.given is None:
        return "a number"
    return (
        "a tensor" if isinstance(slot.given, Tensor) else f"the schedule {format_hyper(slot.given)}"
    )


def _check_device(slot: HyperInput, device: torch.device) -> None:
    """Raise ValueError if the value of a slot is a tensor on another device."""
    if isinstance(slot.given, Tensor) and slot.given.device != device:
        raise ValueError(
            f"{slot.name} is a tensor on {slot.given.device}, but a step on {device} is to read it "
            "each time: put it there, or give a number, which set_hyper changes"
        )


def first_value(name: str, schedule: Schedule) -> float:
    """Return a schedule's value before the first step, without reading the step count."""
    mode = fake_tensor_mode(allow_non_fake_inputs=True)
    try:
        with mode:
            made = schedule(torch.empty((), dtype=torch.float64, device="cpu"))
        assert not isinstance(made, Tensor) or made.dim() == 0, "it gives no 0-d tensor"
        return float(schedule(torch.zeros((), dtype=torch.float64, device="cpu")))
    except Exception as error:
        raise ValueError(
            f"the schedule {format_hyper(schedule)} of {name} cannot be computed on a device "
            f"({first_line(error)}): write it with torch's operations, without a branch on the "
            "step; or give a number, and set_hyper before each replay"
        ) from error
