"""Planned pure steps by kernels: the reference's numbers, new tensors, and derivatives."""

import gc
from collections import OrderedDict
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from functional_optim import Optimizer, adagrad, adamw, rmsprop, sgd
from functional_optim.plan import StepPlan, engine, tree_steps
from tests.choices import case, each, pairs
from tests.tensors import assert_same, normal, watched

CHAINS: dict[str, Optimizer] = {
    "sgd": sgd(0.1, momentum=0.9),
    "adamw": adamw(0.1, amsgrad=True),
    "overridden": rmsprop(0.1, momentum=0.9).override(("a",), lr=0.5),
    "adagrad": adagrad(0.1),
}


def test_what_comes_out_is_of_the_kind_that_went_in() -> None:
    """The result has the dict type of its input, even when that type changes between steps."""
    optimizer = adamw(0.1).using(executor="auto")
    params: dict[str, Any] = {"a": {"w": torch.ones(3), "b": torch.ones(2)}}
    for kind in (dict, OrderedDict, dict):
        params["a"] = kind(params["a"])
        grads, state = {"a": kind(params["a"])}, optimizer.init(params)
        for _ in range(4):
            made, after = optimizer.update(params, grads, state)
            assert type(made["a"]) is kind
            assert type(after.leaves["a"]) is kind


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch calls it
def test_a_tangent_goes_through_a_step_that_was_planned() -> None:
    """The kernels of a planned step compute no tangents, so dual tensors take another path."""
    found = []
    for executor in ("reference", "auto"):
        optimizer = adamw(0.1).using(executor=executor)
        params, grads = (
            {"w": normal(7, seed=0), "b": normal(3, seed=1)},
            {"w": normal(7, seed=2), "b": normal(3, seed=3)},
        )
        state = optimizer.init(params)
        for _ in range(4):
            optimizer.update(params, grads, state)
        with forward_ad.dual_level():
            dual = {
                key: forward_ad.make_dual(one, torch.ones_like(one)) for key, one in grads.items()
            }
            made, _ = optimizer.update(params, dual, state)
            found.append([forward_ad.unpack_dual(one).tangent for one in made.values()])
    assert None not in found[0]
    assert_same(*found)


