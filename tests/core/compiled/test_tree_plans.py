"""Steps in place of a tree are planned: with the same numbers, and with nothing held for it."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import optree
import pytest
import torch

import functional_optim
from functional_optim import (
    Optimizer,
    adagrad,
    adamw,
    chain,
    clip_by_global_norm,
    muon,
    rmsprop,
    sgd,
)
from functional_optim.plan import engine, tree_plans
from functional_optim.plan.step_plan import StepPlan
from tests.choices import case, each
from tests.tensors import assert_same, normal, watched

PACKAGE = str(Path(functional_optim.__file__).parent)

CHAINS: dict[str, Optimizer] = {
    "sgd": sgd(0.1, momentum=0.9),
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_global_norm(1.0), adamw(0.1)),
    "overridden": rmsprop(0.1, momentum=0.9).override(("a",), lr=0.5),
    "adagrad": adagrad(0.1),
}


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many leaves each plan has that is made."""
    made: list[int] = []
    before = StepPlan.__init__

    def noted(
        self: StepPlan, stages: Any, executor: Any, items: Any, *rest: Any, **more: Any
    ) -> None:
        made.append(len(items))
        before(self, stages, executor, items, *rest, **more)

    monkeypatch.setattr(StepPlan, "__init__", noted)
    return made


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many leaves each step has that was not planned."""
    stepped: list[int] = []
    before = engine.update_

    def noted(stages: Any, executor: Any, items: Any, *rest: Any, **more: Any) -> None:
        stepped.append(len(items))
        before(stages, executor, items, *rest, **more)

    monkeypatch.setattr(engine, "update_", noted)
    return stepped


def tree() -> dict[str, Any]:
    return {"a": normal(40), "b": [normal(5, 8, seed=1), normal(seed=2)], "c": None}


def grads(step: int, without: str = "") -> dict[str, Any]:
    made = {"a": normal(40, seed=step + 10), "c": None}
    made["b"] = [normal(5, 8, seed=step + 20), normal(seed=step + 30)]
    if without == "a":
        made["a"] = None
    elif without == "b":
        made["b"][1] = None
    return made


def pure(optimizer: Optimizer, steps: Any) -> tuple[Any, Any]:
    """What pure steps of the reference give."""
    params = tree()
    state = optimizer.init(params)
    with torch.no_grad():
        for given, hyper in steps:
            params, state = optimizer.update(params, given, state, **hyper)
    return params, state


@each(name=CHAINS, without=["", "a", "b"], changing=[False, True])
def test_planned_steps_are_the_pure_ones(
    name: str, without: str, changing: bool, one_by_one: list[int]
) -> None:
    """With missing gradients in turn, and a learning rate that changes in every step."""
    steps = [
        (grads(k, without if k % 2 else ""), {"lr": 0.1 / (k + 1)} if changing else {})
        for k in range(8)
    ]
    one_by_one.clear()
    params = tree()
    state = CHAINS[name].init(params)
    for given, hyper in steps:
        CHAINS[name].update_(params, given, state, **hyper)
    expected = pure(CHAINS[name], steps)
    assert_same([params, state], list(expected))
    # What was not planned: the first step, and the first by each set of missing gradients after it.
    assert len(one_by_one) == (3 if without else 2), one_by_one


@each(name=CHAINS)
def test_a_plan_is_made_once(name: str, plans: list[int], one_by_one: list[int]) -> None:
    plans.clear()
    one_by_one.clear()
    params = tree()
    state = CHAINS[name].init(params)
    for k in range(10):
        CHAINS[name].update_(params, grads(k), state, lr=0.1 / (k + 1))
    assert len(plans) == 1
    assert len(one_by_one) == 2


@each(name=CHAINS)
def test_leaves_that_come_to_differ_in_steps_are_planned_anew_once(
    name: str, plans: list[int], one_by_one: list[int]
) -> None:
    """Steps of all, one without a gradient, and again steps of all."""
    params = tree()
    state = CHAINS[name].init(params)
    for k in range(4):
        CHAINS[name].update_(params, grads(k), state)
    CHAINS[name].update_(params, grads(4, "b"), state)
    plans.clear()
    one_by_one.clear()
    for k in range(5, 12):
        CHAINS[name].update_(params, grads(k), state)
    assert len(plans) <= 1 and len(one_by_one) <= 1


def test_a_tree_that_no_kernel_steps_is_not_planned_again_and_again(plans: list[int]) -> None:
    params, given = [normal(8, 6)], [normal(8, 6, seed=1)]
    state = muon(0.1).init(params)
    for _ in range(6):
        muon(0.1).update_(params, given, state)
    assert len(plans) == 1


@each(name=CHAINS)
def test_no_plan_holds_what_was_given(name: str) -> None:
    """The states of one restart after the other, and then the parameters, go with their names."""
    optimizer = CHAINS[name]
    arrays: list[Any] = []
    states: list[Any] = []
    params = watched(tree(), arrays)
    known = len(tree_plans.KNOWN)
    gc.disable()
    try:
        for _ in range(2):
            state = watched(optimizer.init(params), states)
            for k in range(4):
                optimizer.update_(params, grads(k), state)
            assert len(tree_plans.KNOWN) == known + 1
            del state
            assert [one() for one in states] == [None] * len(states)
            states.clear()
        state = optimizer.init(params)
        for k in range(4):
            optimizer.update_(params, grads(k), state)
        del params  # and the state stays
        assert [one() for one in arrays] == [None] * len(arrays)
        assert len(tree_plans.KNOWN) == known
    finally:
        gc.enable()


def test_plans_may_be_forgotten_while_another_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector may have it, which takes another state of the same parameters."""
    optimizer, params = CHAINS["adamw"], tree()
    state, other = optimizer.init(params), [optimizer.init(params)]
    for own in (state, *other):
        for k in range(4):
            optimizer.update_(params, grads(k), own)
    optimizer.update_(params, grads(4, "b"), state)  # so that leaves differ in their steps
    before = tree_plans.TreePlan.__init__

    def init(self: Any, *given: Any) -> None:
        other.clear()
        before(self, *given)

    monkeypatch.setattr(tree_plans.TreePlan, "__init__", init)
    del own
    expected, after = optree.tree_map(torch.clone, (params, state))
    for k in range(5, 8):
        optimizer.update_(params, grads(k), state)
        expected, after = optimizer.update(expected, grads(k), after)
    assert not other
    assert_same([params, state], [expected, after])


