"""A torch class that counts steps per group is compared without missing gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import rmsprop, sgd
from functional_optim.schedules import exponential
from functional_optim.testing import LawBroken, check_optimizer
from functional_optim.testing.check import MISSING_HINT


class Decaying(torch.optim.Optimizer):
    """SGD whose learning rate halves with each step of the group."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            made = group.setdefault("step", 0)
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * 0.5**made)


def decaying(lr: float = 0.5) -> Any:
    return sgd(exponential(lr, gamma=0.5))


LAW = "same as the oracle"


def test_it_is_checked_without_missing_gradients() -> None:
    """The class passes without missing gradients (fault 23).

    With missing gradients, the error has a hint, since the group counts steps for all parameters.
    """
    check_optimizer(decaying, Decaying, missing=False, laws=[LAW, "one step each"], max_examples=25)
    with pytest.raises(LawBroken) as caught:
        check_optimizer(decaying, Decaying, laws=[LAW])
    assert any(None in step for step in caught.value.example.steps)
    assert MISSING_HINT in str(caught.value)


def test_the_hint_is_for_missing_gradients_alone() -> None:
    """The error has no hint if the difference is not due to missing gradients (fault 23)."""
    with pytest.raises(LawBroken) as caught:
        check_optimizer(rmsprop, torch.optim.Adagrad, laws=[LAW])
    assert "missing=False" not in str(caught.value)
