"""Pure steps of composed trees reuse their plans, and match the reference."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    Transform,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    lookahead,
    partition,
    schedule_free_adamw,
    sgd,
)
from functional_optim.core.state import State
from functional_optim.plan import StepPlan, engine, tree_steps
from functional_optim.plan.decision import Decision

from ..choices import case
from ..steady import calls_of, noted_calls
from ..tensors import assert_same, normal
from .trees import COMPOSED, MASKS, PERIOD, Tree, grads_at, grads_without, lrs_at, params_of

KINDS: dict[str, Callable[[], Optimizer]] = {
    **COMPOSED,
    "schedule free": lambda: schedule_free_adamw(0.1),
    "lookahead of parts": lambda: chain(COMPOSED["parts"](), lookahead(2)),
}


@pytest.fixture(autouse=True)
def no_plans() -> None:
    tree_steps._PLANS.clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of functions that a planned step does not need."""
    places = (StepPlan, "__init__"), (engine, "update"), (engine, "prepare"), (Decision, "add_up")
    return noted_calls(monkeypatch, places)


def cloned(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def one_by_one(optimizer: Optimizer) -> Optimizer:
    return optimizer.using(executor="reference")


@pytest.mark.parametrize("name", KINDS)
def test_planned_pure_steps_are_those_of_the_reference(name: str, seen: list[str]) -> None:
    """Planned pure steps match the reference in every bit.

    Gradients are missing in turn, and learning rates change at each step.
    """
    optimizer = KINDS[name]()
    params, want = params_of(), params_of()
    state, after = optimizer.init(params), optimizer.init(want)
    last = 6 * PERIOD
    for step in range(last + PERIOD):
        grads, lrs = grads_without(step, MASKS[step % PERIOD]), lrs_at(optimizer, step)
        given = [params, grads, state]
        before = cloned(given)
        with torch.no_grad():
            if step == last:
                seen.clear()
            made = optimizer.update(params, grads, state, **lrs)
            assert step < last or not seen
            want, after = one_by_one(optimizer).update(want, grads, after, **lrs)
            seen.clear()
        with case(step=step):
            assert_same(list(made), [want, after])
            assert_same(given, before)
            assert_apart(made, (params, state), {k for k, one in grads.items() if one is None})
        params, state = made


def assert_apart(made: Any, before: Any, missing: set[str]) -> None:
    """Make sure that results share no memory with the arguments.

    A leaf without a gradient is returned as the same object.
    """
    (params, state), (old, old_state) = made, before
    for name, param in params.items():
        own, old_own = state.leaves[name], old_state.leaves[name]
        if param is old[name]:
            assert own is old_own
            assert name in missing or not own.stages
            continue
        places = {one.data_ptr() for one in optree.tree_leaves((old[name], old_own)) if one.numel()}
        new = [one.data_ptr() for one in optree.tree_leaves((param, own)) if one.numel()]
        assert places.isdisjoint(new)
    shared = {one.data_ptr() for one in optree.tree_leaves(old_state.shared)}
    assert shared.isdisjoint(one.data_ptr() for one in optree.tree_leaves(state.shared))


@pytest.mark.parametrize("name", KINDS)
def test_a_tree_is_stepped_purely_and_in_place_by_turns(name: str) -> None:
    optimizer = KINDS[name]()
    params, want = params_of(), params_of()
    state, after = optimizer.init(params), optimizer.init(want)
    for step in range(2 * PERIOD):
        grads = grads_without(step, MASKS[step % PERIOD])
        with torch.no_grad():
            if step % 3:
                params, state = optimizer.update(params, grads, state)
            else:
                optimizer.update_(params, grads, state)
            want, after = one_by_one(optimizer).update(want, grads, after)
        with case(step=step):
            assert_same([params, state], [want, after])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["batches of parts", "clip over parts", "gates in gates"])
def test_trees_of_one_form_have_plans_in_common(name: str, in_place: bool, seen: list[str]) -> None:
    """Trees with the same structure share one plan, also if one of them lacks some gradients."""
    optimizer = KINDS[name]()
    trees = [params_of() for _ in range(3)]
    pairs = [[params, optimizer.init(params)] for params in trees]
    wanted = cloned(pairs)
    with torch.no_grad():
        for step in range(8 * PERIOD):
            own, want = pairs[step % 3 if step else 2], wanted[step % 3 if step else 2]
            missing = MASKS[step % PERIOD] if step % 3 == 1 and step < 3 * PERIOD else set()
            grads = grads_without(step, missing)
            if step == 7 * PERIOD:
                seen.clear()
            if in_place:
                optimizer.update_(own[0], grads, own[1])
            else:
                own[:] = optimizer.update(own[0], grads, own[1])
            assert step < 7 * PERIOD or not seen
            want[:] = one_by_one(optimizer).update(want[0], grads, want[1])
            seen.clear()
            with case(step=step):
                assert_same(own, want)
    assert len(tree_steps._PLANS) == 1


