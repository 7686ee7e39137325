"""A pure step inside torch.compile and torch.export, as one graph that makes every step."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.storage import stored
from functional_optim.testing import CASES, CHAINS
from functional_optim.testing.compare import require_same, snapshot

ULPS = 4.0
"""Coefficients of a step count that is a tensor are rounded otherwise."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()  # graphs are in rings, and other tests count the tensors that live


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 4), "b": (4,), "c": (4,), "s": ()}
    return {name: torch.randn(s, generator=drawn, dtype=dtype) for name, s in shapes.items()}


def schedule(made: Any) -> Any:
    return 0.1 / (1.0 + made)


OPTIMIZERS: dict[str, Optimizer] = {
    **{name: case.factory() for name, case in {**CASES, **CHAINS}.items()},
    "amsgrad": adamw(lr=0.1, amsgrad=True),
    "nesterov": sgd(lr=0.1, momentum=0.9, nesterov=True),
    "a schedule": adamw(lr=schedule),
    "schedules in a tuple": adamw(lr=0.1, betas=(schedule, 0.99)),
    "a tensor": adamw(lr=torch.tensor(0.1)),
    "overrides": adamw(lr=0.1).override(("b",), lr=0.2),
    "stored": stored(adamw(lr=0.1)),
    **{
        f"by {name}": adamw(lr=0.1).using(executor=name)
        for name in ("auto", "blocked", "script", "compile", "fused")
    },
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_update_is_one_graph_for_every_step(optimizer: Optimizer) -> None:
    """It traces without a graph break, and is traced once (fault 1)."""
    graphs = 0

    def counting(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    traced = torch.compile(optimizer.update, fullgraph=True, backend=counting)
    reference = optimizer.using(executor="reference")  # it is what is traced
    want = got = tensors(0), optimizer.init(tensors(0))
    for seed in range(1, 5):
        grads = tensors(seed)
        want, got = reference.update(want[0], grads, want[1]), traced(got[0], grads, got[1])
        require_same("traced and not", got, want, ULPS)
    assert graphs == 1


class Step(torch.nn.Module):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def forward(self, *given: Any) -> Any:
        return self.optimizer.update(*given)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd", "a schedule", "overrides", "by script"])
def test_update_is_exported(name: str, strict: bool) -> None:
    """torch.export takes it, strict too, and the program makes later steps (fault 1)."""
    optimizer = OPTIMIZERS[name]
    params, state = tensors(0), optimizer.init(tensors(0))
    program = torch.export.export(Step(optimizer), (params, tensors(1), state), strict=strict)
    # Guards are written wrongly where a name begins with another one (exp_avg, exp_avg_sq).
    step = program.module(check_guards=False)
    want = got = params, state
    for seed in range(1, 4):
        grads = tensors(seed)
        want, got = optimizer.update(want[0], grads, want[1]), step(got[0], grads, got[1])
        require_same("exported and not", got, want, ULPS)


def one_step(optimizer: Optimizer, **hyper: Any) -> Callable[..., Any]:
    def step(params: Any, grads: Any) -> Any:
        return optimizer.update(params, grads, optimizer.init(params), **hyper)

    return step


def made_there(params: Any, grads: Any) -> Any:
    optimizer = adamw(lr=0.3)
    return optimizer.update(params, grads, optimizer.init(params))


def measured(params: Any, grads: Any) -> Any:
    optimizer = chain(clip_by_global_norm(0.5), sgd(lr=0.1, momentum=0.9))
    state = optimizer.init(params)
    totals = [optimizer.measure(params, grads, state) * 2.0]
    return optimizer.update(params, grads, state, measured=totals)


def derivative(params: Any, grads: Any) -> Any:
    def loss(lr: Tensor) -> Tensor:
        step = one_step(adamw(lr=0.1), lr=lr)
        return sum(value.sum() for value in step(params, grads)[0].values())  # type: ignore[return-value]

    return torch.func.grad(loss)(torch.tensor(0.2, dtype=torch.float64))


def population(params: Any, grads: Any) -> Any:
    rates = torch.tensor([0.1, 0.2], dtype=torch.float64)
    return torch.func.vmap(lambda lr: one_step(sgd(momentum=0.9), lr=lr)(params, grads)[0])(rates)


STEPS: dict[str, Callable[..., Any]] = {
    "another lr": one_step(adamw(lr=0.1), lr=0.2),
    "an lr in a tensor": one_step(adamw(lr=0.1), lr=torch.tensor(0.2, dtype=torch.float64)),
    "made there": made_there,
    "measured": measured,
    "derivative": derivative,
    "population": population,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_what_a_step_is_made_of(step: Callable[..., Any], dtype: torch.dtype) -> None:
    """All that one may do with a pure step is one graph too (fault 1)."""
    if dtype.is_complex and step is derivative:
        dtype = torch.float64  # of what is real
    params, grads = tensors(0, dtype), tensors(1, dtype)
    grads["c"] = None  # type: ignore[assignment]  # it is left alone
    before = snapshot((params, grads))
    got = torch.compile(step, fullgraph=True, backend="eager")(params, grads)
    require_same("traced and not", got, step(params, grads), ULPS)
    require_same("arguments", (params, grads), before)
