"""Memory of the results of ``init`` and ``update``, which nothing else shares."""

from collections.abc import Callable

import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, Transform, chain, sgd
from functional_optim.core.aliasing import storage_key
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

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
