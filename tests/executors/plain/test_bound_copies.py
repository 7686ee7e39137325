"""Copies and pickles of a bound optimizer, alone and together with the model."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import BoundOptimizer, adamw, sgd
from tests.choices import each_value


def loaded(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": loaded,
}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def train(model: nn.Module, bound: BoundOptimizer, steps: int) -> None:
    for number in range(steps):
        model.zero_grad()
        model(torch.full((2, 3), 1.0 + number)).square().sum().backward()
        bound.step()


def values(model: nn.Module, bound: BoundOptimizer) -> list[Tensor]:
    leaves = [bound.state.leaves[name] for name, _ in model.named_parameters()]
    states = [one for leaf in leaves for stage in leaf.stages for one in stage]
    tensors = [one for one in states if isinstance(one, Tensor)]
    counts = [leaf.step for leaf in leaves]
    return [one.detach().clone() for one in (*model.parameters(), *tensors, *counts)]


@each_value(of=COPIES, capturable=[False, True])
def test_a_copy_goes_on_as_the_original_and_apart_from_it(
    of: Callable[[Any], Any], capturable: bool
) -> None:
    """Fault 27: the copy of the bound optimizer steps the copy of the model."""
    model = model_of()
    bound = adamw(lr=0.1).bind(dict(model.named_parameters()), capturable=capturable)
    train(model, bound, 2)
    bound.set_hyper(lr=0.05)
    other, again = of((model, bound))
    assert type(again) is type(bound)
    assert again.optimizer == bound.optimizer
    assert [*again.params.values()] != []
    for name, param in other.named_parameters():
        assert again.params[name] is param
    before = values(model, bound)
    assert all(map(torch.equal, values(other, again), before))
    train(other, again, 2)
    assert all(map(torch.equal, values(model, bound), before))
    train(model, bound, 2)
    assert all(map(torch.equal, values(other, again), values(model, bound)))


def test_a_copy_of_plain_tensors() -> None:
    """Fault 27: copies work for plain tensors in a flat buffer, and for a parameter of None."""
    params: dict[str, Any] = {"a": torch.ones(3), "b": None, "c": torch.full((2, 2), 2.0)}
    bound = sgd(0.5, momentum=0.9).bind(params)
    grads = {"a": torch.ones(3), "b": None, "c": torch.ones(2, 2)}
    bound.step(grads)
    for of in COPIES.values():
        again = of(bound)
        again.step(grads)
        assert torch.equal(bound.params["a"], torch.full((3,), 0.5))
        assert torch.equal(again.params["a"], torch.full((3,), 0.5 - 0.5 * 1.9))
        assert again.params["b"] is None


def test_a_shallow_copy_is_refused() -> None:
    """Fault 27: two objects would step the same parameters."""
    bound = sgd(0.5).bind([torch.ones(2)])
    with pytest.raises(TypeError, match=r"copy\.deepcopy\(\(params, bound\)\)"):
        copy.copy(bound)
