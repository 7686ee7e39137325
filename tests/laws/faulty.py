"""Optimizers with a fault in them, and that a law catches it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, chain
from functional_optim.testing import LAWS, LawBroken, check_optimizer
from functional_optim.testing.runs import REAL_DTYPES


class Hyper(NamedTuple):
    lr: float


def runs_on(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Each element depends on those before it, and the shapes do not tell."""
    return param - c.lr * grad.reshape(-1).cumsum(0).reshape(grad.shape), state


def optimizer_of(rule: Callable[..., Any], **options: Any) -> Callable[..., Optimizer]:
    stage = Rule(name=rule.__name__, hyper=Hyper, rule=rule, **options)
    return lambda lr=0.1: chain(stage(lr=lr))


def require_caught(law: str, factory: Any, oracle: Any = None) -> None:
    # Each dtype is compiled, where anything is.
    dtypes = [torch.float32] if LAWS[law].slow else REAL_DTYPES
    with pytest.raises(LawBroken) as caught:
        check_optimizer(factory, oracle, laws=[law], dtypes=dtypes, max_examples=10)
    assert caught.value.law == law
    assert law in str(caught.value)
    assert "smallest example" in str(caught.value)
