"""Trees of params that cannot be stepped: said at init, with the path and the value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adam, sgd

from .support import Frozen

W = torch.ones(2)
SHARED = torch.ones(3)

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "empty dict": ({}, ValueError, "no tensor"),
    "only None": ({"a": None, "b": [None]}, ValueError, "no tensor"),
    "None alone": (None, ValueError, "no tensor"),
    "number": ({"a": {"x": 1.5}}, TypeError, "'a.x' must be a tensor or None, got float"),
    "string": (["ab"], TypeError, "'0' must be a tensor or None, got str"),
    "integer": ({"a": {"i": torch.arange(3)}}, ValueError, "'a.i' has dtype torch.int64"),
    "bool": ([torch.ones(2), torch.ones(2).bool()], ValueError, "'1' has dtype torch.bool"),
    "sparse": ({"s": torch.eye(2).to_sparse()}, ValueError, "'s' has layout torch.sparse_coo"),
    "twice": ({"a": SHARED, "b": [W, SHARED]}, ValueError, "'b.1' is also at 'a'"),
    "lone integer": (torch.arange(3), ValueError, "'<root>' has dtype torch.int64"),
    "module": (torch.nn.Linear(2, 2), TypeError, "'<root>' must be a tensor or None, got Linear"),
    "generator": ((p for p in [W]), TypeError, "'<root>' must be a tensor or None, got generator"),
}


@pytest.mark.parametrize("method", ["init", "script"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_tree_is_refused_before_the_first_step(name: str, method: str) -> None:
    params, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        getattr(adam(), method)(params)
    assert message in str(caught.value)


def _good(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any], Any]:
    params = {"a": torch.ones(3), "b": torch.ones(3), "z": torch.ones(3)}
    grads = {key: torch.full((3,), 2.0) for key in params}
    return params, grads, optimizer.init(params)


LATER: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "a number": (1.5, torch.ones(3), TypeError, "'z' must be a tensor or None, got float"),
    "a list": ([torch.ones(3)], torch.ones(3), ValueError, "no gradients at 'z.0'"),
    "integers": (torch.arange(3), torch.arange(3), ValueError, "'z' has dtype torch.int64"),
    "sparse": (
        torch.ones(3).to_sparse(),
        torch.ones(3),
        ValueError,
        "'z' has layout torch.sparse_coo",
    ),
}
"""What may stand in the place of a parameter after init: (param, grad, error, text)."""


@pytest.mark.parametrize("method", ["update", "update_"])
@pytest.mark.parametrize("name", LATER)
def test_update_names_a_parameter_that_became_unfit(name: str, method: str) -> None:
    optimizer = sgd(0.1)
    params, grads, state = _good(optimizer)
    param, grad, error, message = LATER[name]
    params["z"], grads["z"] = param, grad
    frozen = Frozen(params, grads, state)
    with pytest.raises(error) as caught:
        getattr(optimizer, method)(params, grads, state)
    assert message in str(caught.value)
    frozen.assert_untouched()


def test_update_in_place_refuses_a_parameter_at_two_places() -> None:
    optimizer = sgd(0.1)
    params, grads, state = _good(optimizer)
    params["z"] = params["a"]
    frozen = Frozen(params, grads, state)
    with pytest.raises(ValueError, match="'z' is also at 'a'"):
        optimizer.update_(params, grads, state)
    frozen.assert_untouched()


@pytest.mark.parametrize("alias", [torch.detach, lambda t: t.view(-1)], ids=["detach", "view"])
def test_the_same_memory_at_two_places_is_not_stepped_twice(
    alias: Callable[[Tensor], Tensor],
) -> None:
    weight = torch.ones(3)
    params = {"a": weight, "b": alias(weight)}
    state = sgd().init({"a": weight, "b": weight.clone()})
    with pytest.raises(ValueError, match="'b' .*'a'"):
        sgd(0.1).update_(params, {"a": torch.ones(3), "b": torch.ones(3)}, state)
    assert torch.equal(weight, torch.ones(3))


def _expanded() -> Tensor:
    return torch.ones(1).expand(3)


def _overlapping() -> Tensor:
    return torch.ones(7).unfold(0, 3, 2)[:, 0].as_strided((3, 3), (2, 1))


def _conjugate() -> Tensor:
    return torch.ones(3, dtype=torch.complex64).mul(1j).conj()


def test_an_expanded_parameter_is_refused_in_place_and_unchanged() -> None:
    optimizer, params = sgd(0.1), {"a": torch.ones(3), "z": _expanded()}
    grads, state = {"a": torch.ones(3), "z": torch.ones(3)}, sgd().init(params)
    frozen = Frozen(params, grads, state)
    with pytest.raises(ValueError, match="'z' has stride 0"):
        optimizer.update_(params, grads, state)
    frozen.assert_untouched()
    new, _ = optimizer.update(params, grads, state)
    assert torch.equal(new["z"], torch.full((3,), 0.9))


@pytest.mark.parametrize("make", [_expanded, _overlapping])
def test_script_refuses_memory_it_cannot_write(make: Callable[[], Tensor]) -> None:
    params = [torch.ones(3), make()]
    with pytest.raises(ValueError, match="'1'"):
        sgd(0.1).script(params)


def test_update_of_an_overlapping_view_is_right() -> None:
    param = torch.arange(4.0).unfold(0, 2, 1)
    grad = torch.arange(6.0).reshape(3, 2)
    new, _ = sgd(lr=1.0).update(param, grad, sgd().init(param))
    assert torch.equal(new, param - grad)


def test_an_overlapping_view_is_refused_in_place() -> None:
    param = torch.arange(4.0).unfold(0, 2, 1)
    frozen = Frozen(param)
    with pytest.raises(ValueError, match="'<root>'"):
        sgd(lr=1.0).update_(param, torch.ones(3, 2), sgd().init(param))
    frozen.assert_untouched()


def test_a_conjugate_view_is_refused_in_place_and_unchanged() -> None:
    """Its real view is a copy: written into, it would leave the parameter as it was."""
    param, grad = _conjugate(), torch.ones(3, dtype=torch.complex64)
    frozen = Frozen(param)
    with pytest.raises(ValueError, match=r"'<root>' .*conj"):
        sgd(lr=1.0).update_(param, grad, sgd().init(param))
    with pytest.raises(ValueError, match=r"'0' .*conj"):
        sgd(lr=1.0).script([param])
    frozen.assert_untouched()
    new, _ = sgd(lr=1.0).update(param, grad, sgd().init(param))
    assert torch.equal(new, param.resolve_conj() - grad)
