"""Complex parameters: what the real view gives, bit for bit, in every front-end.

torch.optim sees most complex parameters through their real view too; where it adds complex numbers
instead (SGD, and every coupled weight decay), it rounds otherwise than itself on the real view.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import TorchOptimizer, as_functional_optim, from_torch

from .support import CASES, Case, assert_same_tensors, noise, parameters, params_of, twins
from .test_from_torch import assert_continued, live, run

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def adds_complex_numbers(case: Case) -> bool:
    cls, options = case
    return (
        cls is torch.optim.SGD
        or (cls is torch.optim.RMSprop and "momentum" in options)
        or ("weight_decay" in options and not decoupled(case))
    )


def decoupled(case: Case) -> bool:
    cls, options = case
    return cls is torch.optim.AdamW or "decoupled_weight_decay" in options


AS_ITSELF = {name: case for name, case in CASES.items() if not adds_complex_numbers(case)}


def as_real(params: list[Any]) -> list[Any]:
    return [torch.nn.Parameter(torch.view_as_real(p.detach()).clone()) for p in params]


def complex_grads(params: list[Tensor], seed: int) -> list[Tensor]:
    return [noise(31 * seed + i, *p.shape, dtype=p.dtype) for i, p in enumerate(params)]


@every_case
def test_torch_optimizer_is_torch_s_class_on_the_real_view(case: Case) -> None:
    cls, options = case
    params = parameters(1, torch.complex64)
    seen = as_real(params)
    ours = TorchOptimizer(params, as_functional_optim(cls, **options))
    theirs = live(case, seen)
    for seed in range(4):
        for param, view, grad in zip(params, seen, complex_grads(params, seed), strict=True):
            param.grad, view.grad = grad, torch.view_as_real(grad)
        ours.step()
        theirs.step()
    assert_same_tensors([torch.view_as_real(p.detach()) for p in params], seen)


@every_case
def test_from_torch_is_torch_s_class_on_the_real_view(case: Case) -> None:
    optimizer = live(case, parameters(1, torch.complex64))
    run(optimizer, range(3), without={1})
    seen = as_real(params_of(optimizer))
    twin = live(case, seen)
    written = optimizer.state_dict()
    written["state"] = {
        number: {
            key: torch.view_as_real(value).clone() if torch.is_complex(value) else value.clone()
            for key, value in entries.items()
        }
        for number, entries in written["state"].items()
    }
    twin.load_state_dict(written)
    chain, params, state = from_torch(optimizer)
    for seed in range(60, 63):
        grads = complex_grads(params_of(optimizer), seed)
        tree = (dict(zip(params[0], grads, strict=True)),)
        params, state = chain.update(params, tree, state)
        for view, grad in zip(seen, grads, strict=True):
            view.grad = torch.view_as_real(grad)
        twin.step()
        assert_same_tensors([torch.view_as_real(p.detach()) for p in params[0].values()], seen)


@pytest.mark.parametrize("case", AS_ITSELF.values(), ids=AS_ITSELF)
def test_where_torch_sees_the_real_view_it_is_torch_s_class(case: Case) -> None:
    pair = twins(case, torch.complex64)
    for seed in range(4):
        pair.step(seed, without={seed})
        pair.assert_same()
    assert_continued(pair.theirs)