def no_leaf(params: Any, state: Any) -> None:
    params["a"].mul_(torch.ones((), requires_grad=True))


def two_dimensional(params: Any, state: Any) -> None:
    params["a"].resize_(8, 5)


def other_dtype(params: Any, state: Any) -> None:
    state.leaves["a"].stages[-1][0].data = torch.zeros(40, dtype=torch.float64)


CHANGED: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "no leaf": (no_leaf, "'a' is no leaf of autograd"),
    "another shape": (two_dimensional, "'a'"),
    "another dtype": (other_dtype, "'a' has dtype"),
}


@each(name=["adamw", "clipped", "adagrad"], what=CHANGED)
def test_what_a_plan_was_not_made_for_is_refused_as_ever(name: str, what: str) -> None:
    optimizer, params = CHAINS[name], tree()
    state = optimizer.init(params)
    for k in range(4):
        optimizer.update_(params, grads(k), state)
    change, match = CHANGED[what]
    change(params, state)
    if what == "another dtype" and name == "adagrad":
        match = "'a'"
    before = optree.tree_map(torch.clone, params)
    with pytest.raises(ValueError, match=match):
        optimizer.update_(params, grads(4), state)
    assert_same(params, before)


@each(name=CHAINS)
def test_a_gradient_that_is_refused_changes_nothing(name: str) -> None:
    optimizer, params = CHAINS[name], tree()
    state = optimizer.init(params)
    for k in range(4):
        optimizer.update_(params, grads(k), state)
    written = [one for one in optree.tree_leaves([params, state]) if one is not None]
    versions = [one._version for one in written]
    before = optree.tree_map(torch.clone, [params, state])
    wrong = grads(4)
    wrong["b"][1] = normal(2)
    with pytest.raises(ValueError, match=r"gradient at 'b\.1'"):
        optimizer.update_(params, wrong, state)
    with pytest.raises(ValueError, match="no gradients at 'a'"):
        optimizer.update_(params, {"b": wrong["b"], "c": None}, state)
    assert_same([params, state], before)
    assert [one._version for one in written] == versions


def moved(params: Any, state: Any) -> None:
    params["a"].data = params["a"].data.clone()


def replaced(params: Any, state: Any) -> None:
    params["a"] = params["a"].clone()


def counted(params: Any, state: Any) -> None:
    state.leaves["b"][0].step.fill_(9)


@each(name=CHAINS, change=[moved, replaced, counted])
def test_what_has_changed_between_steps_is_seen(name: str, change: Any) -> None:
    """As a tree that was never stepped in place would be: by its copy, at each step."""
    optimizer, params = CHAINS[name], tree()
    state = optimizer.init(params)
    for k in range(8):
        if k in (3, 6):
            change(params, state)
        expected = optree.tree_map(torch.clone, [params, state])
        with torch.no_grad():
            expected = list(optimizer.update(*expected[:1], grads(k), expected[1]))
        optimizer.update_(params, grads(k), state)
        with case(step=k):
            assert_same([params, state], expected)


def test_an_option_that_asks_for_other_state_is_refused_as_ever() -> None:
    params = tree()
    state = sgd(0.1).init(params)
    for k in range(4):
        sgd(0.1).update_(params, grads(k), state)
    with pytest.raises(ValueError, match="momentum_buffer is missing"):
        sgd(0.1).update_(params, grads(4), state, momentum=0.9)


def test_leaves_that_are_each_others_gradients_are_read_before_any_is_stepped() -> None:
    for name in ("sgd", "adamw", "adagrad"):
        optimizer = CHAINS[name]
        params, twin = [normal(6), normal(6, seed=1)], [normal(6), normal(6, seed=1)]
        state, beside = optimizer.init(params), optimizer.init(twin)
        for _ in range(5):
            optimizer.update_(params, [params[1], params[0]], state)
            optimizer.update_(twin, [twin[1].clone(), twin[0].clone()], beside)
        with case(name=name):
            assert_same([params, state], [twin, beside])


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Our Python functions that are called, while it is asked."""
    found: list[str] = []
    yield found
    sys.setprofile(None)


@each(name=["sgd", "adamw", "clipped"], without=["", "b"])
def test_a_planned_step_of_three_tensors_makes_few_calls(
    name: str, without: str, calls: list[str]
) -> None:
    def noted(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname)

    optimizer, params = CHAINS[name], tree()
    state = optimizer.init(params)
    for k in range(4):
        optimizer.update_(params, grads(k, without), state)
    given = grads(4, without)
    calls.clear()
    sys.setprofile(noted)
    optimizer.update_(params, given, state)
    sys.setprofile(None)
    assert len(calls) <= (60 if name != "clipped" else 130), calls
