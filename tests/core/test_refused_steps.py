"""Gradients and states that do not fit: the error names the leaf, and nothing has changed.

Every fault stands at the last leaf, behind leaves that could have been stepped already.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import LeafState, Optimizer, State, adam, adamw, rmsprop, sgd

from .support import Frozen

Tree = dict[str, Any]
Spoil = Callable[[Tree, Tree, State], tuple[Tree, Any, Any]]


def _grad(value: Any) -> Spoil:
    return lambda params, grads, state: (params, {**grads, "z": value}, state)


def _state(change: Callable[[LeafState], Any]) -> Spoil:
    return lambda params, grads, state: (
        params,
        grads,
        state._replace(leaves={**state.leaves, "z": change(state.leaves["z"])}),
    )


def _of_other(optimizer: Optimizer, param: Tensor | None = None) -> Spoil:
    made = optimizer.init(torch.ones(2, 3) if param is None else param)
    return _state(lambda leaf: made.leaves)


def _first_average(change: Callable[[Tensor], Tensor]) -> Spoil:
    """Another tensor in place of Adam's first average."""

    def spoil(leaf: LeafState) -> LeafState:
        *before, own = leaf.stages
        return leaf._replace(stages=(*before, own._replace(exp_avg=change(own.exp_avg))))

    return _state(spoil)


def _without(key: str, of: str) -> Spoil:
    def spoil(params: Tree, grads: Tree, state: State) -> tuple[Tree, Any, Any]:
        trees = {"grads": grads, "state": state.leaves}
        trees[of] = {k: v for k, v in trees[of].items() if k != key}
        return params, trees["grads"], state._replace(leaves=trees["state"])

    return spoil


FAULTS: dict[str, tuple[Spoil, type[Exception], tuple[str, ...]]] = {
    # gradients
    "shape": (_grad(torch.ones(3, 2)), ValueError, ("'z'", "shape (3, 2)", "shape (2, 3)")),
    "broadcastable": (_grad(torch.ones(3)), ValueError, ("'z'", "shape (3,)", "shape (2, 3)")),
    "dtype": (_grad(torch.ones(2, 3).double()), ValueError, ("'z'", "float64", "float32")),
    "complex": (_grad(torch.ones(2, 3) * 1j), ValueError, ("'z'", "complex64", "float32")),
    "device": (_grad(torch.ones(2, 3, device="meta")), ValueError, ("'z'", "meta", "cpu")),
    "number": (_grad(1.5), TypeError, ("'z'", "tensor or None", "float")),
    "tree": (_grad({"x": torch.ones(2, 3)}), TypeError, ("'z'", "tensor or None", "dict")),
    "sparse": (_grad(torch.ones(2, 3).to_sparse()), RuntimeError, ("'z'", "sparse_coo", "adam")),
    "none": (lambda p, g, s: (p, None, s), ValueError, ("no gradients at 'a'", "'<root>'")),
    "list": (lambda p, g, s: (p, list(g.values()), s), ValueError, ("gradients at '0'",)),
    "missing": (_without("z", "grads"), ValueError, ("no gradients at 'z'",)),
    "extra": (
        lambda p, g, s: (p, {**g, "zz": torch.ones(1)}, s),
        ValueError,
        ("gradients at 'zz', where params have no leaf",),
    ),
    "at None": (
        lambda p, g, s: ({**p, "z": None}, g, s),
        ValueError,
        ("gradient at 'z'", "parameter is None"),
    ),
    # states
    "no State": (lambda p, g, s: (p, g, s.leaves), TypeError, ("State", "dict")),
    "plain tuple": (lambda p, g, s: (p, g, tuple(s)), TypeError, ("State", "tuple")),
    "no leaf": (_state(lambda leaf: None), ValueError, ("'z'", "NoneType", "init")),
    "other rule": (_of_other(rmsprop()), ValueError, ("'z'", "RMSpropState", "AdamState")),
    "other length": (
        _state(lambda leaf: leaf._replace(stages=leaf.stages[1:])),
        ValueError,
        ("'z'", "(nothing, AdamState)", "(nothing, nothing, AdamState)"),
    ),
    "other tree": (_of_other(adam(), torch.ones(3)), ValueError, ("'z'", "(3,)", "(2, 3)")),
    "other options": (
        _of_other(adam(amsgrad=True)),
        ValueError,
        ("adam", "'z'", "max_exp_avg_sq is there but not used"),
    ),
    "state without leaf": (_without("z", "state"), ValueError, ("no state at 'z'",)),
    "state elsewhere": (_first_average(lambda t: t.to("meta")), ValueError, ("'z'", "meta", "cpu")),
    "state in another dtype": (
        _first_average(Tensor.double),
        ValueError,
        ("'z'", "exp_avg", "float64", "float32"),
    ),
    "state in a shorter dtype": (
        _first_average(Tensor.bfloat16),
        ValueError,
        ("'z'", "exp_avg", "bfloat16", "float32"),
    ),
    "stacked step counts": (
        _state(lambda leaf: leaf._replace(step=torch.tensor([0, 1, 2]))),
        ValueError,
        ("'z'", "step"),
    ),
}


