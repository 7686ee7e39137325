"""vmap over a population of parameters, gradients, states and hyper-parameters."""

from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim import Optimizer, adam, chain, clip_by_global_norm, sgd
from tests.choices import each_value, one_in

from .support import EVERY, Frozen, noise, step, steps

SIZE = 3


def _tree(seed: int) -> dict[str, Tensor]:
    return {"w": noise(seed, 2, 3), "b": noise(seed + 100), "e": noise(0, 0)}


def _stack(trees: list[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def _close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


@each_value(optimizer=dict(one_in(3, EVERY.items())))
def test_a_population_steps_as_its_members(optimizer: Optimizer) -> None:
    """The members have made different numbers of steps, so their bias corrections differ.

    Every third optimizer is tried; a law compares a population of each with a loop.
    """
    members = [
        steps(optimizer, _tree(index), lambda made: _tree(made + 10), index)
        for index in range(SIZE)
    ]
    together = _stack([one[0] for one in members]), _stack([one[1] for one in members])
    for number in range(2):
        grads = [_tree(50 + SIZE * number + index) for index in range(SIZE)]
        given = together[0], _stack(grads), together[1]
        frozen = Frozen(given)
        together = torch.vmap(optimizer.update)(*given)
        frozen.assert_untouched()
        members = [
            optimizer.update(param, grad, state)
            for (param, state), grad in zip(members, grads, strict=True)
        ]
        _close(together, _stack(members))
    assert type(together[1]) is type(members[0][1])
    assert type(together[1].leaves["w"]) is type(members[0][1].leaves["w"])
    assert together[1].leaves["w"].step.tolist() == [2, 3, 4]


@each_value(optimizer=EVERY)
def test_the_state_of_a_population_is_that_of_its_members(optimizer: Optimizer) -> None:
    trees = [_tree(index) for index in range(SIZE)]
    _close(torch.vmap(optimizer.init)(_stack(trees)), _stack(list(map(optimizer.init, trees))))


def test_only_the_state_is_a_population() -> None:
    """Several states share one parameter and one gradient."""
    optimizer, param, grad = adam(0.1), noise(0, 3), noise(1, 3)
    state = torch.vmap(optimizer.init)(noise(2, SIZE, 3))
    state = optree.tree_map(
        lambda t: t + noise(3, *t.shape).square() if t.is_floating_point() else t, state
    )
    batched, _ = torch.vmap(optimizer.update, in_dims=(None, None, 0))(param, grad, state)
    for index in range(SIZE):
        alone = optree.tree_map(lambda t, i=index: t[i], state)
        _close(batched[index], optimizer.update(param, grad, alone)[0])


def test_a_grid_of_learning_rates_trains_at_once() -> None:
    """Nested vmap over lr and seed gives the results of the single runs."""
    rates = torch.tensor([0.01, 0.5], dtype=torch.float64)
    starts = noise(0, SIZE, 3)
    optimizer = chain(clip_by_global_norm(1.0), adam())

    def train(rate: Any, param: Tensor) -> Tensor:
        state = optimizer.init(param)
        for _ in range(3):
            param, state = optimizer.update(param, 2 * param, state, lr=rate)
        return param

    grid = torch.vmap(torch.vmap(train, (None, 0)), (0, None))(rates, starts)
    _close(grid, _stack([_stack([train(r.item(), start) for start in starts]) for r in rates]))
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


def test_members_lie_along_any_dimension_and_in_any_strides() -> None:
    params, grads = noise(0, 2, 3, 4), noise(1, 2, 3, 4)
    wanted = step(adam(0.1), params, grads)
    for dim in (1, 2):
        batched = torch.vmap(lambda *one: step(adam(0.1), *one), in_dims=dim, out_dims=dim)
        _close(batched(params, grads), wanted)
    params, grads = noise(0, SIZE, 6, 8)[:, ::2, ::4], noise(1, SIZE, 3, 2)
    state = torch.vmap(adam().init)(params)
    batched, _ = torch.vmap(adam(0.1).update)(params, grads, state)
    _close(batched, step(adam(0.1), params, grads))
