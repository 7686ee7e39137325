"""The loops return the same gradient objects as Python, for all kinds of parameters."""

import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim.native import LOOPS
from functional_optim.plan.guard import grads_of

from .support import loops

pytestmark = pytest.mark.usefixtures("with_loops")

MANY = 30


class Own(Parameter):
    """Tensor subclass of a user."""


def parameters() -> list[Tensor]:
    made: list[Tensor] = [Parameter(torch.ones(2)) for _ in range(MANY)]
    for k, param in enumerate(made):
        if k % 3:
            param.grad = torch.full((2,), float(k))
    made[7].grad = torch.ones(2).to_sparse()
    made[8] = torch.ones(2)  # does not require a gradient
    return made


def test_they_are_the_same_objects() -> None:
    params = parameters()
    found = loops().grads(params)
    assert found is not None
    assert all(one is param.grad for one, param in zip(found, params, strict=True))


def test_those_that_autograd_made_and_nobody_has_seen() -> None:
    params = [Parameter(torch.ones(2)) for _ in range(MANY)]
    torch.stack(params).mul(2.0).sum().backward()
    found = loops().grads(params)
    assert found is not None
    assert all(one is param.grad for one, param in zip(found, params, strict=True))
    assert all(one.tolist() == [2.0, 2.0] for one in found)
    params[3].grad = None
    assert loops().grads(params)[3] is None
    assert found[3].tolist() == [2.0, 2.0]  # the list keeps the gradient


def test_what_python_has_to_ask_is_left_to_it() -> None:
    params = parameters()
    other: list[object] = [1, None, Own(torch.ones(1)), params[0] * 2]
    for one in other:
        assert loops().grads([*params, one]) is None
    with pytest.raises(TypeError):
        loops().grads(tuple(params))
    assert loops().grads([]) == []


def test_python_warns_of_the_gradient_of_a_result() -> None:
    result = Parameter(torch.ones(1)) * 2
    with pytest.warns(UserWarning, match="not a leaf"):
        assert grads_of([result]) == [None]
    result.retain_grad()
    result.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grads_of([result])[0] is result.grad


def test_there_are_the_same_without_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    found = grads_of(params)
    monkeypatch.setattr(LOOPS, "loaded", None)
    monkeypatch.setattr(LOOPS, "get", lambda count: None)
    assert all(one is other for one, other in zip(found, grads_of(params), strict=True))