@pytest.mark.parametrize("method", ["update", "update_"])
@pytest.mark.parametrize("name", FAULTS)
def test_whatever_is_wrong_at_the_last_leaf_is_named_and_changes_nothing(
    name: str, method: str
) -> None:
    spoil, error, words = FAULTS[name]
    optimizer = adam(0.1)
    params: Tree = {key: torch.ones(2, 3) for key in ("a", "m", "z")}
    grads: Tree = {key: torch.ones(2, 3) for key in params}
    state = optimizer.init(params)
    frozen = Frozen(params, grads, state)
    bad = spoil(params, grads, state)
    frozen_bad = Frozen(*bad)
    with pytest.raises(error) as caught:
        getattr(optimizer, method)(*bad)
    for word in words:
        assert word in str(caught.value)
    frozen.assert_untouched()
    frozen_bad.assert_untouched()


@pytest.mark.parametrize("method", ["update", "update_"])
def test_an_option_that_init_did_not_have_is_named(method: str) -> None:
    params, state = {"a": torch.ones(2)}, adamw().init({"a": torch.ones(2)})
    frozen = Frozen(params, state)
    with pytest.raises(ValueError, match=r"adam: the state at 'a' .* max_exp_avg_sq is missing"):
        getattr(adamw(amsgrad=True), method)(params, params, state)
    with pytest.raises(ValueError, match="max_exp_avg_sq is missing"):
        getattr(adamw(), method)(params, params, state, amsgrad=True)
    frozen.assert_untouched()


@pytest.mark.parametrize("method", ["update", "update_"])
def test_an_option_for_some_leaves_only_is_checked_per_leaf(method: str) -> None:
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    optimizer = sgd(0.1).override(("b",), momentum=0.9)
    state = optimizer.init(params)
    assert [len(state.leaves[k].stages[-1].momentum_buffer) for k in "ab"] == [0, 1]
    getattr(optimizer, method)(params, params, state)
    with pytest.raises(ValueError, match=r"'b' .* momentum_buffer is there but not used"):
        getattr(sgd(0.1), method)(params, params, state)


@pytest.mark.parametrize("method", ["update", "update_"])
@pytest.mark.parametrize(
    ("hyper", "error"),
    [({"lr": -1.0}, ValueError), ({"lr": "1"}, TypeError), ({"rate": 1.0}, TypeError)],
)
def test_a_bad_hyper_parameter_changes_nothing(
    method: str, hyper: dict[str, Any], error: type[Exception]
) -> None:
    params = {"a": torch.ones(2)}
    state = adam().init(params)
    frozen = Frozen(params, state)
    with pytest.raises(error, match=next(iter(hyper))):
        getattr(adam(), method)(params, params, state, **hyper)
    frozen.assert_untouched()


@pytest.mark.parametrize("method", ["update", "update_"])
def test_a_schedule_out_of_bounds_at_the_last_leaf_changes_nothing(method: str) -> None:
    params = {"a": torch.ones(2), "z": torch.ones(2)}
    optimizer = adam(0.1).override(("z",), lr=lambda made: -1.0)
    state = optimizer.init(params)
    frozen = Frozen(params, state)
    with pytest.raises(ValueError, match=r"lr .* schedule.* must be a finite number >= 0, got -1"):
        getattr(optimizer, method)(params, params, state)
    frozen.assert_untouched()


def test_a_real_state_is_not_taken_for_a_complex_parameter() -> None:
    optimizer = adam(0.1)
    param = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.update(param, param, optimizer.init(torch.ones(2)))


def test_the_dtype_of_a_parameter_never_drifts() -> None:
    optimizer = sgd(0.1, momentum=0.9)
    param = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="momentum_buffer"):
        optimizer.update(param, param, optimizer.init(torch.ones(2)))


def test_a_leaf_without_a_gradient_may_have_left() -> None:
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = adam().init(params)
    new, new_state = adam().update(
        {"a": params["a"], "b": None}, {"a": params["a"], "b": None}, state
    )
    assert new["b"] is None
    assert new_state.leaves["b"] is state.leaves["b"]
