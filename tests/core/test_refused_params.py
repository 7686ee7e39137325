"""Trees of params that cannot be stepped, and errors at init with the path and the value."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import adam, sgd
from tests.choices import each_value

from .support import Frozen, noise, step
from .ways import BAD_TREES

W = torch.ones(3)


@each_value(bad=BAD_TREES, begin=["init", "bind", "script"])
def test_a_bad_tree_is_refused_before_the_first_step(bad: Any, begin: str) -> None:
    params, error, message = bad
    with pytest.raises(error, match=re.escape(message)):
        getattr(adam(), begin)(params)


LATER: list[tuple[Any, Any, type[Exception], str]] = [
    (1.5, W, TypeError, "'z' must be a tensor or None, got float"),
    ([W], W, ValueError, "no gradients at 'z.0'"),
    (torch.arange(3), torch.arange(3), ValueError, "'z' has dtype torch.int64"),
    (W.to_sparse(), W, ValueError, "'z' has layout torch.sparse_coo"),
]
"""Values that a parameter cannot have after init: (param, grad, error, text)."""


@each_value(later=LATER, method=["update", "update_"])
def test_a_step_names_a_parameter_that_became_unfit(later: Any, method: str) -> None:
    param, grad, error, message = later
    params: dict[str, Any] = {key: torch.ones(3) for key in ("a", "b", "z")}
    grads: dict[str, Any] = {key: torch.full((3,), 2.0) for key in params}
    state = sgd().init(params)
    params["z"], grads["z"] = param, grad
    frozen = Frozen(params, grads, state)
    with pytest.raises(error, match=message):
        getattr(sgd(0.1), method)(params, grads, state)
    frozen.assert_untouched()


def overlapping() -> Tensor:
    """Return rows that share elements."""
    return torch.arange(4.0).unfold(0, 2, 1)


def conjugate() -> Tensor:
    """Return a lazy conjugate.

    Its real view is a copy, so writes would not change the parameter.
    """
    return noise(0, 3, dtype=torch.complex64).conj()


UNWRITABLE: list[tuple[Tensor, str]] = [
    (W, "'z' is also at 'a'"),
    (W.detach(), "'z' shares its memory with 'a'"),
    (W.view(-1), "'z' shares its memory with 'a'"),
    (torch.ones(1).expand(3), "'z' has stride 0"),
    (overlapping(), "'z' has stride 0 or strides so small"),
    (torch.ones(7).as_strided((3, 3), (2, 1)), "'z' has stride 0 or strides so small"),
    (conjugate(), r"'z' is a lazy conj"),
]
"""Parameters that cannot be written into beside ``W`` at 'a'."""


@each_value(unwritable=UNWRITABLE)
def test_what_cannot_be_written_is_refused_in_place_and_unchanged(
    unwritable: tuple[Tensor, str],
) -> None:
    param, message = unwritable
    params = {"a": W, "z": param}
    grads = {key: torch.ones_like(one) for key, one in params.items()}
    state = sgd().init({"a": W, "z": param.clone()})
    frozen = Frozen(params, grads, state)
    with pytest.raises(ValueError, match=message):
        sgd(0.1).update_(params, grads, state)
    with pytest.raises(ValueError, match=message):
        sgd(0.1).script(params)
    frozen.assert_untouched()


@each_value(param=[torch.ones(1).expand(3), overlapping(), conjugate()])
def test_update_of_what_cannot_be_written_is_right(param: Tensor) -> None:
    grad = noise(1, *param.shape).to(param.dtype)
    assert torch.equal(step(sgd(1.0), param, grad), param.resolve_conj() - grad)
