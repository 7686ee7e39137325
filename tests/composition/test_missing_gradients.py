"""Missing gradients in chains of several gates, against loops of plain torch.

A stage of a loop is a function of all parameters and gradients, which calls the stages after it. A
stage after ``sam`` gets the gradients of the second call. A leaf without a gradient in that call is
restored, and its gradient is also missing at every later gate.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    TorchOptimizer,
    accumulate,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    sam,
    sgd,
    weight_decay,
)
from hooks import OptimizerState
from sharding import ZeroRedundancyOptimizer

from ..choices import EVERYTHING, case, each
from ..tensors import assert_same, normal
from ..worlds import world_of_one

Params = dict[str, Tensor]
Grads = dict[str, Tensor | None]
Loop = Callable[[Params, Grads], None]
"""Function that replaces tensors of the parameters, and writes to no tensor."""


def present(grads: Grads) -> Params:
    return {name: grad for name, grad in grads.items() if grad is not None}


def norm_of(grads: Params) -> Tensor:
    return torch.stack([one.square().sum() for one in grads.values()]).sum().sqrt()


def sam_loop(rho: float, rest: Loop) -> Loop:
    origin: Params = {}
    calls = itertools.cycle((1, 2))

    def step(params: Params, grads: Grads) -> None:
        if next(calls) == 2:
            params.update(origin)
            origin.clear()
            rest(params, grads)
            return
        own = present(grads)
        norm = norm_of(own)
        for name, grad in own.items():
            origin[name] = params[name]
            params[name] = params[name] + rho / (norm + 1e-12) * grad

    return step


def accumulate_loop(every: int, rest: Loop) -> Loop:
    sums: Params = {}
    calls = itertools.cycle(range(1, every + 1))

    def step(params: Params, grads: Grads) -> None:
        for name, grad in present(grads).items():
            sums[name] = sums[name] + grad / every if name in sums else grad / every
        if next(calls) == every:
            means = {**sums}
            sums.clear()
            rest(params, {name: means.get(name) for name in params})

    return step


def finite_loop(rest: Loop) -> Loop:
    def step(params: Params, grads: Grads) -> None:
        if all(bool(one.isfinite().all()) for one in present(grads).values()):
            rest(params, grads)

    return step


def decay_loop(decay: float, rest: Loop) -> Loop:
    def step(params: Params, grads: Grads) -> None:
        own = present(grads)
        decayed = {name: grad + decay * params[name] for name, grad in own.items()}
        rest(params, {name: decayed.get(name) for name in params})

    return step


def clip_loop(bound: float, rest: Loop) -> Loop:
    def step(params: Params, grads: Grads) -> None:
        own = present(grads)
        factor = (bound / (norm_of(own) + 1e-6)).clamp(max=1.0)
        rest(params, {name: own[name] * factor if name in own else None for name in params})

    return step


def momentum_loop(steps: Counter[str]) -> Loop:
    velocity: Params = {}

    def step(params: Params, grads: Grads) -> None:
        for name, grad in present(grads).items():
            steps[name] += 1
            velocity[name] = 0.9 * velocity[name] + grad if name in velocity else grad
            params[name] = params[name] - 0.5 * velocity[name]

    return step


def rule() -> Optimizer:
    return sgd(lr=0.5, momentum=0.9)


CHAINS: dict[str, tuple[Callable[[], Optimizer], Callable[[Loop], Loop]]] = {
    "sam": (lambda: chain(sam(0.3), rule()), lambda rest: sam_loop(0.3, rest)),
    "sam, accumulate": (
        lambda: chain(sam(0.3), accumulate(2), rule()),
        lambda rest: sam_loop(0.3, accumulate_loop(2, rest)),
    ),
    "sam, sam": (
        lambda: chain(sam(0.3), sam(0.2), rule()),
        lambda rest: sam_loop(0.3, sam_loop(0.2, rest)),
    ),
    "sam, apply_if_finite, accumulate": (
        lambda: chain(sam(0.3), apply_if_finite(9), accumulate(2), rule()),
        lambda rest: sam_loop(0.3, finite_loop(accumulate_loop(2, rest))),
    ),
    "accumulate, sam, accumulate": (
        lambda: chain(accumulate(2), sam(0.3), accumulate(2), rule()),
        lambda rest: accumulate_loop(2, sam_loop(0.3, accumulate_loop(2, rest))),
    ),
    "sam, sam, accumulate": (
        lambda: chain(sam(0.3), sam(0.2), accumulate(2), rule()),
        lambda rest: sam_loop(0.3, sam_loop(0.2, accumulate_loop(2, rest))),
    ),
    "sam, accumulate, sam": (
        lambda: chain(sam(0.3), accumulate(2), sam(0.2), rule()),
        lambda rest: sam_loop(0.3, accumulate_loop(2, sam_loop(0.2, rest))),
    ),
    "a stage between two gates": (
        lambda: chain(sam(0.3), weight_decay(0.4), accumulate(2), rule()),
        lambda rest: sam_loop(0.3, decay_loop(0.4, accumulate_loop(2, rest))),
    ),
    "a total of restored parameters": (
        lambda: chain(sam(0.3), accumulate(2), weight_decay(0.4), clip_by_global_norm(0.5), rule()),
        lambda rest: sam_loop(0.3, accumulate_loop(2, decay_loop(0.4, clip_loop(0.5, rest)))),
    ),
}

SHAPES = {"a": (3,), "b": (2, 2), "c": ()}


def start() -> Params:
    return {name: normal(*SHAPES[name], seed=k).double() for k, name in enumerate(SHAPES)}


def calls_with(pattern: Sequence[bool], *, nan: bool) -> list[Grads]:
    """Return the gradients of 16 calls: four cycles of four calls.

    Args:
        pattern: for each call of the second cycle, True if leaf "a" has a gradient. Leaf "b" has
            every gradient. Leaf "c" has the pattern in reverse order in the first two cycles.
        nan: True for a NaN in a gradient of the sixth call.
    """
    found: list[Grads] = []
    for k in range(16):
        grads: Grads = {
            name: normal(*shape, seed=100 * (k + 1) + n).double()
            for n, (name, shape) in enumerate(SHAPES.items())
        }
        if nan and k == 5:
            grads["b"] = torch.full((2, 2), float("nan"), dtype=torch.float64)
        if 4 <= k < 8 and not pattern[k - 4]:
            grads["a"] = None
        if k < 8 and not pattern[3 - k % 4]:
            grads["c"] = None
        found.append(grads)
    return found


ALL = list(itertools.product((True, False), repeat=4))
PATTERNS = ALL if EVERYTHING else [ALL[0b0001], ALL[0b0011], ALL[0b0101], ALL[0b0110], ALL[0b1001]]
"""Missing calls of a cycle: a 1 is a call without a gradient."""


def by_loop(loop: Loop, calls: Sequence[Grads]) -> list[Params]:
    params, found = start(), []
    for grads in calls:
        loop(params, grads)
        found.append({**params})
    return found


def by_update(optimizer: Optimizer, calls: Sequence[Grads]) -> list[Params]:
    params: Any = start()
    state, found = optimizer.init(params), []
    for grads in calls:
        params, state = optimizer.update(params, grads, state)
        found.append(params)
    return found


def by_update_(optimizer: Optimizer, calls: Sequence[Grads]) -> list[Params]:
    params, found = start(), []
    state = optimizer.init(params)
    for grads in calls:
        optimizer.update_(params, grads, state)
        found.append({name: one.clone() for name, one in params.items()})
    return found


def by_grad(make: Callable[[Any], torch.optim.Optimizer], calls: Sequence[Grads]) -> list[Params]:
    params = {name: nn.Parameter(one) for name, one in start().items()}
    made, found = make(params.items()), []
    for grads in calls:
        for name, param in params.items():
            param.grad = grads[name]
        made.step()
        found.append({name: one.detach().clone() for name, one in params.items()})
    return found


def by_torch_optimizer(optimizer: Optimizer, calls: Sequence[Grads]) -> list[Params]:
    return by_grad(lambda params: TorchOptimizer(params, optimizer), calls)


def by_zero(optimizer: Optimizer, calls: Sequence[Grads]) -> list[Params]:
    with world_of_one():
        return by_grad(lambda params: ZeroRedundancyOptimizer(params, optimizer), calls)


def by_step_hook(optimizer: Optimizer, calls: Sequence[Grads]) -> list[Params]:
    found = []
    with world_of_one():
        model = nn.ParameterDict(start())
        state = OptimizerState(optimizer, DistributedDataParallel(model))
        for grads in calls:
            own = present(grads)
            state.step_some(list(own), list(own.values()))
            found.append({name: one.detach().clone() for name, one in model.items()})
    return found


def by_workers(optimizer: Optimizer, calls: Sequence[Grads]) -> list[Params]:
    params, found = start(), []
    made = DistributedOptimizer.over_threads(optimizer, params, dict.fromkeys(params, "ps0"))
    for grads in calls:
        made.step(grads)
        found.append({name: one.clone() for name, one in params.items()})
    made.close()
    return found


DOORS: dict[str, Callable[[Optimizer, Sequence[Grads]], list[Params]]] = {
    "update": by_update,
    "update_": by_update_,
    "update_ by the reference": lambda optimizer, calls: by_update_(
        optimizer.using(executor="reference"), calls
    ),
    "TorchOptimizer": by_torch_optimizer,
    "ZeroRedundancyOptimizer": by_zero,
    "step_hook": by_step_hook,
    "DistributedOptimizer": by_workers,
}


@each("name", name=CHAINS, pattern=PATTERNS, door=DOORS)
def test_a_leaf_without_a_gradient_in_the_second_call_is_late_at_later_gates(
    name: str, pattern: Sequence[bool], door: str
) -> None:
    """Every front-end has the parameters of the loop after each call."""
    make, loop = CHAINS[name]
    calls = calls_with(pattern, nan="finite" in name)
    want = by_loop(loop(momentum_loop(Counter())), calls)
    torch.testing.assert_close(DOORS[door](make(), calls), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CHAINS)
def test_steps_of_restored_leaves_are_counted_as_in_the_loop(name: str) -> None:
    make, loop = CHAINS[name]
    for pattern in PATTERNS:
        calls, want = calls_with(pattern, nan="finite" in name), Counter[str]()
        by_loop(loop(momentum_loop(want)), calls)
        optimizer, params, same = make(), start(), start()
        state = optimizer.init(params)
        kept = optimizer.init(same)
        for grads in calls:
            optimizer.update_(params, grads, state)
            same, kept = optimizer.update(same, grads, kept)
        with case(pattern=pattern):
            assert {key: int(one.step) for key, one in state.leaves.items()} == want
            assert_same((params, state), (same, kept))
