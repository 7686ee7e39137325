"""What ``init`` and ``update`` return lies in memory of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import NoState, Optimizer, Rule, TorchOptimizer, Transform, adam, chain, sgd
from functional_optim.aliasing import Given, storage_of

from .support import assert_same, noise, tensors


class Hyper(NamedTuple):
    lr: float


class Last(NamedTuple):
    last: Tensor


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


class Total(NamedTuple):
    total: Tensor


def zeros(param: Tensor, hyper: Hyper) -> Last:
    return Last(torch.zeros_like(param))


def optimistic(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """Optimistic gradient descent: the state is the gradient that was given."""
    return param - c.lr * (2 * grad - state.last), Last(grad)


def viewed(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """The same, of a view."""
    return param - c.lr * (2 * grad - state.last), Last(grad.view(grad.shape).detach())


def previous(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """The parameter in another slot."""
    return param - c.lr * grad - 0.1 * (param - state.last), Last(param)


def shown_twice(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    """The new parameter in another slot too."""
    new = param - c.lr * grad + 0.1 * state.last
    return new, Last(new)


def swapped(param: Tensor, grad: Tensor, state: Pair, c: Hyper) -> tuple[Tensor, Pair]:
    """Inputs, each in the other's slot."""
    return param - c.lr * (grad + state.one), Pair(state.other, state.one)


def left_alone(param: Tensor, grad: Tensor, state: Last, c: Hyper) -> tuple[Tensor, Last]:
    return param, state


def of_param(param: Tensor, hyper: Hyper) -> Last:
    return Last(param)


def of_detached(param: Tensor, hyper: Hyper) -> Last:
    return Last(param.detach())


def of_view(param: Tensor, hyper: Hyper) -> Last:
    return Last(param.detach().view_as(param))


def pair_of_one(param: Tensor, hyper: Hyper) -> Pair:
    made = torch.zeros_like(param)
    return Pair(made, made)


def pair(param: Tensor, hyper: Hyper) -> Pair:
    return Pair(torch.zeros_like(param), torch.ones_like(param))


def of(rule: Any, init: Any = zeros, state: Any = Last) -> Optimizer:
    stage = Rule(name=rule.__name__, hyper=Hyper, rule=rule, init=init, state=state)
    return chain(stage(lr=0.1))


RULES: dict[str, Callable[[], Optimizer]] = {
    "the gradient": lambda: of(optimistic),
    "a view of the gradient": lambda: of(viewed),
    "the parameter": lambda: of(previous),
    "the result": lambda: of(shown_twice),
    "states in turn": lambda: of(swapped, pair, Pair),
    "nothing new": lambda: of(left_alone),
    "init: the parameter": lambda: of(previous, of_param),
    "init: detached": lambda: of(previous, of_detached),
    "init: a view": lambda: of(previous, of_view),
    "init: one tensor twice": lambda: of(swapped, pair_of_one, Pair),
}


