"""Pure steps inside torch.compile and torch.export, with one graph for every step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    joined,
    linear,
    one_cycle,
    polynomial,
    sgd,
    warmup,
    warmup_stable_decay,
)
from functional_optim.core.aliasing import AliasTracker, storage_key
from functional_optim.storage import stored
from functional_optim.testing.compare import require_same, snapshot

from ..support import noise, step

ULPS = 4.0
"""Tolerance: coefficients are rounded differently if the step count is a tensor."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def schedule(made: Any) -> Any:
    return 0.1 / (1.0 + made)


TENSOR = torch.tensor(0.1)
EXPORTED: dict[str, Optimizer] = {
    "schedules": adamw(lr=schedule, betas=(schedule, 0.99), amsgrad=True).using(executor="auto"),
    "schedules as data": adamw(
        warmup(1, then=joined([cosine(0.1, steps=9), constant(0.05)], [1]), start=0.01),
        (one_cycle(0.5, steps=4, pct_start=0.5, div_factor=0.6), 0.99),
        weight_decay=warmup_stable_decay(0.3, warmup=1, stable=1, decay=2),
    ),
    "others": adam(
        polynomial(0.1, steps=2, power=1.5),
        (exponential(0.9, gamma=0.5), inverse_sqrt(0.9, steps=2)),
        linear(0.1, to=0.2, steps=2),
    ),
    "a tensor": adamw(TENSOR).override(("b",), lr=0.2),
}
OPTIMIZERS: dict[str, Optimizer] = {
    **EXPORTED,
    "clipped": chain(clip_by_global_norm(0.5), sgd(0.1)).using(executor="blocked"),
    "nesterov": sgd(0.1, momentum=0.9, nesterov=True).using(executor="blocked"),
    "stored": stored(sgd(0.1, momentum=0.9)).using(executor="compiled"),
}
"""Optimizers with schedules, tensors, and several executors; the laws trace each algorithm."""


def leaves(step: int) -> dict[str, Any]:
    return {
        "w": noise(step, 3, 4, dtype=torch.float32),
        "b": noise(step + 9, 5, dtype=torch.float32),
    }


class Step(torch.nn.Module):
    """Module with several optimizers, which step separate parameters and states."""

    def __init__(self, optimizers: dict[str, Optimizer]) -> None:
        super().__init__()
        self.optimizers = optimizers

    def begin(self) -> Any:
        return {name: (leaves(0), one.init(leaves(0))) for name, one in self.optimizers.items()}

    def forward(self, stepped: Any, grads: Any) -> Any:
        return {
            name: optimizer.update(stepped[name][0], grads, stepped[name][1])
            for name, optimizer in self.optimizers.items()
        }


def assert_steps(traced: Callable[..., Any], step: Step) -> None:
    """Assert that traced steps agree with untraced steps by the reference."""
    own = {name: one.using(executor="reference") for name, one in step.optimizers.items()}
    got, want = step.begin(), step.begin()
    for seed in range(1, 4):
        got, want = traced(got, leaves(seed)), Step(own)(want, leaves(seed))
        require_same("traced and not", got, want, ULPS)


def test_update_is_one_graph_for_every_step() -> None:
    """torch.compile traces all steps without a graph break, and only once."""
    graphs = 0

    def counting(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    step = Step(OPTIMIZERS)
    assert_steps(torch.compile(step.forward, fullgraph=True, backend=counting), step)
    assert graphs == 1


@pytest.mark.parametrize("strict", [True, False])
def test_update_is_exported(strict: bool) -> None:
    """torch.export traces a step, strictly or not, and the program makes later steps."""
    step = Step({"a tensor": EXPORTED["a tensor"]} if strict else EXPORTED)
    program = torch.export.export(step, (step.begin(), leaves(1)), strict=strict)
    # torch writes wrong guards if one name begins with another one (exp_avg, exp_avg_sq).
    assert_steps(program.module(check_guards=False), step)


def measured(params: Any, grads: Any) -> Any:
    optimizer = chain(clip_by_global_norm(0.5), sgd(lr=0.1, momentum=0.9))
    state = optimizer.init(params)
    totals = [optimizer.measure(params, grads, state) * 2.0]
    return optimizer.update(params, grads, state, measured=totals)


def derivative(params: Any, grads: Any) -> Any:
    def loss(lr: Tensor) -> Tensor:
        made = step(adamw(lr=0.1), params, grads, lr=lr)
        return made["w"].sum()  # type: ignore[no-any-return]

    return torch.func.grad(loss)(torch.tensor(0.2, dtype=torch.float64))


def population(params: Any, grads: Any) -> Any:
    rates = torch.tensor([0.1, 0.2], dtype=torch.float64)
    return torch.func.vmap(lambda lr: step(sgd(momentum=0.9), params, grads, lr=lr))(rates)


STEPS: dict[str, Callable[..., Any]] = {
    "an lr in a tensor": lambda params, grads: step(
        sgd(momentum=0.9), params, grads, lr=torch.tensor(0.2, dtype=torch.float64)
    ),
    "made there, with another lr": lambda params, grads: step(sgd(0.3), params, grads, lr=0.2),
    "measured": measured,
    "population": population,
    "derivative": derivative,
}


def test_what_a_step_is_made_of() -> None:
    """One graph holds all uses of a pure step: measured totals, vmap, derivatives, new rates."""

    def made(params: Any, grads: Any) -> Any:
        return {name: one(params, grads) for name, one in STEPS.items()}

    params, grads = (
        {"w": noise(seed, 3), "z": noise(seed, 2, dtype=torch.complex64), "b": noise(seed, 2)}
        for seed in (0, 1)
    )
    grads["b"] = None  # type: ignore[assignment]  # this leaf has no gradient
    before = snapshot((params, grads))
    got = torch.compile(made, fullgraph=True, backend="eager")(params, grads)
    require_same("traced and not", got, made(params, grads), ULPS)
    require_same("arguments", (params, grads), before)


def test_a_compiler_traces_the_comparison_of_memory_whole() -> None:
    """The comparison breaks no graph, and an input that is returned becomes a copy."""

    def made(param: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        given = AliasTracker([param, grad])
        return given.copy_if_aliased(param * 2.0), given.copy_if_aliased(grad)

    param, grad = torch.ones(2), torch.full((2,), 3.0)
    new, kept = torch.compile(made, backend="eager", fullgraph=True)(param, grad)
    assert new.tolist() == [2.0, 2.0]
    assert kept.tolist() == [3.0, 3.0]
    assert storage_key(kept) != storage_key(grad)
