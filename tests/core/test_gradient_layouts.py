"""Gradients with other strides than their parameter's: the bits of torch's loop (fault 8).

In 16 bits a kernel rounds an element by where it stands among the strides of all operands.
"""

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

    def grads() -> list[Tensor]:
        return [laid_out(noise(step, dtype), grad) for step in (1, 2, 3)]

    def start() -> Tensor:
        return laid_out(noise(0, dtype), param)

    pure, state = start(), optimizer.init(start())
    for one in grads():
        pure, state = optimizer.update(pure, one, state)
    assert same(pure, want)
    assert pure.stride() == start().stride()

    executors: list[ExecutorName] = ["reference", "blocked", "script"]
    for executor in executors:
        here = optimizer.using(executor=executor)
        written = start()
        kept = here.init(written)
        for one in grads():
            here.update_(written, one, kept)
        assert same(written, want), executor
        ours = torch.nn.Parameter(start())
        front = TorchOptimizer([ours], here)
        for one in grads():
            ours.grad = one
            front.step()
        assert same(ours, want), executor

    bound = start()
    steps = optimizer.using(executor="blocked").bind(bound)
    for one in grads():
        steps.step(one)
    assert same(bound, want)

    scripted = start()
    program = optimizer.script(scripted)
    for k, one in enumerate(grads()):
        if k < 2:
            program.step([one])
        else:
            program.step_param(program.params[0], one)
    assert same(scripted, want)


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
