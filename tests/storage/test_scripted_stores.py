"""What is stored otherwise, by the executor ``script``: stepped in place, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, adamw, stored
from functional_optim.kernels.errors import UnscriptableError

from ..choices import case
from ..tensors import assert_same, normal

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")

REFUSED: list[dict[str, Any]] = [
    {"param": "bfloat16+kahan"},
    {"param": "bfloat16+stochastic"},
    {"state": "bfloat16+stochastic"},
    {"state": "int8"},
]
"""They view the bits of a number, or work in blocks."""


def _pure(optimizer: Optimizer, param: Tensor, grad: Tensor) -> Tensor:
    stepped: Tensor = optimizer.update([param], [grad], optimizer.init([param]))[0][0]
    return stepped


def _in_place(optimizer: Optimizer, param: Tensor, grad: Tensor) -> Tensor:
    optimizer.update_([param], [grad], optimizer.init([param]))
    return param


def _bound(optimizer: Optimizer, param: Tensor, grad: Tensor) -> Tensor:
    optimizer.bind([param]).step([grad])
    return param


def _by_class(optimizer: Optimizer, param: Tensor, grad: Tensor) -> Tensor:
    param.requires_grad_().grad = grad
    TorchOptimizer([param], optimizer).step()
    return param.detach()


WAYS: dict[str, Callable[[Optimizer, Tensor, Tensor], Tensor]] = {
    "update": _pure,
    "update_": _in_place,
    "bind": _bound,
    "TorchOptimizer": _by_class,
}


def _given(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(600, seed=1, dtype=dtype), normal(600, seed=2, dtype=dtype)


def test_what_has_a_program_is_stepped_in_every_way_in_place() -> None:
    """A pure step is made by what TorchScript reads, and this is made of objects."""
    optimizer = stored(adamw(0.1), state="bfloat16")
    want = _pure(optimizer.using(executor="reference"), *_given(torch.float32))
    for way, step in WAYS.items():
        scripted, given = optimizer.using(executor="script"), _given(torch.float32)
        with case(way=way):
            if way == "update":
                with pytest.raises(UnscriptableError, match="is no plain function"):
                    step(scripted, *given)
            else:
                assert_same(step(scripted, *given), want)


@pytest.mark.parametrize("how", REFUSED, ids=str)
def test_what_has_none_is_refused_in_every_way(how: dict[str, Any]) -> None:
    optimizer = stored(adamw(0.1), **how).using(executor="script")
    for way, step in WAYS.items():
        param, grad = _given(torch.bfloat16 if "param" in how else torch.float32)
        before = param.clone()
        with case(way=way):
            with pytest.raises(UnscriptableError, match="use executor='reference'"):
                step(optimizer, param, grad)
            assert torch.equal(param, before)
