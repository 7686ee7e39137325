"""Problems for optimizers that evaluate the loss, and runs of torch.optim.LBFGS and ours."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functional_optim import ClosureOptimizer, TorchOptimizer, lbfgs

Params = dict[str, Tensor]
Loss = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Problem:
    """Loss of named parameters. The names are not in alphabetical order."""

    params: Params
    loss: Loss
    frozen: tuple[str, ...] = ()
    """Parameters that require no gradient."""
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3

    def leaves(self) -> Params:
        """Return new parameters."""
        return {
            name: param.clone().requires_grad_(name not in self.frozen)
            for name, param in self.params.items()
        }


def quadratic(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return a convex quadratic of a vector, a matrix and a scalar, with condition number 1e3."""
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    curvature = torch.logspace(-1, 2, 8, dtype=torch.float64)
    matrix = (turn * curvature @ turn.T).to(dtype)
    shift = torch.randn(8, generator=generator, dtype=torch.float64).to(dtype)
    params = {"z": torch.zeros(3), "m": torch.ones(2, 2), "a": torch.tensor(0.5)}

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        x = torch.cat([one.reshape(-1) for one in (given["z"], given["m"], given["a"])]) - shift
        return x @ (matrix @ x)

    return {name: one.to(dtype) for name, one in params.items()}, loss


def rosenbrock(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return Rosenbrock's function of four variables, in two parameters."""
    start = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        x = torch.cat([given["x"], given["b"]])
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    return {"x": start[:3].to(dtype), "b": start[3:].to(dtype)}, loss


def least_squares(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return nonlinear least squares: a network with one hidden layer, and an unused parameter."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs, targets = drawn(12, 2), drawn(12, 1)
    params = {"w2": drawn(3, 1), "unused": drawn(2), "w1": drawn(2, 3), "b": drawn(3)}

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        out = torch.tanh(inputs @ given["w1"] + given["b"]) @ given["w2"]
        return (out - targets).square().mean()

    return params, loss


def complex_quadratic(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return a loss that grows with the distances of a complex and a real parameter."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.complex64 if dtype == torch.float32 else torch.complex128
    goal = torch.randn(3, generator=generator, dtype=torch.complex128).to(pair)

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        off = given["c"] - goal
        return (off.abs().square() * torch.arange(1, 4)).sum() + (given["a"] - 2).pow(4).sum()

    return {"c": torch.zeros(3, dtype=pair), "a": torch.zeros(2, dtype=dtype)}, loss


def waves(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return a sum of waves with many local minima, so that searches extrapolate and come back."""
    generator = torch.Generator().manual_seed(seed)
    rates, phases, start = torch.rand(3, 4, generator=generator, dtype=torch.float64).to(dtype)

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        x = given["x"]
        return (torch.cos(9 * rates * x + 6 * phases) + 0.01 * x**2).sum()

    return {"x": 4 * start - 2}, loss


def stairs(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return waves with rounded values and exact gradients, so that many values are equal."""
    params, smooth = waves(seed, dtype)

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        value = smooth(given)
        return torch.floor(4 * value.detach()) / 4 + (value - value.detach())

    return params, loss


def kinks(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return distances with one steep side, where line searches come near the ends of brackets."""
    generator = torch.Generator().manual_seed(seed)
    goal, start = torch.rand(2, 3, generator=generator, dtype=torch.float64).to(dtype)

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        off = given["x"] - goal
        return torch.where(off > 0, 50 * off, -off).sum()

    return {"x": start - 2}, loss


def cliffs(seed: int, dtype: torch.dtype) -> tuple[Params, Loss]:
    """Return exponentials that rise much faster than they fall."""
    generator = torch.Generator().manual_seed(seed)
    rates, start = torch.rand(2, 3, generator=generator, dtype=torch.float64).to(dtype)

    def loss(given: Mapping[str, Tensor]) -> Tensor:
        x = given["x"]
        return (torch.exp(12 * rates * (x + 0.2)) - 3 * x).sum()

    return {"x": start - 2}, loss


SEARCHED = (waves, stairs, kinks, cliffs)
"""Problems that exercise each branch of the line search."""

KINDS: dict[str, Callable[[int, torch.dtype], tuple[Params, Loss]]] = {
    one.__name__: one
    for one in (quadratic, rosenbrock, least_squares, complex_quadratic, *SEARCHED)
}


def value_and_grad(loss: Loss, frozen: tuple[str, ...] = ()) -> Callable[[Any], tuple[Any, Any]]:
    """Return a function for loss and gradients, with None for unused parameters."""

    def function(params: Params) -> tuple[Tensor, dict[str, Tensor | None]]:
        leaves = {name: one.requires_grad_(name not in frozen) for name, one in params.items()}
        trained = {name: one for name, one in leaves.items() if name not in frozen}
        value = loss(leaves)
        grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        return value.detach(), {**dict.fromkeys(leaves), **dict(zip(trained, grads, strict=True))}

    return function


def closure_of(optimizer: torch.optim.Optimizer, leaves: Params, loss: Loss) -> Callable[[], Any]:
    """Return a closure as in a training script."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(leaves)
        value.backward()
        return value

    return closure


Result = tuple[list[float], Params, dict[str, Any]]
"""Losses that the steps returned, parameters, and state."""


def run_of(make: Callable[..., torch.optim.Optimizer], problem: Problem) -> Result:
    """Run a torch.optim.Optimizer on a problem."""
    leaves = problem.leaves()
    optimizer = make(list(leaves.values()))
    closure = closure_of(optimizer, leaves, problem.loss)
    losses = [optimizer.step(closure).detach().item() for _ in range(problem.steps)]
    params = {name: leaf.detach() for name, leaf in leaves.items()}
    return losses, params, dict(optimizer.state[next(iter(leaves.values()))])


def run_torch(problem: Problem) -> Result:
    """Run torch.optim.LBFGS on a problem."""
    losses, params, state = run_of(
        lambda params: torch.optim.LBFGS(params, **problem.options), problem
    )
    state.pop("al", None)  # torch writes it in each iteration before it reads it
    return losses, params, state


def run_front_end(problem: Problem) -> Result:
    """Run TorchOptimizer on a problem."""
    return run_of(lambda params: TorchOptimizer(params, lbfgs(**problem.options)), problem)


def run_pure(problem: Problem, optimizer: ClosureOptimizer | None = None) -> tuple[Params, Any]:
    """Run the pure update on a problem."""
    optimizer = optimizer or lbfgs(**problem.options)
    params = {name: one.clone() for name, one in problem.params.items()}
    function, state = value_and_grad(problem.loss, problem.frozen), optimizer.init(params)
    for _ in range(problem.steps):
        params, state = optimizer.update(params, None, state, value_and_grad=function)
    return params, state


def same(one: Any, other: Any) -> bool:
    """Return True if two values have the same bits. NaN equals NaN."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and (
            one.dtype == other.dtype and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, Tensor):
        return False
    both_nan = isinstance(one, float) and math.isnan(one) and math.isnan(other)
    return bool(one == other) or both_nan


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Make sure that two mappings have the same keys, and values with the same bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert same(one[name], other[name]), f"{name}: {one[name]} is not {other[name]}"
