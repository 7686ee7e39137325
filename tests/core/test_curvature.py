"""Estimates of a Hessian's diagonal, compared with the diagonal, and an optimizer for them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import hutchinson, sophia
from tests.tensors import assert_same, normal


def test_a_quadratic_is_solved_in_one_step() -> None:
    """With exact curvature and no averages, the step is Newton's."""
    sizes = torch.tensor([1.0, 8.0, 0.125])

    def loss(params: Any) -> Tensor:
        return (sizes * params["w"].square()).sum() / 2

    params = {"w": torch.tensor([0.5, -0.25, 1.0])}
    optimizer = sophia(1.0, (0.0, 0.0), 1.0, weight_decay=0.0)
    grads, hessian = hutchinson(loss, params)
    new, _ = optimizer.update(params, grads, optimizer.init(params), extra={"hessian": hessian})
    assert new["w"].tolist() == [0.0, 0.0, 0.0]


def test_an_estimate_is_exact_where_the_hessian_is_diagonal() -> None:
    sizes = {"a": normal(3, 2), "b": normal(4, seed=1)}

    def loss(params: Any) -> Tensor:
        parts = [(sizes[name] * one.square()).sum() / 2 for name, one in params.items()]
        return torch.stack(parts).sum()

    params = {"a": normal(3, 2, seed=2).requires_grad_(), "b": normal(4, seed=3)}
    grads, hessian = hutchinson(loss, params, samples=2)
    assert_same(hessian, sizes)
    assert_same(grads, {name: sizes[name] * one.detach() for name, one in params.items()})
    assert not any(one.requires_grad for one in hessian.values())


def test_an_estimate_tends_to_the_diagonal() -> None:
    """The Hessian is not diagonal here, and the same random signs give the same estimate."""
    half = normal(4, 4, dtype=torch.float64)
    matrix = half @ half.T

    def loss(point: Tensor) -> Tensor:
        return point @ matrix @ point / 2

    point = normal(4, seed=1, dtype=torch.float64)
    made = [
        hutchinson(loss, point, samples=n, generator=torch.Generator().manual_seed(0))
        for n in (1, 1, 4096)
    ]
    assert_same(made[0], made[1])
    torch.testing.assert_close(made[0][0], matrix @ point)
    torch.testing.assert_close(made[2][1], matrix.diagonal(), rtol=0.0, atol=0.3)
    assert float((made[0][1] - matrix.diagonal()).abs().max()) > 0.3


@pytest.mark.parametrize("bad", [torch.ones(2, dtype=torch.int64), None, 1.0])
def test_an_estimate_is_of_floating_tensors(bad: Any) -> None:
    with pytest.raises(TypeError, match="params must be floating tensors"):
        hutchinson(lambda params: params["a"].sum(), {"a": torch.ones(2), "b": bad})
    with pytest.raises(ValueError, match=r"samples must be a whole number >= 1, got 0"):
        hutchinson(torch.sum, torch.ones(2), samples=0)