def storages(*trees: Any) -> set[int]:
    return set(map(storage_of, tensors(*trees)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", RULES)
def test_results_are_apart_from_arguments(name: str, dtype: torch.dtype) -> None:
    """And from one another (fault 4)."""
    optimizer = RULES[name]()
    params: Any = {"a": noise(0, 3, 2, dtype=dtype), "b": noise(1, 4, dtype=dtype)[::2]}
    state = optimizer.init(params)
    assert not storages(state) & storages(params)
    assert len(storages(state)) == len(tensors(state))
    for seed in range(3):
        grads = {key: noise(seed, *p.shape, dtype=dtype) for key, p in params.items()}
        new, new_state = optimizer.update(params, grads, state)
        assert not storages(new, new_state) & storages(params, grads, state)
        assert len(storages(new, new_state)) == len(tensors(new, new_state))
        assert {key: one.stride() for key, one in new.items()} == {
            key: one.stride() for key, one in params.items()
        }
        params, state = new, new_state


def test_the_next_backward_does_not_change_the_state() -> None:
    """Gradients are accumulated in place, where the state lay (fault 4)."""
    optimizer, weight = of(optimistic), torch.nn.Parameter(torch.ones(3))
    state = optimizer.init([weight])
    weight.sum().backward()
    _, state = optimizer.update([weight], [weight.grad], state)
    weight.sum().backward()
    assert state.leaves[0].stages[0].last.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("executor", ["reference", "blocked", "script"])
@pytest.mark.parametrize("name", RULES)
def test_in_place_and_bound_steps_are_the_pure_ones(name: str, executor: Any) -> None:
    """Whatever a rule hands out, whatever ``init`` took (fault 4)."""
    optimizer = RULES[name]().using(executor=executor)
    start = [noise(0, 5), noise(1, 4)]
    params, state = start, optimizer.init(start)
    written = [one.clone() for one in start]
    written_state = optimizer.init(written)
    held = [torch.nn.Parameter(one.clone()) for one in start]
    live = TorchOptimizer(held, optimizer)
    flat = [torch.nn.Parameter(one.clone()) for one in start]
    bound = TorchOptimizer(flat, optimizer, flat=True)
    for seed in range(4):
        grads = [noise(10 * seed + 2, 5), noise(10 * seed + 3, 4)]
        params, state = optimizer.update(params, grads, state)
        optimizer.update_(written, grads, written_state)
        for own in (held, flat):
            for param, grad in zip(own, grads, strict=True):
                param.grad = grad.clone()
        live.step()
        bound.step()
        assert_same((written, written_state), (params, state))
        assert_same([one.detach() for one in held], params)
        assert_same([one.detach() for one in flat], params)


def totals(grad: Tensor) -> Tensor:
    return grad.to(torch.float64).sum()


def keeps_total(
    grad: Tensor, param: Tensor, state: Total, c: Hyper, total: Tensor
) -> tuple[Tensor, Total]:
    return grad, Total(total)


def no_total(param: Tensor, hyper: Hyper) -> Total:
    return Total(torch.zeros((), dtype=torch.float64))


def test_totals_are_each_leafs_own() -> None:
    """Also the one that the caller gave (fault 4)."""
    keeping = Transform(
        name="keeping",
        hyper=Hyper,
        state=Total,
        init=no_total,
        transform=keeps_total,
        measure=totals,
    )
    optimizer, params = chain(keeping(lr=0.1), sgd(lr=0.1)), [noise(0, 3), noise(1, 3)]
    state = optimizer.init(params)
    total = optimizer.measure(params, params, state)
    for measured in ([], [total]):
        _, made = optimizer.update(params, params, state, measured=measured)
        kept = [
            leaf.stages[1].total if leaf.stages[1] else leaf.stages[0].total for leaf in made.leaves
        ]
        assert len({*map(storage_of, kept), storage_of(total)}) == 3
        assert all(torch.equal(one, total) for one in kept)


@pytest.mark.parametrize("name", RULES)
def test_through_torch_func(name: str) -> None:
    """Vmap over a population is the loop; nothing is shared with what was stacked (fault 4)."""
    optimizer, stacked = RULES[name](), noise(0, 3, 4)
    grads = noise(1, 3, 4)
    state = torch.func.vmap(optimizer.init)(stacked)
    params, new = torch.func.vmap(optimizer.update)(stacked, grads, state)
    assert not storages(params, new) & storages(stacked, grads, state)
    for i in range(3):
        want, _ = optimizer.update(stacked[i], grads[i], optimizer.init(stacked[i]))
        assert_same(params[i], want)


def test_a_copy_hands_the_derivative_on() -> None:
    """Of what was returned as it came (fault 4)."""
    optimizer, param = of(left_alone), torch.ones(2, dtype=torch.float64)

    def after(given: Tensor) -> Tensor:
        new, _ = optimizer.update(given, torch.ones_like(given), optimizer.init(given))
        return (new * 3.0).sum()

    assert torch.func.grad(after)(param).tolist() == [3.0, 3.0]
    leaf = param.clone().requires_grad_()
    assert torch.autograd.grad(after(leaf), leaf)[0].tolist() == [3.0, 3.0]


def test_results_that_are_new_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are for what is shared alone (fault 4)."""

    def refused(tensor: Tensor) -> Tensor:
        raise AssertionError(f"copied without need: {tensor}")

    monkeypatch.setattr("functional_optim.aliasing.copy_of", refused)
    optimizer, params = adam(0.1), [noise(0, 3), noise(1, 2, 2)]
    optimizer.update(params, params, optimizer.init(params))


def test_while_a_compiler_traces_results_are_told_apart_by_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory cannot be seen there; a result that is an argument is copied (fault 4)."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr("functional_optim.aliasing.storage_of", None)
    param, fresh = torch.ones(2), torch.zeros(2)
    given = Given([param])
    made = given.apart(param)
    assert made is not param
    assert given.apart(fresh) is fresh
    assert given.apart(fresh) is not fresh


def test_a_compiler_traces_the_comparison_whole() -> None:
    """It breaks no graph, and what is returned as it came is a copy there too (fault 4)."""

    def step(param: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        given = Given([param, grad])
        return given.apart(param * 2.0), given.apart(grad)

    param, grad = torch.ones(2), torch.full((2,), 3.0)
    new, kept = torch.compile(step, backend="eager", fullgraph=True)(param, grad)
    assert new.tolist() == [2.0, 2.0]
    assert kept.tolist() == [3.0, 3.0]
    assert storage_of(kept) != storage_of(grad)


def test_a_stage_without_state_has_none_to_share() -> None:
    """A rule that returns its parameter as it came (fault 4)."""

    def idle(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
        return param, state

    optimizer, param = chain(Rule(name="idle", hyper=Hyper, rule=idle)(lr=0.1)), noise(0, 3)
    new, _ = optimizer.update(param, param, optimizer.init(param))
    assert torch.equal(new, param)
    assert storage_of(new) != storage_of(param)
