"""Planned steps in place on a tree: the same numbers, and no tensor is kept alive."""

import gc
import sys
import threading
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
from functional_optim.kernels import chunks
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.plan import StepPlan, engine, tree_steps
from tests.choices import case, each
from tests.laws.support import TABLE
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
def _every_step_is_worth_a_kernel(with_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    monkeypatch.setattr(tree_steps, "_PLANS", [])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of leaves of each plan that is made."""
    made: list[int] = []
    before = StepPlan.__init__

    def noted(self: Any, stages: Any, executor: Any, items: Any, *rest: Any, **more: Any) -> None:
        made.append(len(items))
        before(self, stages, executor, items, *rest, **more)

    monkeypatch.setattr(StepPlan, "__init__", noted)
    return made


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of leaves of each unplanned step."""
    stepped: list[int] = []
    before = engine.prepare

    def noted(stages: Any, executor: Any, items: Any, *rest: Any, **more: Any) -> Any:
        stepped.append(len(items))
        return before(stages, executor, items, *rest, **more)

    monkeypatch.setattr(engine, "prepare", noted)
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
    """Return params and state after pure steps by the reference."""
    params, optimizer = tree(), optimizer.using(executor="reference")
    state = optimizer.init(params)
    with torch.no_grad():
        for given, hyper in steps:
            params, state = optimizer.update(params, given, state, **hyper)
    return params, state


@each(name=CHAINS, without=["", "a", "b"], changing=[False, True])
def test_planned_steps_are_the_pure_ones(
    name: str, without: str, changing: bool, one_by_one: list[int]
) -> None:
    """Gradients are missing in some steps, and the learning rate changes in some runs."""
    steps = [
        (grads(k, without if k % 2 else ""), {"lr": 0.1 / (k + 1)} if changing else {})
        for k in range(8)
    ]
    one_by_one.clear()
    tree_steps._PLANS.clear()
    params = tree()
    state = CHAINS[name].init(params)
    for given, hyper in steps:
        CHAINS[name].update_(params, given, state, **hyper)
    expected = pure(CHAINS[name], steps)
    assert_same([params, state], list(expected))
    assert one_by_one == []  # even the first step is planned


@each(name=CHAINS)
def test_a_plan_is_made_once(name: str, plans: list[int], one_by_one: list[int]) -> None:
    plans.clear()
    one_by_one.clear()
    tree_steps._PLANS.clear()
    params = tree()
    state = CHAINS[name].init(params)
    for k in range(10):
        CHAINS[name].update_(params, grads(k), state, lr=0.1 / (k + 1))
    assert len(plans) == 1
    assert one_by_one == []


@each(name=CHAINS)
def test_leaves_that_come_to_differ_in_steps_are_planned_anew_once(
    name: str, plans: list[int], one_by_one: list[int]
) -> None:
    """One leaf misses a gradient once, so its step count differs from then on."""
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


@each(optimizer=[muon(0.1), adamw(0.1)])
def test_a_tree_that_no_kernel_steps_is_not_planned_again_and_again(
    optimizer: Optimizer, plans: list[int]
) -> None:
    """Columns of a matrix have gaps in memory, so no kernel steps them."""
    plans.clear()
    params, given = [normal(8, 6)[:, :3]], [normal(8, 6, seed=1)[:, :3]]
    want, state = [params[0].clone()], optimizer.init(params)
    after = optimizer.init(want)
    for _ in range(6):
        optimizer.update_(params, given, state)
        want, after = optimizer.using(executor="reference").update(want, given, after)
    assert_same([params, state], [want, after])
    assert len(plans) <= 1


@each(name=CHAINS)
def test_no_plan_holds_what_was_given(name: str) -> None:
    """Deleted parameters, gradients and states are freed, although the plan remains."""
    optimizer = CHAINS[name]
    arrays: list[Any] = []
    tree_steps._PLANS.clear()
    gc.disable()
    try:
        params = watched(tree(), arrays)
        state = watched(optimizer.init(params), arrays)
        for k in range(4):
            given = watched(grads(k), arrays)
            optimizer.update_(params, given, state)
        del params, state, given
        assert [one() for one in arrays] == [None] * len(arrays)
        assert len(tree_steps._PLANS) == 1
    finally:
        gc.enable()


@each(name=CHAINS)
def test_a_plan_is_for_all_trees_of_these_layouts(
    name: str, plans: list[int], one_by_one: list[int]
) -> None:
    """One plan serves trees at other addresses and with other step counts, in place and pure."""
    optimizer = CHAINS[name]
    trees = [tree() for _ in range(3)]
    states = [optimizer.init(one) for one in trees]
    want = [optree.tree_map(torch.clone, one) for one in (trees, states)]
    optimizer.update_(trees[0], grads(0), states[0])
    want[0][0], want[1][0] = pure(optimizer, [(grads(0), {})])
    plans.clear()
    one_by_one.clear()
    for k in range(9):
        i = k % 3
        after = optimizer.update(trees[i], grads(k), states[i])
        optimizer.update_(trees[i], grads(k), states[i])
        reference = optimizer.using(executor="reference")
        want[0][i], want[1][i] = reference.update(want[0][i], grads(k), want[1][i])
        with case(step=k):
            assert_same([trees[i], states[i]], [want[0][i], want[1][i]])
            assert_same([trees[i], states[i]], list(after))
    assert plans == [] and one_by_one == []


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
    """After each change, a planned step equals the pure step of a copy."""
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
    for momentum, other, match in (
        (0.0, 0.9, "momentum_buffer is missing"),
        (0.9, 0.0, "momentum_buffer"),
    ):
        optimizer, params = sgd(0.1, momentum=momentum), tree()
        state = optimizer.init(params)
        for k in range(4):
            optimizer.update_(params, grads(k), state)
        before = optree.tree_map(torch.clone, [params, state])
        for step in (optimizer.update_, optimizer.update):
            with pytest.raises(ValueError, match=match):
                step(params, grads(4), state, momentum=other)
        assert_same([params, state], before)


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
    """Yield a list for the names of called functions, and switch profiling off at the end."""
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
    for step, most in ((optimizer.update_, 40), (optimizer.update, 50)):
        calls.clear()
        sys.setprofile(noted)
        step(params, given, state)
        sys.setprofile(None)
        assert len(calls) <= (most if name != "clipped" else most + 12), calls


@each(name=CHAINS)
def test_a_planned_step_makes_as_many_calls_for_many_tensors_as_for_few(
    name: str, calls: list[str]
) -> None:
    def noted(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname)

    optimizer, counted = CHAINS[name], []
    for count in (2, 60):
        params = {"a": normal(3), "b": [normal(5, seed=k) for k in range(count)]}
        given = {"a": normal(3), "b": [normal(5, seed=9 * k) for k in range(count)]}
        state = optimizer.init(params)
        for _ in range(3):
            optimizer.update_(params, given, state)
        for step in (optimizer.update_, optimizer.update):
            calls.clear()
            sys.setprofile(noted)
            step(params, given, state)
            sys.setprofile(None)
            counted.append(len(calls))
    assert counted[:2] == counted[2:]


POINTWISE = [
    name
    for name, one in TABLE.items()
    if one.one_chain and all(stage.kind == "pointwise" for stage in one.factory().stages)
]


@pytest.mark.parametrize("name", POINTWISE)
def test_every_pointwise_chain_is_planned_bit_for_bit(name: str) -> None:
    """One tree holds several dtypes, layouts and sizes, and steps in place and purely."""
    optimizer = TABLE[name].factory()
    reference = optimizer.using(executor="reference")

    def mixed(seed: int) -> list[torch.Tensor]:
        return [
            normal(7, 5, seed=seed).t(),
            normal(seed=seed + 1),
            normal(0, seed=seed + 2),
            normal(33, seed=seed + 3).to(torch.bfloat16),
        ]

    params, want = mixed(0), mixed(0)
    state, after = optimizer.init(params), reference.init(want)
    for step in range(5):
        given = mixed(10 * step + 10)
        with torch.no_grad():
            made = optimizer.update(params, given, state)
            optimizer.update_(params, given, state)
            want, after = reference.update(want, given, after)
        with case(step=step):
            assert_same([params, state], [want, after])
            assert_same(list(made), [want, after])


@each(name=CHAINS)
def test_lists_are_planned_where_a_kernel_takes_no_pointers(
    name: str, monkeypatch: pytest.MonkeyPatch, one_by_one: list[int]
) -> None:
    """CUDA steps lists of tensors; this test calls the same functions of torch on the CPU."""
    monkeypatch.setattr(ForeachKernel, "is_for", lambda self, like: True)
    optimizer = CHAINS[name].using(executor="blocked")
    reference = optimizer.using(executor="reference")
    tree_steps._PLANS.clear()
    arrays: list[Any] = []
    params, want = watched(tree(), arrays), tree()
    state, after = optimizer.init(params), reference.init(want)
    for k in range(4):
        optimizer.update_(params, grads(k), state)
        want, after = reference.update(want, grads(k), after)
        one_by_one.clear()
    assert_same([params, state], [want, after])
    optimizer.update_(params, grads(4), state)
    assert one_by_one == []
    del params
    assert [one() for one in arrays] == [None] * len(arrays)


@each(name=CHAINS, most=[1, 12, 1 << 16])
def test_leaves_without_a_loop_are_planned(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch, one_by_one: list[int]
) -> None:
    """Plans also cover leaves that no compiled loop steps: 16-bit, small, or large ones."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1 << 40)
    monkeypatch.setattr(chunks, "LARGE", most)
    optimizer = CHAINS[name]
    reference = optimizer.using(executor="reference")
    for dtype in (torch.bfloat16, torch.float32):
        tree_steps._PLANS.clear()

        def cast(given: Any, dtype: torch.dtype = dtype) -> Any:
            return optree.tree_map(lambda one: one.to(dtype), given)

        params, want = cast(tree()), cast(tree())
        state, after = optimizer.init(params), reference.init(want)
        for k in range(5):
            made = optimizer.update(params, cast(grads(k)), state)
            optimizer.update_(params, cast(grads(k)), state)
            want, after = reference.update(want, cast(grads(k)), after)
            with case(step=k, dtype=dtype):
                assert_same([params, state], [want, after])
                assert_same(list(made), [want, after])
            if k == 2:
                one_by_one.clear()
        assert one_by_one == []


def test_trees_that_share_memory_are_not_stepped_by_the_plan_of_others() -> None:
    """Overlapping parameters, a gradient in a state, or a shared step count need another plan."""

    def overlapping(memory: torch.Tensor, state: Any) -> tuple[Any, Any, Any]:
        return [memory[:6], memory[3:9]], [memory[20:26], memory[30:36]], state

    def within_state(memory: torch.Tensor, state: Any) -> tuple[Any, Any, Any]:
        return [memory[:6], memory[6:12]], [state.leaves[1].stages[-1][0], memory[30:36]], state

    def counted_together(memory: torch.Tensor, state: Any) -> tuple[Any, Any, Any]:
        leaves = [state.leaves[0], state.leaves[1]._replace(step=state.leaves[0].step)]
        return (
            [memory[:6], memory[6:12]],
            [memory[20:26], memory[30:36]],
            state._replace(leaves=leaves),
        )

    optimizer = adamw(0.1)
    for build in (overlapping, within_state, counted_together):
        found = []
        for is_known in (False, True):
            tree_steps._PLANS.clear()
            apart = [normal(6), normal(6, seed=1)]
            known = optimizer.init(apart)
            for _ in range(3 * is_known):
                optimizer.update_(apart, [normal(6), normal(6)], known)
            memory = normal(40, seed=2)
            given = build(memory, optimizer.init([memory[:6], memory[6:12]]))
            for _ in range(3):
                optimizer.update_(*given)
            found.append([memory, given[2]])
        with case(build=build.__name__):
            assert_same(*found)


def test_inference_tensors_are_stepped_as_ever() -> None:
    """A plan for these layouts exists, and steps run inside and outside of inference mode."""
    optimizer = CHAINS["adamw"]
    params = tree()
    state = optimizer.init(params)
    for k in range(3):
        optimizer.update_(params, grads(k), state)
    with torch.inference_mode():
        inside = optree.tree_map(torch.clone, [params, grads(3), state])
        made = optimizer.update(*inside)
        optimizer.update_(*inside)
    want = optimizer.using(executor="reference").update(params, grads(3), state)
    assert_same(list(made), list(want))
    assert_same([inside[0], inside[2]], list(want))
    again = optimizer.update(inside[0], grads(4), inside[2])
    assert_same(list(again), list(optimizer.update(*want[:1], grads(4), want[1])))
    assert not any(one.is_inference() for one in optree.tree_leaves(list(again)))


def test_threads_share_a_plan() -> None:
    optimizer = CHAINS["clipped"]
    found: dict[int, Any] = {}

    def train(number: int, optimizer: Optimizer = optimizer) -> Any:
        params = tree()
        state = optimizer.init(params)
        for k in range(60):
            optimizer.update_(params, grads(k % 7 + number), state, lr=0.1 / (1 + k + number))
        return params, state

    def run(number: int) -> None:
        found[number] = train(number)

    train(0)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number in range(4):
        want = train(number, optimizer.using(executor="reference"))
        assert_same(list(found[number]), list(want))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_that_are_their_own_gradients_are_stepped(name: str) -> None:
    """A parameter and its gradient have separate positions, although they are one tensor."""
    optimizer = TABLE[name].factory()
    params = {key: normal(4, 3, seed=k) for k, key in enumerate("ab")}
    by_reference = optimizer.using(executor="reference")
    want, state = params, optimizer.init(params)
    kept = state
    for _ in range(4):
        want, kept = by_reference.update(want, want, kept)
        params, state = optimizer.update(params, params, state)
        assert_same((params, state), (want, kept))


def test_options_that_a_plan_of_other_shapes_refuses_are_for_another_plan() -> None:
    """A plan is valid for its leaves and options only, so each shape uses another plan."""
    steps: Any = (({}, (4, 3)), ({"batch_axes": 1}, (2, 4, 3)), ({}, (4, 3)))
    for options, shape in steps:
        optimizer = muon(**options)
        params = {"a": normal(*shape, seed=1)}
        state = optimizer.init(params)
        for _ in range(3):
            params, state = optimizer.update(params, {"a": normal(*shape, seed=2)}, state)
