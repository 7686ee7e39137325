"""Gradients and states that do not fit: the error names the leaf, and nothing changes.

Every fault is at the last leaf, after leaves that could step.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import LeafState, Optimizer, State, adam, adamw, rmsprop, sgd
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from .support import IN_PYTHON, Frozen, refused

Tree = dict[str, Any]
ONES = torch.ones(2, 3)

GRADS: list[tuple[Any, type[Exception], str]] = [
    (torch.ones(3, 2), ValueError, r"'z' has shape \(3, 2\), .* shape \(2, 3\)"),
    (torch.ones(3), ValueError, r"'z' has shape \(3,\), .* shape \(2, 3\)"),
    (ONES.double(), ValueError, "'z' has dtype torch.float64, .* torch.float32"),
    (ONES * 1j, ValueError, "'z' has dtype torch.complex64, .* torch.float32"),
    (ONES.to("meta"), ValueError, "'z' has device meta, .* cpu"),
    (1.5, TypeError, "'z' must be a tensor or None, got float"),
    ({"x": ONES}, TypeError, "'z' must be a tensor or None, got dict"),
    (ONES.to_sparse(), RuntimeError, "'z' has layout torch.sparse_coo, .* adam"),
]
"""Bad values for the last gradient, with their errors."""


def _average(change: Callable[[Tensor], Tensor]) -> Callable[[LeafState], LeafState]:
    """Return a function that replaces Adam's first average in the state of a leaf."""

    def spoil(leaf: LeafState) -> LeafState:
        *before, own = leaf.stages
        return leaf._replace(stages=(*before, own._replace(exp_avg=change(own.exp_avg))))

    return spoil


STATES: list[tuple[Callable[[LeafState], Any], str]] = [
    (lambda leaf: None, "'z' is NoneType, .* init"),
    (lambda leaf: rmsprop().init(ONES).leaves, "'z' .* RMSpropState.* AdamState"),
    (
        lambda leaf: leaf._replace(stages=leaf.stages[1:]),
        r"'z' .* \(nothing, AdamState\), .* \(nothing, nothing, AdamState\)",
    ),
    (lambda leaf: adam().init(torch.ones(3)).leaves, r"'z' .* \(3,\).* \(2, 3\)"),
    (
        lambda leaf: adam(amsgrad=True).init(ONES).leaves,
        "adam: .* 'z' .* max_exp_avg_sq is there but not used",
    ),
    (_average(lambda t: t.to("meta")), "exp_avg at 'z' is on meta, .* cpu"),
    (_average(Tensor.double), "exp_avg at 'z' has dtype torch.float64, .* torch.float32"),
    (_average(Tensor.bfloat16), "exp_avg at 'z' has dtype torch.bfloat16, .* torch.float32"),
    (lambda leaf: leaf._replace(step=torch.tensor([0, 1, 2])), "step count at 'z' must be"),
]
"""Bad changes of the last leaf's state, with their messages."""


def _less(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if key != "z"}


TREES: list[tuple[Callable[[Tree, Tree, State], Any], type[Exception], str]] = [
    (lambda p, g, s: (p, None, s), ValueError, "no gradients at 'a'.*'<root>'"),
    (lambda p, g, s: (p, list(g.values()), s), ValueError, "gradients at '0'"),
    (lambda p, g, s: (p, _less(g), s), ValueError, "no gradients at 'z'"),
    (
        lambda p, g, s: (p, {**g, "zz": ONES}, s),
        ValueError,
        "gradients at 'zz', where params have no leaf",
    ),
    (lambda p, g, s: ({**p, "z": None}, g, s), ValueError, "gradient at 'z'.* parameter is None"),
    (lambda p, g, s: (p, g, s.leaves), TypeError, "State.* dict"),
    (lambda p, g, s: (p, g, tuple(s)), TypeError, "State.* tuple"),
    (lambda p, g, s: (p, g, s._replace(leaves=_less(s.leaves))), ValueError, "no state at 'z'"),
    *[
        (lambda p, g, s, grad=grad: (p, {**g, "z": grad}, s), error, message)
        for grad, error, message in GRADS
    ],
    *[
        (
            lambda p, g, s, to=to: (p, g, State({**s.leaves, "z": to(s.leaves["z"])})),
            ValueError,
            message,
        )
        for to, message in STATES
    ],
]
METHODS = ("update", "update_")


@each_value(fault=TREES, method=METHODS, executor=IN_PYTHON)
def test_whatever_is_wrong_at_the_last_leaf_is_named_and_changes_nothing(
    fault: Any, method: str, executor: ExecutorName
) -> None:
    spoil, error, message = fault
    params: Tree = {key: ONES.clone() for key in ("a", "m", "z")}
    grads: Tree = {key: ONES.clone() for key in params}
    state = adam().init(params)
    bad = spoil(params, grads, state)
    frozen = Frozen(params, grads, state, *bad)
    with pytest.raises(error, match=message):
        getattr(adam(0.1).using(executor=executor), method)(*bad)
    frozen.assert_untouched()


def _refused(message: str, optimizer: Optimizer, params: Any, state: State, **hyper: Any) -> None:
    """Assert that both ways to step raise a ValueError and change nothing."""
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


@each_value(
    hyper=[{"lr": -1.0}, {"lr": "1"}, {"rate": 1.0}],
    method=METHODS,
)
def test_a_bad_hyper_parameter_changes_nothing(hyper: dict[str, Any], method: str) -> None:
    params = {"a": torch.ones(2)}
    state = adam().init(params)
    frozen = Frozen(params, state)
    error = ValueError if hyper == {"lr": -1.0} else TypeError
    with pytest.raises(error, match=next(iter(hyper))):
        getattr(adam(), method)(params, params, state, **hyper)
    frozen.assert_untouched()


def test_the_dtype_of_a_parameter_never_drifts() -> None:
    """A complex parameter does not accept a real state, either."""
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
