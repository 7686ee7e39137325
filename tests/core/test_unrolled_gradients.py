"""Derivatives through k unrolled updates, against formulas written here without the library.

Each formula is the textbook's, in plain tensor arithmetic; autograd differentiates both.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adamw,
    chain,
    clip_by_global_norm,
    rmsprop,
    rprop,
    sgd,
)

from ..choices import case
from .support import EVERY, noise, step, steps

STEPS = 4
Formula = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]
"""(parameter, learning rate, gradient) -> the parameter after STEPS steps."""


def nesterov(p: Tensor, lr: Tensor, grad: Callable[[Tensor], Tensor]) -> Tensor:
    buffer = torch.zeros_like(p)
    for _ in range(STEPS):
        g = grad(p)
        buffer = 0.9 * buffer + g
        p = p - lr * (g + 0.9 * buffer)
    return p


def adam_w(p: Tensor, lr: Tensor, grad: Callable[[Tensor], Tensor]) -> Tensor:
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = grad(p)
        p = p * (1 - lr * 0.2)
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g**2
        p = p - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3)
    return p


def centered(p: Tensor, lr: Tensor, grad: Callable[[Tensor], Tensor]) -> Tensor:
    v, mean, buffer = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    for _ in range(STEPS):
        g = grad(p)
        v = 0.7 * v + 0.3 * g**2
        mean = 0.7 * mean + 0.3 * g
        buffer = 0.9 * buffer + g / ((v - mean**2) ** 0.5 + 1e-8)
        p = p - lr * buffer
    return p


def clipped(p: Tensor, lr: Tensor, grad: Callable[[Tensor], Tensor]) -> Tensor:
    for _ in range(STEPS):
        g = grad(p)
        scale = 0.5 / ((g * g).sum().sqrt() + 1e-6)
        p = p - lr * g * torch.where(scale < 1, scale, torch.ones_like(scale))
    return p


FORMULAS: dict[str, tuple[Optimizer, Formula]] = {
    "nesterov": (sgd(momentum=0.9, nesterov=True), nesterov),
    "adamw": (adamw(betas=(0.9, 0.99), eps=1e-3, weight_decay=0.2), adam_w),
    "rmsprop": (rmsprop(alpha=0.7, momentum=0.9, centered=True), centered),
    "clipped": (chain(clip_by_global_norm(0.5), sgd()), clipped),
}


def _loss(p: Tensor, data: Tensor) -> Tensor:
    return (data * p**2).sum() / 2 + (p**4).sum() / 8 + (p[1:] * p[:-1]).sum()


def _gradient(p: Tensor, data: Tensor) -> Tensor:
    """Of ``_loss`` by ``p``, by hand, so that it can be differentiated plainly."""
    zero = torch.zeros_like(p[:1])
    neighbours = torch.cat([p[1:], zero]) + torch.cat([zero, p[:-1]])
    return data * p + p**3 / 2 + neighbours


def _unrolled(optimizer: Optimizer, p: Tensor, lr: Tensor, data: Tensor) -> Tensor:
    state = optimizer.init(p)
    for _ in range(STEPS):
        (grad,) = torch.autograd.grad(_loss(p, data), p, create_graph=True)
        p, state = optimizer.update(p, grad, state, lr=lr)
    return p


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    rate = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    return noise(0, 4).requires_grad_(), rate, noise(1, 4).square().requires_grad_()


@pytest.mark.parametrize("name", FORMULAS)
def test_derivatives_equal_those_of_the_formula(name: str) -> None:
    """By the starting point, by the learning rate, and by the data in the inner loss."""
    optimizer, formula = FORMULAS[name]
    p, lr, data = _inputs()
    weights = noise(2, 4)
    end = _unrolled(optimizer, p, lr, data)
    wanted = formula(p, lr, lambda at: _gradient(at, data))
    torch.testing.assert_close(end, wanted, rtol=1e-12, atol=1e-13)
    assert (end - p).abs().min() > 1e-3
    got = torch.autograd.grad((weights * end).sum(), (p, lr, data), allow_unused=True)
    slopes = torch.autograd.grad((weights * wanted).sum(), (p, lr, data), allow_unused=True)
    for one, two in zip(got, slopes, strict=True):
        filled = [torch.zeros_like(lr) if slope is None else slope for slope in (one, two)]
        torch.testing.assert_close(*(torch.broadcast_tensors(*filled)), rtol=1e-10, atol=1e-12)
    assert slopes[0].abs().min() > 0
    assert slopes[1].abs() > 1e-3


def test_gradcheck() -> None:
    """Finite differences, for every algorithm, through params and gradients of three steps."""
    grads: Any = [noise(index + 1, 3).requires_grad_() for index in range(3)]
    for name, optimizer in EVERY.items():

        def run(param: Tensor, *grads: Tensor, optimizer: Optimizer = optimizer) -> Tensor:
            return steps(optimizer, param, lambda index: grads[index], len(grads))[0]

        with case(name=name):
            assert torch.autograd.gradcheck(run, (noise(0, 3).requires_grad_(), *grads))


def test_rprop_moves_with_its_start() -> None:
    """The step depends on signs alone, so the derivative by the start is one."""
    p = noise(0, 4).requires_grad_()
    (slope,) = torch.autograd.grad(step(rprop(0.1), p, p.detach()).sum(), p)
    assert torch.equal(slope, torch.ones(4, dtype=torch.float64))
