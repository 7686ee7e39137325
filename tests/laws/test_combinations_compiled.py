"""Compiled steps over storages: a few combinations, since each is a program of its own."""

import pytest
import torch
from torch import Tensor

from functional_optim.executors.compiled_step import CompiledStep
from functional_optim.executors.compiler import COMPILER, compilations
from functional_optim.testing import CASES, check_law
from functional_optim.testing.combinations import STORAGES, stored_subject, why_not
from functional_optim.testing.subject import Subject

CHOSEN = (
    ("adamw", "bfloat16+kahan"),
    ("rmsprop", "bfloat16+master"),
    ("lion", "state int8"),
    ("sgd", "bfloat16+kahan, state int8+stochastic"),
)
"""Each kind of storage, with rounding to nearest and by chance, over one rule or another."""


@pytest.mark.parametrize(("name", "storage"), CHOSEN)
def test_compiled_is_reference(name: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    call = CompiledStep.__call__

    def noted(self: CompiledStep, tensors: list[Tensor], uniform: Tensor) -> None:
        steps.append(tensors[0].numel())
        call(self, tensors, uniform)

    monkeypatch.setattr(CompiledStep, "__call__", noted)
    factory = CASES[name].factory
    assert why_not(factory(), storage, "compile") is None and storage in STORAGES
    COMPILER.idle()
    before = compilations()
    subject = stored_subject(Subject(factory, dtypes=(torch.float32,)), storage)
    check_law("compiled is reference", subject, max_examples=10)
    assert compilations() - before <= 1
    assert len(steps) > 3 and max(steps) > 256  # where blocks are not full, they are not compiled
