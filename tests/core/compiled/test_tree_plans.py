"""Planned steps of trees by compiled loops: the laws of every planned step, calls, and refusals."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch

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
from functional_optim.plan import tree_steps
from tests.choices import EVERYTHING, case, each
from tests.composition import test_planned_steps as composed
from tests.composition.test_planned_steps import (  # noqa: F401  the same laws, with loops
    FRONT_ENDS,
    SOME,
    seen,
    test_no_plan_and_no_step_holds_what_was_given,
    test_what_somebody_changed_between_steps_is_seen,
)
from tests.composition.test_threads import (  # noqa: F401  the same law, with loops
    test_each_thread_has_the_numbers_of_a_thread_alone,
)
from tests.composition.test_tree_plans import (  # noqa: F401  the same laws, with loops
    test_a_derivative_goes_through_a_step_that_was_planned_before,
    test_a_gradient_may_be_a_parameter_or_a_state_in_a_planned_step,
    test_layouts_may_change_at_any_step,
)
from tests.core.test_default_executor import Seen
from tests.laws.support import TABLE
from tests.steady import calls_of
from tests.tensors import assert_same, normal

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


@pytest.mark.parametrize("name", [*SOME, "momentum", "clipped", "overridden", "adagrad", "prodigy"])
def test_planned_steps_are_those_of_the_reference(
    name: str,
    seen: list[str],  # noqa: F811  the fixture
) -> None:
    """Each optimizer has one of the front-ends, by turns. If everything is tested, it has all."""
    place, names = list(composed.KINDS).index(name), list(FRONT_ENDS)
    for front_end in names if EVERYTHING else (names[place % len(names)],):
        composed.test_planned_steps_are_those_of_the_reference(name, front_end, "auto", seen)


def no_leaf(params: Any, state: Any) -> None:
    params["a"].mul_(torch.ones((), requires_grad=True))


def two_dimensional(params: Any, state: Any) -> None:
    params["a"].resize_(8, 5)


def other_dtype(params: Any, state: Any) -> None:
    state.leaves["a"].stages[-1][0].data = torch.zeros(40, dtype=torch.float64)


CHANGED: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "no leaf": (no_leaf, "'a' is not a leaf of autograd"),
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


@each(name=CHAINS)
def test_a_planned_step_makes_as_many_calls_for_many_tensors_as_for_few(name: str) -> None:
    optimizer, counted = CHAINS[name], []
    for count in (2, 60):
        params = {"a": normal(3), "b": [normal(5, seed=k) for k in range(count)]}
        given = {"a": normal(3), "b": [normal(5, seed=9 * k) for k in range(count)]}
        state = optimizer.init(params)
        for _ in range(3):
            optimizer.update_(params, given, state)
        both = optimizer.update_, optimizer.update
        counted += [calls_of(partial(step, params, given, state)) for step in both]
    assert counted[:2] == counted[2:]


def test_trees_that_share_memory_are_not_stepped_by_the_plan_of_others() -> None:
    """A gradient in a state, or a shared step count, needs another plan."""

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
    for build in (within_state, counted_together):
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


def test_parameters_that_overlap_are_refused_if_a_plan_for_their_layouts_is_known() -> None:
    optimizer, apart, memory = adamw(0.1), [normal(6), normal(6, seed=1)], normal(9, seed=2)
    overlapping, given = [memory[:6], memory[3:]], [normal(6), normal(6)]
    state, before = optimizer.init(apart), memory.clone()
    for _ in range(3):
        optimizer.update_(apart, given, state)
        with pytest.raises(ValueError, match="'0' of shape .* and '1' of shape .* share a part"):
            optimizer.update_(overlapping, given, optimizer.init(overlapping))
    assert torch.equal(memory, before)


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


def test_a_dispatch_mode_sees_the_operations_of_a_step_that_has_a_plan() -> None:
    optimizer = CHAINS["adamw"]
    params = tree()
    state = optimizer.init(params)
    for k in range(3):
        params, state = optimizer.update(params, grads(k), state)
    names = []
    for one in (optimizer, optimizer.using(executor="reference")):
        with Seen() as mode:
            one.update(params, grads(3), state)
        names.append(mode.names)
    assert names[0] == names[1] and "aten.addcdiv.default" in names[1]


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
