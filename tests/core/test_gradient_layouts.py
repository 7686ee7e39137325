"""Gradients with other strides than their parameter's: the bits of torch's loop (fault 8).

In 16 bits a kernel rounds an element by where it stands among the strides of all operands.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, chain, sgd
from functional_optim.executors import ExecutorName
from functional_optim.testing import CASES, LawBroken, check_optimizer
from functional_optim.testing.compare import same
from functional_optim.testing.runs import laid_out

SHAPE = (33, 17)
EXECUTORS: tuple[ExecutorName, ...] = ("reference", "blocked", "script", "auto")
LAYOUTS = ("contiguous", "transposed", "sliced")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    ],
    "rmsprop": [{"momentum": 0.9, "centered": True}],
    "adam": [{"amsgrad": True, "weight_decay": 0.1}],
}
TABLE = [
    (name, options)
    for name, case in CASES.items()
    if isinstance(case.oracle, type)
    for options in OPTIONS.get(name, [{}])
]


def noise(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).to(dtype)


def by_torch(
    name: str, options: dict[str, Any], dtype: torch.dtype, param: str, grad: str
) -> Tensor:
    theirs = torch.nn.Parameter(laid_out(noise(0, dtype), param))
    oracle: Any = CASES[name].oracle
    optimizer = oracle([theirs], foreach=False, **options)
    for step in (1, 2, 3):
        theirs.grad = laid_out(noise(step, dtype), grad)
        optimizer.step()
    return theirs.detach()


Front = Callable[[Optimizer, Tensor, list[Tensor]], Tensor]
"""``(optimizer, parameter, gradients)`` -> the parameter after a step for each gradient."""


def pure(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Tensor:
    state = optimizer.init(param)
    strides = param.stride()
    for one in grads:
        param, state = optimizer.update(param, one, state)
    assert param.stride() == strides
    return param


def in_place(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Tensor:
    state = optimizer.init(param)
    for one in grads:
        optimizer.update_(param, one, state)
    return param


def front_end(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Tensor:
    made = torch.nn.Parameter(param)
    front = TorchOptimizer([made], optimizer)
    for one in grads:
        made.grad = one
        front.step()
    return made.detach()


def bound(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Tensor:
    steps = optimizer.bind(param)
    for one in grads:
        steps.step(one)
    return param


def program(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> Tensor:
    made = optimizer.script(param)
    for one in grads[:-1]:
        made.step([one])
    made.step_param(param, grads[-1])
    return param


FRONTS: list[tuple[Front, ExecutorName]] = [
    (pure, "reference"),
    *((front, name) for front in (in_place, front_end, bound) for name in EXECUTORS),
    (program, "script"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("grad", LAYOUTS)
@pytest.mark.parametrize("param", LAYOUTS)
@pytest.mark.parametrize(("name", "options"), TABLE)
def test_every_front_end_has_the_bits_of_torch(
    name: str, options: dict[str, Any], param: str, grad: str, dtype: torch.dtype
) -> None:
    """(fault 8)"""
    want = by_torch(name, options, dtype, param, grad)
    optimizer = CASES[name].factory(**options)
    for front, executor in FRONTS:
        grads = [laid_out(noise(step, dtype), grad) for step in (1, 2, 3)]
        start = laid_out(noise(0, dtype), param)
        got = front(optimizer.using(executor=executor), start, grads)
        assert same(got, want), (front.__name__, executor)


def momentum(*, laid_out_by_the_parameter: bool) -> Optimizer:
    link = sgd(lr=0.1, momentum=0.9).links[-1]
    fields = () if laid_out_by_the_parameter else link.stage.as_gradient
    return chain(link._replace(stage=replace(link.stage, as_gradient=fields)))


def test_the_law_catches_a_buffer_in_another_layout_than_torch_has_it_in() -> None:
    """(fault 8)"""

    def check(*, laid_out_by_the_parameter: bool) -> None:
        check_optimizer(
            lambda: momentum(laid_out_by_the_parameter=laid_out_by_the_parameter),
            lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
            dtypes=[torch.bfloat16],
            laws=["same as the oracle"],
            max_examples=150,
        )

    check(laid_out_by_the_parameter=False)
    with pytest.raises(LawBroken, match="transposed"):
        check(laid_out_by_the_parameter=True)