@pytest.fixture(autouse=True)
def _every_step_is_worth_a_kernel(with_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    monkeypatch.setattr(tree_steps, "_PLANS", [])


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of leaves of each unplanned step, by any executor."""
    stepped: list[int] = []
    before = engine.update

    def noted(stages: Any, executor: Any, items: Any, *rest: Any) -> Any:
        stepped.append(len(items))
        return before(stages, executor, items, *rest)

    monkeypatch.setattr(engine, "update", noted)
    return stepped


def tree(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    turned = normal(8, 5, seed=1).t().to(dtype)
    return {"a": normal(40).to(dtype), "b": [turned, normal(seed=2).to(dtype)], "c": None}


def grads(step: int, without: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    turned = normal(8, 5, seed=step + 20).t().to(dtype)
    made = {"a": normal(40, seed=step + 10).to(dtype), "c": None}
    made["b"] = [turned, None if without == "b" else normal(seed=step + 30).to(dtype)]
    if without == "a":
        made["a"] = None
    return made


def test_planned_steps_are_those_of_the_reference(unplanned: list[int]) -> None:
    """Gradients are missing in some steps, and the learning rate changes in every step."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    for one in pairs(name=CHAINS, without=["", "a", "b"], dtype=dtypes):
        optimizer = CHAINS[one["name"]].using(executor="reference")
        without, dtype = one["without"], one["dtype"]
        unplanned.clear()
        params, state = tree(dtype), optimizer.init(tree(dtype))
        expected, beside = tree(dtype), optimizer.init(tree(dtype))
        fast = optimizer.using(executor="auto")
        for k in range(8):
            given = grads(k, without if k % 2 else "", dtype)
            before = optree.tree_map(torch.clone, [params, given, state])
            kept = [params, given, state]
            params, state = fast.update(params, given, state, lr=0.1 / (k + 1))
            expected, beside = optimizer.update(expected, given, beside, lr=0.1 / (k + 1))
            with case(**one, step=k):
                assert_same([params, state], [expected, beside])
                assert_same(kept, before)
                strides = optree.tree_map(Tensor.stride, params)
                assert strides == optree.tree_map(Tensor.stride, expected)
                assert (params["a"] is kept[0]["a"]) == (without == "a" and k % 2 == 1)
        if dtype != torch.bfloat16:  # not every rule has an exact kernel for bfloat16
            # The reference makes 8 steps. The other unplanned steps are the first of each set of
            # gradients, and one more when the step counts of leaves begin to differ.
            with case(**one):
                assert 9 <= len(unplanned) <= (11 if without else 9)


@each(name=CHAINS)
def test_what_is_made_has_memory_of_its_own(name: str) -> None:
    optimizer = CHAINS[name].using(executor="auto")
    params, state = tree(), optimizer.init(tree())
    for k in range(4):
        given = grads(k)
        kept = params, state
        before = {one.data_ptr() for one in optree.tree_leaves([params, given, state])}
        params, state = optimizer.update(params, given, state)
        assert kept
        made = [one.data_ptr() for one in optree.tree_leaves([params, state])]
        assert len(set(made)) == len(made)
        assert not before & set(made)


@each(name=CHAINS)
def test_plans_hold_no_tensor(name: str) -> None:
    optimizer = CHAINS[name].using(executor="auto")
    arrays: list[Any] = []
    params = watched(tree(), arrays)
    state = watched(optimizer.init(params), arrays)
    gc.disable()
    try:
        for k in range(4):
            made = optimizer.update(params, grads(k), state)
        assert tree_steps._PLANS
        del params, state, made
        assert [one() for one in arrays] == [None] * len(arrays)
    finally:
        gc.enable()


def test_where_a_derivative_is_wanted_it_is_there() -> None:
    optimizer = adamw(0.1).using(executor="auto")
    params, state = [normal(40)], optimizer.init([normal(40)])
    for k in range(3):
        optimizer.update(params, [normal(40, seed=k)], state)
    grad = normal(40, seed=9).requires_grad_()
    made, _ = optimizer.update(params, [grad], state)
    made[0].sum().backward()
    assert grad.grad is not None and grad.grad.abs().sum() > 0
    rate = torch.tensor(0.1, requires_grad=True)
    made, _ = optimizer.update(params, [normal(40)], state, lr=rate)
    made[0].sum().backward()
    assert rate.grad is not None and rate.grad != 0


def test_populations_are_stepped_as_ever() -> None:
    optimizer = adamw(0.1).using(executor="auto")
    state = optimizer.init(normal(40))
    for k in range(3):
        optimizer.update(normal(40), normal(40, seed=k), state)
    many = torch.stack([normal(40), normal(40, seed=1)])
    made = torch.func.vmap(lambda one: optimizer.update(one, one, state)[0])(many)
    reference = optimizer.using(executor="reference")
    for one, given in zip(made, many, strict=True):
        assert_same(one, reference.update(given, given, state)[0])


def counted(params: Any, state: Any) -> Any:
    state.leaves["b"][0].step.fill_(9)
    return params


def widened(params: Any, state: Any) -> Any:
    return {**params, "a": torch.stack([params["a"], params["a"]], 1)[:, 0]}


@each(name=CHAINS, change=[counted, widened])
def test_what_is_unlike_the_example_is_stepped_as_ever(name: str, change: Any) -> None:
    fast = CHAINS[name].using(executor="auto")
    params, state = tree(), fast.init(tree())
    for k in range(6):
        if k == 3:
            params = change(params, state)
        expected = CHAINS[name].using(executor="reference").update(params, grads(k), state)
        params, state = fast.update(params, grads(k), state)
        with case(step=k):
            assert_same([params, state], list(expected))


def test_a_tree_that_no_kernel_steps_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    before = StepPlan.__init__

    def noted(self: Any, stages: Any, executor: Any, items: Any, *more: Any, **rest: Any) -> None:
        looked.append(len(items))
        before(self, stages, executor, items, *more, **rest)

    monkeypatch.setattr(StepPlan, "__init__", noted)
    optimizer = adamw(0.1).using(executor="auto")
    gaps = {"a": normal(40, 2)[:, 0], "b": normal(5)}  # a column is not contiguous
    params, state = gaps, optimizer.init(gaps)
    for k in range(5):
        expected = adamw(0.1).using(executor="reference").update(params, gaps, state)
        params, state = optimizer.update(params, gaps, state)
        with case(step=k):
            assert_same([params, state], list(expected))
    assert len(looked) == 1
    dense = {"a": normal(40), "b": normal(5)}
    optimizer.update(dense, dense, optimizer.init(dense))
    assert looked == [2, 2]


def test_errors_are_those_of_every_step() -> None:
    optimizer = adamw(0.1).using(executor="auto")
    params, state = tree(), optimizer.init(tree())
    for k in range(3):
        optimizer.update(params, grads(k), state)
    wrong = grads(3)
    wrong["b"][1] = normal(2)
    with pytest.raises(ValueError, match=r"gradient at 'b\.1'"):
        optimizer.update(params, wrong, state)
    with pytest.raises(ValueError, match="no gradients at 'a'"):
        optimizer.update(params, {"b": wrong["b"], "c": None}, state)
    with pytest.raises(ValueError, match="made with other options"):
        sgd(0.1).using(executor="auto").update(
            params, grads(3), sgd(0.1).init(params), momentum=0.9
        )
