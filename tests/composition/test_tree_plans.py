"""Repeated in-place steps of composed trees reuse their plans, and match pure steps."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import (
    Rule,
    adahessian,
    chain,
    clip_by_global_norm,
    freeze,
    lookahead,
    matching,
    partition,
    sgd,
)
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.plan import StepPlan, engine, tree_steps
from functional_optim.plan.decision import Decision

from ..choices import case
from ..steady import calls_of, noted_calls
from ..tensors import assert_same, normal, watched
from .trees import (
    COMPOSED,
    MASKS,
    PERIOD,
    Tree,
    grads_at,
    grads_without,
    lrs_at,
    params_of,
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of functions that a planned step does not need."""
    places = (StepPlan, "__init__"), (engine, "prepare"), (Decision, "add_up")
    return noted_calls(monkeypatch, places)


def stepped(name: str, steps: int, executor: str = "reference") -> tuple[Tree, Any]:
    """Return parameters and state after several in-place steps with all gradients."""
    params, optimizer = params_of(), COMPOSED[name]().using(executor=executor)
    state = optimizer.init(params)
    for step in range(steps):
        optimizer.update_(params, grads_at(step), state)
    return params, state


@pytest.mark.parametrize("executor", ["reference", "blocked"])
@pytest.mark.parametrize("name", COMPOSED)
def test_planned_steps_are_those_of_update(name: str, executor: str) -> None:
    """Planned in-place steps match ``update`` in every bit.

    Gradients are missing in turn, and learning rates change at each step.
    """
    optimizer = COMPOSED[name]()
    in_place = optimizer.using(executor=executor)
    params, want = params_of(), params_of()
    own, state = in_place.init(params), optimizer.init(want)
    for step in range(4 * PERIOD):
        grads, lrs = grads_without(step, MASKS[step % PERIOD]), lrs_at(optimizer, step)
        in_place.update_(params, grads, own, **lrs)
        want, state = optimizer.update(want, grads, state, **lrs)
        with case(step=step):
            assert_same([params, own], [want, state])


@pytest.mark.parametrize("masks", [(set(),), MASKS])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_steady_step_plans_nothing_and_steps_no_leaf_alone(
    name: str, masks: tuple[set[str], ...], seen: list[str]
) -> None:
    params, optimizer = params_of(), COMPOSED[name]()
    state = optimizer.init(params)
    for step in range(8 * PERIOD):
        if step == 7 * PERIOD:
            seen.clear()
        grads = grads_without(step, masks[step % len(masks)])
        optimizer.update_(params, grads, state, **lrs_at(optimizer, step))
    assert seen == []


def odd(path: Any, shape: Any) -> str:
    return "odd" if path[0] % 2 else "even"


def test_python_is_called_as_often_for_many_leaves_as_for_few() -> None:
    optimizer = chain(
        partition({"odd": sgd(0.1, momentum=0.9), "even": sgd(0.2)}, odd), lookahead(2)
    )
    counted = []
    for count in (4, 40):
        params = [normal(5, seed=k) for k in range(count)]
        grads = [normal(5, seed=100 + k) for k in range(count)]
        state = optimizer.init(params)

        def step(given: Any = (params, grads, state)) -> None:
            optimizer.update_(*given)

        for _ in range(8):
            step()
        counted.append([calls_of(step) for _ in range(4)])
    # For separate tensors, torch's block operations need one more call per gradient.
    assert max(counted[1]) <= max(counted[0]) + 36


@pytest.mark.parametrize("name", COMPOSED)
def test_no_plan_and_no_step_holds_what_was_given(name: str) -> None:
    given: list[Any] = []
    optimizer = COMPOSED[name]()
    gc.disable()
    try:
        params = watched(params_of(), given)
        state = watched(optimizer.init(params), given)
        for step in range(8):
            grads = watched(grads_at(step), given)
            if step % 2:
                optimizer.update_(params, grads, state)
            else:
                params, state = optimizer.update(params, grads, state)
                params, state = watched(params, given), watched(state, given)
            del grads
        del params, state
        assert [one() for one in given] == [None] * len(given)
    finally:
        gc.enable()


def test_so_many_plans_are_kept_and_no_more() -> None:
    optimizer = COMPOSED["parts"]()
    for length in range(tree_steps.PLANS + 3):
        params = {"a": normal(length + 1), "b": normal(2, length + 1)}
        optimizer.update(params, params, optimizer.init(params))
    assert len(tree_steps._PLANS) == tree_steps.PLANS


def moved(params: Tree, state: Any) -> None:
    params["head.weight"].data = params["head.weight"].clone() * 2


def replaced(params: Tree, state: Any) -> None:
    params["head.weight"] = params["head.weight"].clone() * 2


def counted_on(params: Tree, state: Any) -> None:
    state.leaves["head.weight"].step.fill_(9)
    for gate in state.leaves["head.weight"].gates:
        gate.runs.fill_(4)


def state_moved(params: Tree, state: Any) -> None:
    field = optree.tree_leaves(state.leaves["head.weight"].stages)[0]
    field.data = field.clone() * 2


