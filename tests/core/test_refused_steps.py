"""Gradients and states that do not fit: the error names the leaf, and nothing has changed.

Every fault stands at the last leaf, behind leaves that could have been stepped already.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import LeafState, Optimizer, State, adam, adamw, rmsprop, sgd

from ..choices import case, pairs
from .support import IN_PYTHON, Frozen, refused

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


METHODS = ("update", "update_")


def test_whatever_is_wrong_at_the_last_leaf_is_named_and_changes_nothing() -> None:
    optimizer = adam(0.1)
    for one in pairs(name=list(FAULTS), method=METHODS, executor=IN_PYTHON):
        spoil, error, words = FAULTS[one["name"]]
        params: Tree = {key: torch.ones(2, 3) for key in ("a", "m", "z")}
        grads: Tree = {key: torch.ones(2, 3) for key in params}
        state = optimizer.init(params)
        bad = spoil(params, grads, state)
        frozen = Frozen(params, grads, state, *bad)
        with case(**one):
            with pytest.raises(error) as caught:
                getattr(optimizer.using(executor=one["executor"]), one["method"])(*bad)
            assert [word for word in words if word not in str(caught.value)] == []
            frozen.assert_untouched()


def _refused(message: str, optimizer: Optimizer, params: Any, state: State, **hyper: Any) -> None:
    """Both ways to step raise a ValueError, and nothing has changed."""
    frozen = Frozen(params, state)
    for method in METHODS:
        with refused(ValueError, message, method=method):
            getattr(optimizer, method)(params, params, state, **hyper)
        frozen.assert_untouched()


def test_an_option_that_init_did_not_have_is_named() -> None:
    params, state = {"a": torch.ones(2)}, adamw().init({"a": torch.ones(2)})
    missing = r"adam: the state at 'a' .* max_exp_avg_sq is missing"
    _refused(missing, adamw(amsgrad=True), params, state)
    _refused(missing, adamw(), params, state, amsgrad=True)


def test_an_option_for_some_leaves_only_is_checked_per_leaf() -> None:
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    optimizer = sgd(0.1).override(("b",), momentum=0.9)
    state = optimizer.init(params)
    assert [len(state.leaves[k].stages[-1].momentum_buffer) for k in "ab"] == [0, 1]
    optimizer.update_(params, params, optimizer.update(params, params, state)[1])
    _refused(r"'b' .* momentum_buffer is there but not used", sgd(0.1), params, state)


def test_a_schedule_out_of_bounds_at_the_last_leaf_changes_nothing() -> None:
    params = {"a": torch.ones(2), "z": torch.ones(2)}
    optimizer = adam(0.1).override(("z",), lr=lambda made: -1.0)
    message = r"lr .* schedule.* must be a finite number >= 0, got -1"
    _refused(message, optimizer, params, optimizer.init(params))


def test_a_bad_hyper_parameter_changes_nothing() -> None:
    params = {"a": torch.ones(2)}
    state = adam().init(params)
    frozen = Frozen(params, state)
    hypers: list[tuple[Any, type[Exception]]] = [
        ({"lr": -1.0}, ValueError),
        ({"lr": "1"}, TypeError),
        ({"rate": 1.0}, TypeError),
    ]
    for hyper, error in hypers:
        for method in METHODS:
            with refused(error, next(iter(hyper)), **hyper):
                getattr(adam(), method)(params, params, state, **hyper)
    frozen.assert_untouched()


def test_the_dtype_of_a_parameter_never_drifts() -> None:
    """Nor is a real state taken for a complex parameter."""
    for optimizer, dtype, field in (
        (sgd(0.1, momentum=0.9), torch.bfloat16, "momentum_buffer"),
        (adam(0.1), torch.complex64, "exp_avg"),
    ):
        param = torch.ones(2, dtype=dtype)
        _refused(field, optimizer, param, optimizer.init(torch.ones(2)))


def test_a_leaf_without_a_gradient_may_have_left() -> None:
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = adam().init(params)
    left = {"a": params["a"], "b": None}
    new, new_state = adam().update(left, left, state)
    assert new["b"] is None
    assert new_state.leaves["b"] is state.leaves["b"]
