"""Parity with torch.optim(foreach=False), bit for bit, for every layout and dtype.

In 16 bits, the rounding of an element depends on its position among the strides of all operands. So
the layout of a gradient matters, too.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import chain, sgd
from functional_optim.testing import LAWS, Run, Subject
from functional_optim.testing.runs import WIDE_SHAPE, LeafSpec, Values
from tests.choices import each_value

from ..choices import case, pairs
from .twins import (
    DTYPES,
    LAYOUTS,
    TWINS,
    Twin,
    Way,
    assert_twins,
    bound,
    front_end,
    in_place,
    matrix,
    pure,
)

WAYS: dict[str, Way] = {
    "pure": pure,
    "in place": in_place,
    "in place by blocked": in_place,
    "front end": front_end,
    "bound by blocked": bound,
}


@pytest.mark.parametrize("name", TWINS)
def test_every_way_to_step_has_the_bits_of_torch(name: str) -> None:
    for one in pairs(param=list(LAYOUTS)[:-1], grad=list(LAYOUTS), dtype=DTYPES):
        if one["grad"] == "expanded" and one["dtype"].itemsize == 2:
            continue  # torch lays out a buffer by the sum of this gradient and the decay
        start = matrix(0, one["dtype"], one["param"])
        grads = [matrix(seed, one["dtype"], one["grad"]) for seed in (1, 2, 3)]
        with case(**one):
            assert_twins(TWINS[name], start, grads, WAYS)


@each_value(twin=TWINS)
def test_extreme_values(twin: Twin) -> None:
    """Infinities, NaN, denormals and huge numbers meet in every pair of parameter and gradient."""
    values = torch.tensor(
        [1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, -3e38, 1e-20, 1e20]
    )
    grid = torch.cartesian_prod(values, values)
    params = twin.apart(grid[:, 0].contiguous())
    theirs = [nn.Parameter(one.clone()) for one in params]
    optimizer, state = twin.by_torch(theirs), twin.ours.init(params)
    for index in range(4):
        grads = twin.apart((-1.0) ** index * grid[:, 1])
        for one, grad in zip(theirs, grads, strict=True):
            one.grad = grad
        optimizer.step()
        params, state = twin.ours.update(params, grads, state)
    ours = torch.cat(params)
    torch.testing.assert_close(ours, torch.cat(theirs).detach(), rtol=0, atol=0, equal_nan=True)
    assert ours.isnan().any()
    assert ours.isfinite().any()


@each_value(twin=TWINS, count=[1, 2, 3])
def test_signed_zeros(twin: Twin, count: int) -> None:
    """A ReLU makes gradients of -0.0, and torch's first momentum is a copy of the gradient."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0])
    grid = torch.cartesian_prod(values, values)
    grads = [grid[:, 1].roll(3 * index).contiguous() for index in range(count)]
    grads = [twin.taken(grad) for grad in grads]
    assert_twins(twin, twin.taken(grid[:, 0].contiguous()), grads, WAYS)


def test_the_law_catches_a_buffer_in_another_layout_than_torch_has_it_in() -> None:
    link = sgd(lr=0.1, momentum=0.9).links[-1]
    by_parameter = link._replace(stage=replace(link.stage, as_gradient=()))
    leaf = LeafSpec(WIDE_SHAPE, "transposed", Values(seed=0))
    run = Run((), torch.bfloat16, (leaf,), tuple((Values(seed=seed),) for seed in (1, 2, 3)))

    def oracle(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)

    law = LAWS["same as the oracle"].check
    law(Subject(lambda: chain(link), oracle), run)
    with pytest.raises(AssertionError, match="params and the oracle's"):
        law(Subject(lambda: chain(by_parameter), oracle), run)