@pytest.mark.parametrize("name", ["batches of parts", "clip over parts", "finite batches"])
@pytest.mark.parametrize("change", [moved, replaced, counted_on, state_moved])
def test_what_somebody_changed_between_steps_is_seen(
    name: str, change: Callable[[Tree, Any], None]
) -> None:
    optimizer = COMPOSED[name]()
    params, state = stepped(name, 5)
    change(params, state)
    want, after = optree.tree_map(torch.clone, (params, state), none_is_leaf=False)
    for step in range(5, 9):
        optimizer.update_(params, grads_at(step), state)
        want, after = optimizer.update(want, grads_at(step), after)
    assert_same([params, state], [want, after])


WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a shape": ("body.bias", lambda grad: grad[:2], "gradient at 'body.bias'"),
    "of a frozen one": ("head.weight", lambda grad: grad[:2], "gradient at 'head.weight'"),
    "a dtype": ("body.weight", lambda grad: grad.double(), "gradient at 'body.weight'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_gradient_changes_nothing_in_a_planned_step(what: str) -> None:
    name, wrong, match = WRONG[what]
    params, optimizer = params_of(), chain(freeze(matching("head*")), sgd(0.1))
    state = optimizer.init(params)
    for step in range(5):
        optimizer.update_(params, grads_at(step), state)
    before = optree.tree_map(torch.clone, (params, state))
    grads = grads_at(5)
    grads[name] = wrong(grads[name])
    with pytest.raises(ValueError, match=match):
        optimizer.update_(params, grads, state)
    assert_same([params, state], list(before))


def test_steps_that_all_need_an_input_are_planned_with_it(seen: list[str]) -> None:
    optimizer = chain(clip_by_global_norm(0.5), adahessian(0.1))
    params, want = params_of(), params_of()
    state, after = optimizer.init(params), optimizer.init(want)
    for step in range(8):
        hessian = {name: one.square() for name, one in grads_at(step + 50).items()}
        extra = {"hessian": hessian}
        want, after = optimizer.update(want, grads_at(step), after, extra=extra)
        if step == 4:
            seen.clear()
        optimizer.update_(params, grads_at(step), state, extra=extra)
        with case(step=step):
            assert_same([params, state, hessian], [want, after, extra["hessian"]])
    assert "__init__" not in seen and "prepare" not in seen
    before = optree.tree_map(torch.clone, (params, state))
    with pytest.raises(TypeError, match=r"needs 'hessian' of each parameter"):
        optimizer.update_(params, grads_at(8), state)
    with pytest.raises(ValueError, match="'scale'"):
        optimizer.update_(params, grads_at(8), state, extra={"hessian": {**hessian, "scale": None}})
    assert_same([params, state], list(before))


def test_a_gradient_of_no_parameter_is_refused_in_a_planned_step() -> None:
    params: Tree = {**params_of(), "nothing": None}
    optimizer = COMPOSED["frozen"]()
    state = optimizer.init(params)
    for step in range(5):
        optimizer.update_(params, {**grads_at(step), "nothing": None}, state)
    before = optree.tree_map(torch.clone, (params, state))
    with pytest.raises(ValueError, match="gradient at 'nothing', but the parameter is None"):
        optimizer.update_(params, {**grads_at(5), "nothing": normal(2)}, state)
    assert_same([params, state], list(before))


def test_optimizers_of_the_same_stages_for_other_leaves_are_planned_each_for_itself() -> None:
    """Optimizers that give the same stages to other leaves have separate plans.

    The optimizers take turns, so both plans are kept.
    """
    by_turns = [
        partition({"a": sgd(0.1), "b": sgd(0.5)}, label)
        for label in (
            lambda path, shape: "a" if len(shape) == 2 else "b",
            lambda path, shape: "a" if path[0].startswith("body") else "b",
        )
    ]
    params, want = params_of(), params_of()
    stateless = by_turns[0].init(params)
    after = by_turns[0].init(want)
    for step in range(8):
        optimizer = by_turns[step % 2]
        optimizer.update_(params, grads_at(step), stateless)
        want, after = optimizer.update(want, grads_at(step), after)
        with case(step=step):
            assert_same(params, want)


class Rate(NamedTuple):
    lr: float


def centred(param: Tensor, grad: Tensor, state: tuple[()], c: Rate) -> tuple[Tensor, tuple[()]]:
    return param - c.lr * (grad - grad.mean()), state


def test_a_rule_that_only_says_that_it_is_pointwise_is_refused_by_all_but_the_reference() -> None:
    rule = Rule(name="centred", hyper=Rate, rule=centred)
    optimizer = partition({"odd": chain(rule(lr=0.1)), "even": sgd(0.2)}, odd)
    params, grads = ([normal(5, seed=k + j) for k in range(4)] for j in (0, 4))
    for step in (optimizer.update, optimizer.update_):
        with pytest.raises(NotPointwiseError, match="give that stage kind='per_matrix'"):
            step(params, grads, optimizer.init(params))
    optimizer = optimizer.using(executor="reference")
    params, want = ([normal(5, seed=k) for k in range(4)] for _ in range(2))
    state, after = optimizer.init(params), optimizer.init(want)
    for step in range(5):
        grads = [normal(5, seed=10 * step + k) for k in range(4)]
        optimizer.update_(params, grads, state)
        want, after = optimizer.update(want, grads, after)
        assert_same([params, state], [want, after])
