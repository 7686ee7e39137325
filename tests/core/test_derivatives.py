"""Derivatives through steps: equal to finite differences, and finite at zero gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adagrad,
    adam,
    adamw,
    algorithms,
    chain,
    clip_by_global_norm,
    clip_by_value,
    rmsprop,
    rprop,
    sgd,
)
from tests.choices import each_value

from .support import EVERY, noise, refused, step, steps

ROOTED: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda **kw: adam(0.1, weight_decay=0.01, **kw),
    "amsgrad": lambda **kw: adam(0.1, amsgrad=True, **kw),
    "adamw": lambda **kw: adamw(0.1, **kw),
    "adamw amsgrad": lambda **kw: adamw(0.1, amsgrad=True, **kw),
    "rmsprop": lambda **kw: rmsprop(0.1, **kw),
    "rmsprop centered": lambda **kw: rmsprop(0.1, centered=True, momentum=0.9, **kw),
    "adagrad": lambda **kw: adagrad(0.1, lr_decay=0.1, **kw),
}
"""Optimizers that take the root of a number that can be zero."""

OTHERS: dict[str, Optimizer] = {
    **{name: getattr(algorithms, name)(0.1) for name in ("adadelta", "adamax", "lion", "qhm")},
    "adagrad from 0.1": adagrad(0.1, initial_accumulator_value=0.1),
    "clipped": chain(clip_by_global_norm(1.0), sgd(0.1)),
    "clipped by value": chain(clip_by_value(1.0), sgd(0.1)),
    "rprop": rprop(0.1),
    "sgd": sgd(0.1, momentum=0.9),
}


def _loss(p: Tensor, data: Tensor) -> Tensor:
    return (data * p**2).sum() / 2 + (p**4).sum() / 8 + (p[1:] * p[:-1]).sum()


@each_value(
    optimizer={**EVERY, **{f"rooted {name}": make(eps_root=0.1) for name, make in ROOTED.items()}}
)
def test_derivatives_through_unrolled_steps_are_finite_differences(optimizer: Optimizer) -> None:
    """Derivatives are by the start, by the learning rate, and by the data in the inner loss.

    A missing derivative of the gradient, the state or the parameter would show here.
    """

    def unrolled(p: Tensor, lr: Tensor, data: Tensor) -> Tensor:
        state = optimizer.init(p)
        for _ in range(3):
            (grad,) = torch.autograd.grad(_loss(p, data), p, create_graph=True)
            p, state = optimizer.update(p, grad, state, lr=lr)
        return p

    rate = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    inputs = noise(0, 3).requires_grad_(), rate, noise(1, 3).square().requires_grad_()
    assert torch.autograd.gradcheck(unrolled, inputs)


def hyper_gradient(optimizer: Optimizer, *start: float) -> list[Tensor]:
    """Return the derivatives of the result by the start and by the learning rate.

    At 0, the gradient of the sum of fourth powers is 0.
    """

    def reached(params: Tensor, lr: Tensor) -> Tensor:
        state = optimizer.init(params)
        for _ in range(3):
            grads = torch.func.grad(lambda one: (one**4).sum())(params)
            params, state = optimizer.update(params, grads, state, lr=lr)
        return (params * torch.tensor([1.0, 2.0, 3.0])).sum()

    given = torch.tensor(start, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    return list(torch.func.grad(reached, argnums=(0, 1))(*given))


@each_value(make=ROOTED)
def test_eps_root_makes_meta_gradients_finite(make: Callable[..., Optimizer]) -> None:
    """Without eps_root, the derivatives are NaN, as the docstrings say."""
    derivatives = hyper_gradient(make(eps_root=1e-8), 2.0, 0.0, 0.0)
    assert all(bool(one.isfinite().all()) for one in derivatives)
    assert float(derivatives[0].abs().sum()) > 0
    assert bool(hyper_gradient(make(), 2.0, 0.0, 0.0)[0].isnan().any())


@each_value(optimizer=OTHERS, first=[2.0, 0.0])
def test_the_others_need_none(optimizer: Optimizer, first: float) -> None:
    derivatives = hyper_gradient(optimizer, first, 0.0, 0.0)
    assert all(bool(one.isfinite().all()) for one in derivatives)


def test_eps_root_stands_where_the_formula_has_it() -> None:
    """eps_root is added under the root, to Adam's bias-corrected average, and eps after it."""
    grads = [torch.tensor([3.0, 0.0]).double(), torch.tensor([-1.0, 0.0]).double()]
    params = torch.tensor([1.0, 2.0]).double()
    optimizer = adam(0.1, (0.9, 0.99), eps=1e-3, eps_root=0.5)
    got, _ = steps(optimizer, params, lambda index: grads[index], 2)
    m, v, want = torch.zeros(2).double(), torch.zeros(2).double(), params
    for number, grad in enumerate(grads, start=1):
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
        m_hat, v_hat = m / (1 - 0.9**number), v / (1 - 0.99**number)
        want = want - 0.1 * m_hat / ((v_hat + 0.5) ** 0.5 + 1e-3)
    assert torch.allclose(got, want, rtol=1e-12)
    total = grads[0] ** 2
    expected = params - 0.1 * grads[0] / ((total + 0.5) ** 0.5 + 1e-10)
    assert torch.allclose(step(adagrad(0.1, eps_root=0.5), params, grads[0]), expected)
    expected = params - 0.1 * grads[0] / ((0.01 * total + 0.5) ** 0.5 + 1e-8)
    assert torch.allclose(step(rmsprop(0.1, eps_root=0.5), params, grads[0]), expected)


@each_value(make=ROOTED)
def test_an_eps_root_of_zero_is_the_chain_that_has_none(make: Callable[..., Optimizer]) -> None:
    """An eps_root of zero gives an equal optimizer, which has no such hyper-parameter."""
    assert make() == make(eps_root=0.0) == make(eps_root=0)
    assert "eps_root" not in make().hyper
    assert make(eps_root=1e-8).hyper["eps_root"] == 1e-8
    for bad in (-1e-8, float("nan")):
        with refused(ValueError, "eps_root must be", bad=bad):
            make(eps_root=bad)
