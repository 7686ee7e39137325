"""vmap over a population: parameters, gradients, state and hyper-parameters at once."""

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adam, algorithms, chain, clip_by_global_norm, sgd

from .support import CHAINS, VARIANTS, assert_same, noise

SIZE = 4
DEFAULTS: dict[str, Optimizer] = {
    f"{name}()": getattr(algorithms, name)() for name in algorithms.__all__
}
EVERY = {**DEFAULTS, **VARIANTS, **CHAINS}


def _population(seed: int) -> dict[str, Tensor]:
    return {"w": noise(seed, SIZE, 2, 3), "b": noise(seed + 100, SIZE), "e": noise(0, SIZE, 0)}


def _member(tree: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    return {key: value[index] for key, value in tree.items()}


def _stack(trees: list[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


@pytest.mark.parametrize("name", EVERY)
def test_a_population_steps_as_its_members(name: str) -> None:
    optimizer = EVERY[name]
    params = _population(0)
    state = torch.vmap(optimizer.init)(params)
    members = [_member(params, index) for index in range(SIZE)]
    states = [optimizer.init(member) for member in members]
    for step in range(3):
        grads = _population(step + 1)
        params, state = torch.vmap(optimizer.update)(params, grads, state)
        for index in range(SIZE):
            members[index], states[index] = optimizer.update(
                members[index], _member(grads, index), states[index]
            )
    torch.testing.assert_close(params, _stack(members), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(state, _stack(states), rtol=1e-13, atol=1e-14)
    assert type(state) is type(states[0])
    assert type(state.leaves["w"]) is type(states[0].leaves["w"])
    assert state.leaves["w"].step.tolist() == [3] * SIZE


@pytest.mark.parametrize("name", VARIANTS)
def test_members_may_be_at_different_steps(name: str) -> None:
    """The first step of one member is the third of another: bias corrections differ."""
    optimizer = VARIANTS[name]
    params, states = [], []
    for index in range(SIZE):
        param, state = noise(index, 3), optimizer.init(noise(index, 3))
        for step in range(index):
            param, state = optimizer.update(param, noise(step + 10, 3), state)
        params.append(param)
        states.append(state)
    grads = noise(50, SIZE, 3)
    batched = torch.vmap(optimizer.update)(torch.stack(params), grads, _stack(states))
    loop = [
        optimizer.update(param, grad, state)
        for param, grad, state in zip(params, grads, states, strict=True)
    ]
    torch.testing.assert_close(batched, _stack(loop), rtol=1e-13, atol=1e-14)
    assert batched[1].leaves.step.tolist() == [1, 2, 3, 4]


def test_only_the_state_is_a_population() -> None:
    """One parameter and one gradient, steps from several states."""
    optimizer, param, grad = adam(0.1), noise(0, 3), noise(1, 3)
    state = torch.vmap(optimizer.init)(noise(2, SIZE, 3))
    state = optree.tree_map(
        lambda t: t + noise(3, *t.shape).square() if t.is_floating_point() else t, state
    )
    batched, _ = torch.vmap(optimizer.update, in_dims=(None, None, 0))(param, grad, state)
    for index in range(SIZE):
        alone = optree.tree_map(lambda t, i=index: t[i], state)
        expected, _ = optimizer.update(param, grad, alone)
        torch.testing.assert_close(batched[index], expected, rtol=1e-13, atol=1e-14)


def test_a_grid_of_learning_rates_trains_at_once() -> None:
    """Nested vmap over lr and seed; each run ends where it ends alone."""
    rates = torch.tensor([0.01, 0.1, 0.5], dtype=torch.float64)
    starts = noise(0, SIZE, 3)
    optimizer = chain(clip_by_global_norm(1.0), adam())

    def train(rate: Any, param: Tensor) -> Tensor:
        state = optimizer.init(param)
        for _ in range(5):
            param, state = optimizer.update(param, 2 * param, state, lr=rate)
        return param

    grid = torch.vmap(torch.vmap(train, (None, 0)), (0, None))(rates, starts)
    assert grid.shape == (3, SIZE, 3)
    for i, rate in enumerate(rates):
        for j, start in enumerate(starts):
            expected = train(rate.item(), start)
            torch.testing.assert_close(grid[i, j], expected, rtol=1e-13, atol=1e-14)
    assert not torch.allclose(grid[0], grid[1])


def test_a_schedule_is_asked_once_for_the_population() -> None:
    asked: list[Tensor] = []

    def rate(made: Tensor) -> Tensor:
        asked.append(made)
        return 0.1 / (1.0 + made)

    optimizer = sgd(rate)
    state = torch.vmap(optimizer.init)(torch.zeros(2, 1))
    state = state._replace(leaves=state.leaves._replace(step=torch.tensor([0, 4])))
    new, _ = torch.vmap(optimizer.update)(torch.zeros(2, 1), torch.ones(2, 1), state)
    torch.testing.assert_close(new, torch.tensor([[-0.1], [-0.02]]))
    assert len(asked) == 1


@pytest.mark.parametrize("dims", [1, 2])
def test_members_along_another_dimension(dims: int) -> None:
    optimizer = adam(0.1)
    params, grads = noise(0, 2, 3, 4), noise(1, 2, 3, 4)

    def step(param: Tensor, grad: Tensor) -> Tensor:
        return optimizer.update(param, grad, optimizer.init(param))[0]

    batched = torch.vmap(step, in_dims=dims, out_dims=dims)(params, grads)
    torch.testing.assert_close(batched, step(params, grads), rtol=1e-13, atol=1e-14)


def test_members_in_the_strides_of_a_slice() -> None:
    optimizer = adam(0.1)
    params, grads = noise(0, SIZE, 6, 8)[:, ::2, ::4], noise(1, SIZE, 3, 2)
    state = torch.vmap(optimizer.init)(params)
    batched, _ = torch.vmap(optimizer.update)(params, grads, state)
    expected, _ = optimizer.update(params, grads, optimizer.init(params))
    torch.testing.assert_close(batched, expected, rtol=1e-13, atol=1e-14)


def test_vmap_changes_nothing_it_was_given() -> None:
    optimizer = adam(0.1)
    params, grads = _population(0), _population(1)
    state = torch.vmap(optimizer.init)(params)
    copies = optree.tree_map(torch.clone, (params, grads, state))
    torch.vmap(optimizer.update)(params, grads, state)
    assert_same((params, grads, state), copies)