def test_a_step_in_which_no_leaf_is_stepped() -> None:
    """A step in which only frozen leaves have gradients changes nothing."""
    optimizer = KINDS["frozen"]()
    params = params_of()
    state = optimizer.init(params)
    for step in range(4):
        grads = grads_without(step, params.keys() - {"head.weight"})
        want = one_by_one(optimizer).update(params, grads, state)
        made = optimizer.update(params, grads, state)
        assert_same(list(made), list(want))
        assert all(made[0][name] is param for name, param in params.items())
        params, state = made


def transposed(tree: Any) -> Any:
    return optree.tree_map(lambda one: one.t().contiguous().t() if one.dim() == 2 else one, tree)


def in_wide_memory(tree: Any) -> Any:
    """Return a tree whose matrices are not contiguous."""

    def wide(one: Tensor) -> Tensor:
        return torch.cat([one, one], 1)[:, : one.shape[1]] if one.dim() == 2 else one

    return optree.tree_map(wide, tree)


def double(tree: Any) -> Any:
    return optree.tree_map(lambda one: one.double() if one.is_floating_point() else one, tree)


def larger(tree: Any) -> Any:
    return optree.tree_map(lambda one: torch.cat([one, one]) if one.dim() else one, tree)


LAYOUTS = [cloned, transposed, in_wide_memory, double, larger]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("of_gradients", [False, True])
@pytest.mark.parametrize("name", ["batches of parts", "clip over parts", "finite"])
def test_layouts_may_change_at_any_step(name: str, of_gradients: bool, in_place: bool) -> None:
    """Layouts may change at any step, for all tensors or for the gradients alone."""
    optimizer = KINDS[name]()
    layouts: list[Callable[[Any], Any]] = LAYOUTS[:3] if of_gradients else LAYOUTS
    params = params_of()
    state = optimizer.init(params)
    with torch.no_grad():
        for step in range(4 * len(layouts)):
            layout = layouts[step % len(layouts)]
            grads = layout(grads_at(step))
            own, after = cloned((params, state)) if of_gradients else layout((params, state))
            if not of_gradients:
                after = State(after.leaves, cloned(state.shared))
            want, wanted = one_by_one(optimizer).update(own, grads, after)
            if in_place:
                optimizer.update_(own, grads, after)
            else:
                own, after = optimizer.update(own, grads, after)
            with case(step=step):
                assert_same([own, after], [want, wanted])


def by_name(path: Any, shape: Any) -> str:
    return "first" if path[0] == "a" else "second"


@pytest.mark.parametrize("door", ["update", "update_", "TorchOptimizer"])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_gradient_may_be_a_parameter_or_a_state_in_a_planned_step(
    batches: int, door: str
) -> None:
    """In a planned step, a gradient may be a parameter or state of a part that steps before it."""
    parts = partition({"first": sgd(0.1, momentum=0.9), "second": adamw(0.1)}, by_name)
    optimizer = chain(accumulate(batches), parts, lookahead(3)) if batches > 1 else parts
    params = {name: normal(3, 2, seed=k) for k, name in enumerate("ab")}
    state, (want, after) = optimizer.init(params), (cloned(params), optimizer.init(params))
    trained = {k: one.clone().requires_grad_() for k, one in params.items()}
    stepped = TorchOptimizer(trained.items(), optimizer)
    for step in range(12):
        grads: Tree = {name: normal(3, 2, seed=10 * step + k) for k, name in enumerate("ab")}
        wanted_grads = dict(grads)
        if step % 4 == 3 and door != "TorchOptimizer":
            momentum = optree.tree_leaves(state.leaves["a"].stages)[-1]
            grads = {"a": params["b"], "b": params["a"] if step < 8 else momentum}
            wanted_grads = cloned(grads)
        elif step % 4 == 3:
            grads = {"a": trained["b"].detach(), "b": trained["a"].detach()}
            wanted_grads = cloned(grads)
        with torch.no_grad():
            want, after = one_by_one(optimizer).update(want, wanted_grads, after)
            if door == "update":
                params, state = optimizer.update(params, grads, state)
            elif door == "update_":
                optimizer.update_(params, grads, state)
        if door == "TorchOptimizer":
            for name, grad in grads.items():
                trained[name].grad = grad
            stepped.step()
        own = {k: one.detach() for k, one in trained.items()} if door[0] == "T" else params
        with case(step=step):
            assert_same(own, want)


