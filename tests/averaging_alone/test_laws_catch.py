"""Tests that each law of averagers catches its fault, in averagers with one planted fault."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import sgd
from hooks import AveragingSchedule, ScheduledModelAverager
from hooks.averaging import OuterModelAverager
from hooks.testing import (
    AVERAGING_LAWS,
    AveragerSubject,
    LawBroken,
    Training,
    check_averager,
    check_averaging_law,
)
from tests.choices import case


class Plain(ScheduledModelAverager):
    """Correct averager, which averages after every second step."""

    def __init__(self, params: Sequence[Tensor], group: Any, first: int = 1) -> None:
        super().__init__(AveragingSchedule(2, warmup=first), group)
        self.params, self.group = params, group

    def average_parameters(self, params: Any, state: Sequence[Tensor] = ()) -> None:
        before = [param.detach().clone() for param in self.params]
        due = self.schedule.level(self.step) is not None
        super().average_parameters(params, state)
        if due:
            self.afterwards(before)

    def afterwards(self, before: Sequence[Tensor]) -> None:
        """Do nothing; subclasses add a fault here."""


class Moves(Plain):
    def afterwards(self, before: Sequence[Tensor]) -> None:
        for param in self.params:
            param.data = param.data.clone()


class MovesAtTheEnd(Moves):
    """Averager that moves parameters only at the end, when all views still have equal numbers."""

    def afterwards(self, before: Sequence[Tensor]) -> None:
        if self.step == 4:
            super().afterwards(before)


class Widens(Plain):
    def afterwards(self, before: Sequence[Tensor]) -> None:
        for param in self.params:
            param.data = param.data.double()


class Reshapes(Plain):
    def afterwards(self, before: Sequence[Tensor]) -> None:
        for param in self.params:
            param.data = param.data.unsqueeze(0)


class NotANumber(Plain):
    def afterwards(self, before: Sequence[Tensor]) -> None:
        for param in self.params:
            param.data.fill_(torch.nan)


class CountsGroups(Plain):
    def average_parameters(self, params: Any, state: Sequence[Tensor] = ()) -> None:
        params = list(params)
        super().average_parameters(params, state)
        self.step += sum(isinstance(one, Mapping) for one in params) // 2


class AveragesLater(Plain):
    def __init__(self, params: Sequence[Tensor], group: Any) -> None:
        super().__init__(params, group, first=0)


class OneKeepsItsOwn(Plain):
    def afterwards(self, before: Sequence[Tensor]) -> None:
        if self.group.rank() == 1:
            for param, own in zip(self.params, before, strict=True):
                param.data.copy_(own)


class Rounds(Plain):
    def afterwards(self, before: Sequence[Tensor]) -> None:
        for param in self.params:
            param.data.copy_(param.data.to(torch.bfloat16))


class Halfway(Plain):
    def afterwards(self, before: Sequence[Tensor]) -> None:
        for param, own in zip(self.params, before, strict=True):
            param.data.copy_((param.data + own) / 2)


class EveryStepHalfway(Halfway):
    def __init__(self, params: Sequence[Tensor], group: Any) -> None:
        super().__init__(params, group)
        self.schedule = AveragingSchedule(1)


class CountsFromZero(Plain):
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict({**state_dict, "step": 0})


class Forgets(OuterModelAverager):
    def __init__(self, params: Sequence[Tensor], group: Any) -> None:
        super().__init__(params, sgd(lr=0.7, momentum=0.9), 2, process_group=group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict({**state_dict, "outer": self.optimizer.state_dict()})


SOUND = AveragerSubject(
    Plain,
    dtypes=(torch.float32,),
    due=lambda step: step % 2 == 1,
    mean=True,
    oracle=Plain,
    every_step={},
)
FAULTS: list[tuple[str, Any]] = [
    ("storages stay", Moves),
    ("storages stay", MovesAtTheEnd),
    ("one call is one step", CountsGroups),
    ("written when it is due", AveragesLater),
    ("ranks agree when it is due", OneKeepsItsOwn),
    ("mean of float64", Rounds),
    *[("mean of float64", one) for one in (Widens, Reshapes, NotANumber)],
    ("same as the oracle", Rounds),
    ("every step is data parallel", EveryStepHalfway),
    ("any moment", Forgets),
    ("joined late", CountsFromZero),
]


def test_each_law_catches_its_fault_and_accuses_nobody_else() -> None:
    """One training is enough for each law to catch its fault."""
    training = Training((), torch.float32, 2, ((3,), ()), 4, 2, seed=1)
    for law, factory in FAULTS:
        with case(law=law):
            if law != "every step is data parallel":
                AVERAGING_LAWS[law].check(SOUND, training)
            with pytest.raises(AssertionError):
                AVERAGING_LAWS[law].check(replace(SOUND, factory=factory), training)
    assert {law for law, _ in FAULTS} == set(AVERAGING_LAWS)


def test_what_is_near_an_oracle_has_its_dtype_and_shape() -> None:
    training = Training((), torch.float32, 2, ((3,), ()), 2, 1, seed=1)
    law, near = AVERAGING_LAWS["same as the oracle"], replace(SOUND, ulps=8.0)
    law.check(near, training)
    for factory in (Widens, Reshapes, NotANumber):
        with case(factory=factory), pytest.raises(AssertionError, match="parameter 0 of rank 0"):
            law.check(replace(near, factory=factory), training)


def test_the_example_is_small() -> None:
    with pytest.raises(LawBroken, match="the law 'mean of float64' is broken") as caught:
        check_averager(
            Halfway, dtypes=[torch.float32], due=SOUND.due, agree=False, mean=True, max_examples=10
        )
    found = caught.value.example
    assert caught.value.law == "mean of float64"
    assert (found.ranks, found.steps, len(found.shapes)) == (2, 2, 1)
    assert "smallest example:" in str(caught.value) and "ranks:   2" in str(caught.value)


def test_laws_that_cannot_be_tried_are_named() -> None:
    with pytest.raises(ValueError, match="no law 'none'; use one of 'storages stay'"):
        check_averager(Plain, laws=["none"])
    with pytest.raises(ValueError, match="'mean of float64' needs due and mean"):
        check_averager(Plain, laws=["mean of float64"])
    with pytest.raises(LawBroken, match="parameter 0 of rank"):
        check_averaging_law("mean of float64", replace(SOUND, factory=Halfway))
