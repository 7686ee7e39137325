"""Derivatives through a step where a gradient is zero: finite, with ``eps_root`` (fault 10)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    lion,
    qhm,
    rmsprop,
    rprop,
    sgd,
)

from ..choices import case
from .support import refused, step, steps

ROOTED: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda **kw: adam(0.1, weight_decay=0.01, **kw),
    "amsgrad": lambda **kw: adam(0.1, amsgrad=True, **kw),
    "adamw": lambda **kw: adamw(0.1, **kw),
    "adamw amsgrad": lambda **kw: adamw(0.1, amsgrad=True, **kw),
    "rmsprop": lambda **kw: rmsprop(0.1, **kw),
    "rmsprop centered": lambda **kw: rmsprop(0.1, centered=True, momentum=0.9, **kw),
    "adagrad": lambda **kw: adagrad(0.1, lr_decay=0.1, **kw),
}
OTHERS = {
    "adadelta": adadelta(0.1),
    "adagrad from 0.1": adagrad(0.1, initial_accumulator_value=0.1),
    "adamax": adamax(0.1),
    "clipped": chain(clip_by_global_norm(1.0), sgd(0.1)),
    "clipped by value": chain(clip_by_value(1.0), sgd(0.1)),
    "lion": lion(0.1),
    "qhm": qhm(0.1),
    "rprop": rprop(0.1),
    "sgd": sgd(0.1, momentum=0.9),
}
NOWHERE = (0.0, 0.0, 0.0)
START = (2.0, 0.0, 0.0)
"""The gradient of the sum of fourth powers is 0 at 0."""


def hyper_gradient(
    optimizer: Optimizer, start_from: tuple[float, ...] = START
) -> tuple[Tensor, Tensor]:
    """The derivatives of what is reached, by the start and by the learning rate."""
    start = torch.tensor(start_from, dtype=torch.float64)

    def reached(params: Tensor, lr: Tensor) -> Tensor:
        state = optimizer.init(params)
        for _ in range(3):
            grads = torch.func.grad(lambda one: (one**4).sum())(params)
            params, state = optimizer.update(params, grads, state, lr=lr)
        return (params * torch.tensor([1.0, 2.0, 3.0])).sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    by_start, by_lr = torch.func.grad(reached, argnums=(0, 1))(start, lr)
    return by_start, by_lr


def is_finite(derivatives: tuple[Tensor, Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in derivatives)


def test_eps_root_makes_meta_gradients_finite() -> None:
    """Without it they are not, as the docstrings say: this is why it is there (fault 10)."""
    for name, make in ROOTED.items():
        with case(name=name):
            derivatives = hyper_gradient(make(eps_root=1e-8))
            assert is_finite(derivatives)
            assert float(derivatives[0].abs().sum()) > 0
            assert bool(hyper_gradient(make())[0].isnan().any())


def test_the_others_need_none() -> None:
    """(fault 10)"""
    for name, optimizer in OTHERS.items():
        for start in (START, NOWHERE):
            with case(name=name, start=start):
                assert is_finite(hyper_gradient(optimizer, start))


def test_it_may_itself_be_differentiated() -> None:
    """(fault 10)"""
    params, grads = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 0.0]).double()
    for name, make in ROOTED.items():
        optimizer = make(eps_root=1e-3)

        def stepped(eps_root: Tensor, optimizer: Optimizer = optimizer) -> Tensor:
            return step(optimizer, params, grads, eps_root=eps_root)[0]

        at = torch.tensor(1e-3, dtype=torch.float64)
        slope = torch.func.grad(stepped)(at)
        around = [stepped(at + h) for h in (1e-7, -1e-7)]
        with case(name=name):
            assert float(slope) == pytest.approx(float(around[0] - around[1]) / 2e-7, rel=1e-5)
            assert float(slope) != 0.0


def test_it_stands_where_the_formula_has_it() -> None:
    """Beside the bias-corrected average, before eps (fault 10)."""
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


def test_zero_is_the_chain_that_has_none() -> None:
    """The same stages, so the same program, bits, groups and checkpoints as ever (fault 10)."""
    for name, make in ROOTED.items():
        with case(name=name):
            assert make() == make(eps_root=0.0) == make(eps_root=0)
            assert "eps_root" not in make().hyper
            assert make(eps_root=1e-8).hyper["eps_root"] == 1e-8
            for bad in (-1e-8, float("nan")):
                with refused(ValueError, "eps_root must be", bad=bad):
                    make(eps_root=bad)
