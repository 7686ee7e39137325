"""Pure steps of composed and measured chains: planned, in threads, and under transforms."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functional_optim import (
    Optimizer,
    adamw,
    chain,
    clip_by_global_norm,
    prodigy,
    schedule_free_adamw,
    sgd,
)
from functional_optim.core.aliasing import storage_key
from functional_optim.plan import engine, tree_steps
from functional_optim.testing.compare import tensors_in
from tests.composition.trees import COMPOSED, grads_at, params_of
from tests.steady import noted_calls
from tests.tensors import assert_same

pytestmark = pytest.mark.usefixtures("with_loops")

CHAINS: dict[str, Callable[[], Optimizer]] = {
    **COMPOSED,
    "clipped": lambda: chain(clip_by_global_norm(0.1), adamw(0.1)),
    "schedule-free": schedule_free_adamw,
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
}
STEPS = 12


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_steps, "_PLANS", [])


def by_auto(name: str) -> Optimizer:
    return CHAINS[name]().using(executor="auto")


def by_reference(name: str) -> Optimizer:
    return CHAINS[name]().using(executor="reference")


def values_of(*trees: Any) -> list[torch.Tensor]:
    return [one.detach().clone() for one in tensors_in(trees)]


@pytest.mark.parametrize("name", CHAINS)
def test_steps_are_those_of_the_reference(name: str) -> None:
    """A step changes none of its inputs, and each result has separate memory."""
    optimizer, reference = by_auto(name), by_reference(name)
    params, want = params_of(), params_of()
    state, own = optimizer.init(params), reference.init(want)
    for step in range(STEPS):
        grads = grads_at(step, missing={5: "head.weight"})
        before = values_of(params, grads, state)
        made = optimizer.update(params, grads, state)
        assert_same(values_of(params, grads, state), before)
        there = {storage_key(one) for one in tensors_in((params, grads, state))}
        if step != 5:
            frozen = params["head.weight"], state.leaves["head.weight"]
            alone = tensors_in(frozen) if name == "frozen" else []  # frozen leaves are returned
            results = [one for one in tensors_in(made) if not any(one is own for own in alone)]
            found = [storage_key(one) for one in results]
            assert len(set(found)) == len(found) and there.isdisjoint(found)
        params, state = made
        want, own = reference.update(want, grads, own)
        assert_same([params, state], [want, own])


def test_a_steady_step_plans_nothing_and_steps_no_leaf_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    seen = noted_calls(
        monkeypatch, ((tree_steps.TreeSteps, "__init__"), (engine, "prepare"), (engine, "update"))
    )
    optimizer, params = by_auto("clipped"), params_of()
    state = optimizer.init(params)
    for step in range(36):
        if step == 24:
            seen.clear()
        params, state = optimizer.update(params, grads_at(step), state)
    assert seen == []


def test_leaves_without_a_gradient_are_the_same_objects() -> None:
    optimizer, params = by_auto("clipped"), params_of()
    state = optimizer.init(params)
    for step in range(4):
        optimizer.update(params, grads_at(step), state)
    made, _ = optimizer.update(params, grads_at(5, missing={5: "head.weight"}), state)
    assert made["head.weight"] is params["head.weight"]


def test_a_step_that_is_refused_changes_nothing_then_or_later() -> None:
    optimizer, params = by_auto("accumulate"), params_of()
    state = optimizer.init(params)
    for step in range(3):
        params, state = optimizer.update(params, grads_at(step), state)
    before = values_of(params, state)
    wrong = grads_at(3) | {"head.weight": torch.ones(7)}
    with pytest.raises(ValueError, match="head.weight"):
        optimizer.update(params, wrong, state)
    assert_same(values_of(params, state), before)
    found, want = (
        one.update(params, grads_at(3), state) for one in (optimizer, by_reference("accumulate"))
    )
    assert_same(list(found), list(want))


def test_a_derivative_is_not_lost() -> None:
    """A step keeps the derivatives by gradients, learning rates, and tensors in a schedule."""
    lr = torch.tensor(0.1, requires_grad=True)
    params, grads = params_of(), grads_at(0)
    for optimizer in (
        chain(clip_by_global_norm(0.1), sgd(lr)),
        chain(clip_by_global_norm(0.1), sgd(lambda made: lr / (1 + made))),
        chain(clip_by_global_norm(0.1), sgd(0.1)).override(("scale",), lr=lr),
    ):
        found = []
        for one in (optimizer.using(executor="auto"), optimizer.using(executor="reference")):
            state = one.init(params)
            with torch.no_grad():
                for _ in range(4):
                    one.update(params, grads, state)
            made, _ = one.update(params, grads, state)
            (slope,) = torch.autograd.grad(sum(value.sum() for value in made.values()), [lr])
            asked = {key: value.clone().requires_grad_() for key, value in grads.items()}
            made, _ = one.update(params, asked, state)
            total = sum(value.sum() for value in made.values())
            found.append([slope, *torch.autograd.grad(total, list(asked.values()))])
        assert_same(*found)


@pytest.mark.parametrize("optimizer", [adamw(0.1), chain(clip_by_global_norm(0.1), adamw(0.1))])
def test_a_tracer_that_is_shown_operations_is_refused_as_before(optimizer: Optimizer) -> None:
    """make_fx must not see our loops: its trace would lack the step or fix its numbers."""
    auto, params, grads = optimizer.using(executor="auto"), params_of(), grads_at(0)
    state = auto.init(params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
            make_fx(lambda *of: auto.update(*of))(params, grads, state)  # noqa: PLW0108  counted
        for _ in range(4):
            auto.update(params, grads, state)  # so that a plan exists


@pytest.mark.parametrize("name", ["clipped", "schedule-free", "accumulate"])
def test_a_population_of_learning_rates_is_stepped(name: str) -> None:
    """Under no_grad, vmap works over a learning rate and over a tensor in a schedule."""
    rates, params, grads = torch.tensor([0.1, 0.2, 0.3]), params_of(), grads_at(3)
    found = []
    for optimizer in (by_auto(name), by_reference(name)):
        state = optimizer.init(params)
        for step in range(3):
            optimizer.update(params, grads_at(step), state)  # so that a plan exists

        def given(lr: Any, own: Optimizer = optimizer, state: Any = state) -> Any:
            return own.update(params, grads, state, lr=lr)

        def scheduled(lr: Any, own: Optimizer = optimizer, state: Any = state) -> Any:
            return own.replace(lr=lambda made: lr / (1 + made)).update(params, grads, state)

        with torch.no_grad():
            found.append([torch.func.vmap(one)(rates) for one in (given, scheduled)])
    assert_same(*found)


@pytest.mark.parametrize("name", ["accumulate", "clipped"])
def test_several_threads_step_like_trees_at_once(name: str) -> None:
    optimizer, reference = by_auto(name), by_reference(name)
    found: dict[int, Any] = {}

    def trains(number: int, by: Optimizer) -> Any:
        params = params_of()
        state = by.init(params)
        for step in range(60):
            params, state = by.update(params, grads_at(step % 7 + number), state)
        return params, state

    def run(number: int) -> None:
        found[number] = trains(number, optimizer)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number in range(4):
        assert_same(list(found[number]), list(trains(number, reference)))
