"""Memory of the results of ``init`` and ``update``, which nothing else shares."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, Transform, adam, chain, sgd
from functional_optim.core.aliasing import AliasTracker, storage_key
from functional_optim.kernels import ExecutorName
from tests.choices import each_value
from tests.steady import calls_of

from .scenarios import SCENARIOS, assert_apart, assert_steps_alike
from .sharing_stages import SHARING, UNMOVED, Hyper, Total, left_alone, of, optimistic
from .support import IN_PYTHON, assert_same, noise, step


@each_value(
    make=SHARING,
    scenario=["float64", "float32, laid out", "complex128, laid out", "conjugate"],
    executor=IN_PYTHON,
)
def test_results_are_apart_from_arguments(
    make: Callable[[], Optimizer], scenario: str, executor: ExecutorName
) -> None:
    """Results also share no memory with one another, whatever a rule or ``init`` returns."""
    params = SCENARIOS[scenario](0)
    assert_apart(make().init(params), params)
    assert_steps_alike(make(), SCENARIOS[scenario], executor)


@each_value(make=SHARING)
def test_front_ends_make_the_pure_steps(make: Callable[[], Optimizer]) -> None:
    start = [noise(0, 5), noise(1, 4)]
    params, state = start, make().init(start)
    own = [torch.nn.Parameter(one.clone()) for one in start]
    front = TorchOptimizer(own, make())
    for seed in range(4):
        grads = [noise(10 * seed + 2, 5), noise(10 * seed + 3, 4)]
        params, state = make().update(params, grads, state)
        for param, grad in zip(own, grads, strict=True):
            param.grad = grad.clone()
        front.step()
        assert_same([one.detach() for one in own], params)


def test_the_next_backward_does_not_change_the_state() -> None:
    """Autograd accumulates gradients in place, so the state must not share their memory."""
    optimizer, weight = of(optimistic), torch.nn.Parameter(torch.ones(3))
    state = optimizer.init([weight])
    weight.sum().backward()
    _, state = optimizer.update([weight], [weight.grad], state)
    weight.sum().backward()
    assert state.leaves[0].stages[0].last.tolist() == [1.0, 1.0, 1.0]


def keeps_total(
    grad: Tensor, param: Tensor, state: Total, c: Hyper, total: Tensor
) -> tuple[Tensor, Total]:
    return grad, Total(total)


def test_totals_are_each_leafs_own() -> None:
    """Each leaf gets a copy of the total, even if the caller gave the total."""
    keeping = Transform(
        name="keeping",
        hyper=Hyper,
        state=Total,
        init=lambda param, hyper: Total(torch.zeros((), dtype=torch.float64)),
        transform=keeps_total,
        measure=lambda grad: grad.to(torch.float64).sum(),
    )
    optimizer, params = chain(keeping(lr=0.1), sgd(lr=0.1)), [noise(0, 3), noise(1, 3)]
    state = optimizer.init(params)
    total = optimizer.measure(params, params, state)
    for measured in ([], [total]):
        _, made = optimizer.update(params, params, state, measured=measured)
        kept = [
            leaf.stages[1].total if leaf.stages[1] else leaf.stages[0].total for leaf in made.leaves
        ]
        assert len({*map(storage_key, kept), storage_key(total)}) == 3
        assert all(torch.equal(one, total) for one in kept)


@each_value(make=UNMOVED)
def test_what_a_rule_hands_on_as_it_came_is_a_copy(make: Callable[[], Optimizer]) -> None:
    params, optimizer = {"a": noise(0, 3, 2), "b": noise(1, 4)[::2]}, make()
    state = optimizer.init(params)
    new, new_state = optimizer.update(params, params, state)
    assert_apart((new, new_state), (params, state))
    assert_same((new, new_state.leaves["a"].stages), (params, state.leaves["a"].stages))


@each_value(make={**SHARING, **UNMOVED})
def test_through_torch_func(make: Callable[[], Optimizer]) -> None:
    """vmap over a population equals the loop, and shares no memory with the stacked inputs."""
    optimizer, stacked, grads = make(), noise(0, 3, 4), noise(1, 3, 4)
    state = torch.func.vmap(optimizer.init)(stacked)
    params, new = torch.func.vmap(optimizer.update)(stacked, grads, state)
    assert_apart((params, new), (stacked, grads, state))
    for i in range(3):
        assert_same(params[i], step(optimizer, stacked[i], grads[i]))


def test_a_copy_hands_the_derivative_on() -> None:
    """A parameter that a rule returns unchanged keeps its derivative."""
    optimizer, param = of(left_alone), torch.ones(2, dtype=torch.float64)

    def after(given: Tensor) -> Tensor:
        new, _ = optimizer.update(given, torch.ones_like(given), optimizer.init(given))
        return (new * 3.0).sum()

    assert torch.func.grad(after)(param).tolist() == [3.0, 3.0]
    leaf = param.clone().requires_grad_()
    assert torch.autograd.grad(after(leaf), leaf)[0].tolist() == [3.0, 3.0]


def test_results_that_are_new_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only results that share memory are copied."""

    def refused(tensor: Tensor) -> Tensor:
        raise AssertionError(f"copied without need: {tensor}")

    monkeypatch.setattr("functional_optim.core.aliasing.clone_strided", refused)
    optimizer, params = adam(0.1), [noise(0, 3), noise(1, 2, 2)]
    optimizer.update(params, params, optimizer.init(params))


def test_while_a_compiler_traces_results_are_told_apart_by_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler cannot see memory, so only tensors that it has seen are copied."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr("functional_optim.core.aliasing.storage_key", None)
    param, fresh = torch.ones(2), torch.zeros(2)
    given = AliasTracker([param])
    assert given.copy_if_aliased(param) is not param
    assert given.copy_if_aliased(fresh) is fresh
    assert given.copy_if_aliased(fresh) is not fresh


def test_what_a_tracer_looks_at_grows_with_the_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is compared once: comparing all pairs would take longer than the whole step."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    counted = []
    for count in (10, 20, 30):
        tensors = [torch.ones(1) for _ in range(count)]
        results = [torch.ones(1) for _ in range(count)]

        def looked_at(given: Any = (tensors, results)) -> None:
            tensors, results = given
            kept = AliasTracker(tensors)
            for one in results:
                kept.copy_if_aliased(one)

        counted.append(calls_of(looked_at))
    assert counted[2] - counted[1] == counted[1] - counted[0] > 0


def test_what_a_tracer_sees_again_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    given, made = torch.ones(1), torch.ones(1)
    kept = AliasTracker([given])
    assert kept.copy_if_aliased(given) is not given
    assert kept.copy_if_aliased(made) is made
    assert kept.copy_if_aliased(made) is not made