class Weight(NamedTuple):
    weight: Any


class Loss(NamedTuple):
    loss: Any


def weighed(grad: Any, param: Any, state: Any, c: Any) -> Any:
    return (grad * c.weight).to(grad.dtype), state


WEIGHED = Transform(
    name="weighed",
    hyper=Weight,
    transform=weighed,
    shared=Loss,
    init_shared=lambda hyper: Loss(1.0),
    combine=lambda before, totals, hyper, loss: Loss(loss),
    coefficients=lambda step, hyper, shared: Weight(hyper.weight * shared.loss),
    extra=("loss",),
)


@pytest.mark.parametrize("carrier", ["params", "state", "grads", "weight", "extra", "measured"])
def test_a_derivative_goes_through_a_step_that_was_planned_before(carrier: str) -> None:
    optimizer = chain(clip_by_global_norm(0.5), WEIGHED(weight=0.1), COMPOSED["parts"]())
    params = params_of()
    state = optimizer.init(params)
    extra = {"loss": torch.tensor(2.0)}
    for step in range(3):
        params, state = optimizer.update(params, grads_at(step), state, extra=extra)
    assert len(tree_steps._PLANS) == 1
    given: dict[str, Any] = {
        "params": params, "state": state, "grads": grads_at(3), "weight": 0.1,
        "extra": {"loss": torch.tensor(2.0)}, "measured": [torch.tensor(4.0).double()],
    }  # fmt: skip
    carrying = torch.tensor(0.1) if carrier == "weight" else given[carrier]
    given[carrier] = optree.tree_map(floating_with_grad, carrying)
    made = optimizer.update(
        given["params"],
        given["grads"],
        given["state"],
        measured=given["measured"],
        extra=given["extra"],
        weight=given["weight"],
    )
    results = [one for one in optree.tree_leaves(made[0]) if one.requires_grad]
    assert results
    assert any(one.grad_fn is not None for one in results)


def floating_with_grad(one: Tensor) -> Tensor:
    return one.clone().requires_grad_() if one.is_floating_point() else one


def test_python_is_called_as_often_for_many_leaves_as_for_few() -> None:
    parts = partition({"odd": sgd(0.1, momentum=0.9), "even": adamw(0.2)}, odd)
    optimizer = chain(accumulate(2), parts, lookahead(2))
    counted = []
    for count in (4, 40):
        params = [normal(5, seed=k) for k in range(count)]
        grads = [normal(5, seed=100 + k) for k in range(count)]
        given: list[Any] = [params, optimizer.init(params)]

        def step(given: list[Any] = given, grads: list[Tensor] = grads) -> None:
            given[:] = optimizer.update(given[0], grads, given[1])

        for _ in range(12):
            step()
        counted.append([calls_of(step) for _ in range(6)])
    # For separate tensors, torch's block operations need one more call per gradient.
    assert max(counted[1]) <= max(counted[0]) + 36


def odd(path: Any, shape: Any) -> str:
    return "odd" if path[0] % 2 else "even"


def test_a_state_of_an_earlier_version_says_after_a_planned_step_how_often_gates_opened() -> None:
    optimizer = KINDS["accumulate"]()
    params = params_of()
    state = optimizer.init(params)
    for step in range(4):
        params, state = optimizer.update(params, grads_at(step), state)
    earlier = State(state.leaves, state.shared._replace(opened=()))
    made = optimizer.update(params, grads_at(4), earlier)
    want = one_by_one(optimizer).update(params, grads_at(4), earlier)
    assert [int(one) for one in optree.tree_leaves(made[1].shared.opened)] == [4]
    assert_same(list(made), list(want))


def test_threads_step_trees_of_one_form_at_once() -> None:
    optimizer = KINDS["batches of parts"]()
    results: dict[int, Any] = {}

    def run(number: int, executor: str) -> None:
        own = optimizer.using(executor=executor)
        params: Any = {k: one + number for k, one in params_of().items()}
        state = own.init(params)
        for step in range(40):
            grads = grads_without(step, MASKS[(step + number) % PERIOD])
            params, state = own.update(params, grads, state)
        results[number] = params, state

    threads = [threading.Thread(target=run, args=(number, "auto")) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number, found in sorted(results.items()):
        run(number, "reference")
        with case(number=number):
            assert_same(list(found), list(results[number]))
    assert len(results) == 3
