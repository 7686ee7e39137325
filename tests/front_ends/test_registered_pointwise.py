"""A rule that says it is pointwise and is not is refused where it is registered."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Rule,
    as_functional_optim,
    chain,
    functional_optim_map,
    register_functional_optim,
    registry,
)


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


class Hyper(NamedTuple):
    lr: float


def normalised(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad / (grad.norm() + 1.0), state


NORMALISED = Rule(name="normalised", hyper=Hyper, rule=normalised)
WHOLE = Rule(name="normalised", hyper=Hyper, rule=normalised, kind="per_matrix")


def test_it_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match=r"two parts.*\[0\.5, -1\.25\].*per_matrix"):
        register_functional_optim("normalised", lambda lr=0.1: chain(NORMALISED(lr=lr)))
    assert "normalised" not in functional_optim_map


def test_one_that_needs_arguments_is_refused_when_it_gets_them() -> None:
    register_functional_optim("needs lr", lambda lr: chain(NORMALISED(lr=lr)))
    with pytest.raises(ValueError, match="per_matrix"):
        as_functional_optim("needs lr", lr=0.1)


def test_declared_per_matrix_it_is_taken() -> None:
    register_functional_optim("whole", lambda lr=0.1: chain(WHOLE(lr=lr)))
    optimizer = as_functional_optim("whole")
    grad = torch.tensor([3.0, 4.0])
    for executor in ("auto", "blocked", "script"):
        used = optimizer.using(executor=executor)
        new, _ = used.update(torch.zeros(2), grad, used.init(torch.zeros(2)))
        assert torch.allclose(new, -0.1 * grad / 6.0)
