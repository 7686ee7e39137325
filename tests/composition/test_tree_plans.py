"""Planned steps of composed trees: errors, layouts, derivatives, and gradients that are written."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import (
    Rule,
    Transform,
    accumulate,
    adahessian,
    adamw,
    chain,
    clip_by_global_norm,
    freeze,
    lookahead,
    matching,
    partition,
    sgd,
)
from functional_optim.core.state import State
from functional_optim.kernels.errors import NotPointwiseError
from functional_optim.plan import StepPlan, item_steps, tree_steps

from ..choices import case
from ..steady import noted_calls
from ..tensors import assert_same, normal
from .front_ends import FRONT_ENDS, Groups, cloned
from .trees import COMPOSED, Tree, grads_at, grads_without, params_of


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_steps, "_PLANS", [])


def odd(path: Any, shape: Any) -> str:
    return "odd" if path[0] % 2 else "even"


def test_so_many_plans_are_kept_and_no_more() -> None:
    optimizer = COMPOSED["parts"]()
    for length in range(tree_steps.PLANS + 3):
        params = {"a": normal(length + 1), "b": normal(2, length + 1)}
        optimizer.update(params, params, optimizer.init(params))
    assert len(tree_steps._PLANS) == tree_steps.PLANS


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


def test_steps_that_all_need_an_input_are_planned_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted_calls(monkeypatch, ((StepPlan, "__init__"), (item_steps, "prepare")))
    optimizer = chain(clip_by_global_norm(0.5), adahessian(0.1))
    params, want = params_of(), params_of()
    state, after = optimizer.init(params), optimizer.init(want)
    for step in range(8):
        hessian = {name: one.square() for name, one in grads_at(step + 50).items()}
        extra = {"hessian": hessian}
        want, after = optimizer.using(executor="reference").update(
            want, grads_at(step), after, extra=extra
        )
        if step == 4:
            seen.clear()
        optimizer.update_(params, grads_at(step), state, extra=extra)
        with case(step=step):
            assert_same([params, state, hessian], [want, after, extra["hessian"]])
    assert seen == []
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
        alone = optimizer.using(executor="reference")  # has no plans
        want, after = alone.update(want, grads_at(step), after)
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


def test_a_step_in_which_no_leaf_is_stepped() -> None:
    """A step in which only frozen leaves have gradients changes nothing."""
    optimizer = COMPOSED["frozen"]()
    params = params_of()
    state = optimizer.init(params)
    for step in range(4):
        grads = grads_without(step, params.keys() - {"head.weight"})
        want = optimizer.using(executor="reference").update(params, grads, state)
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
    optimizer = COMPOSED[name]()
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
            want, wanted = optimizer.using(executor="reference").update(own, grads, after)
            if in_place:
                optimizer.update_(own, grads, after)
            else:
                own, after = optimizer.update(own, grads, after)
            with case(step=step):
                assert_same([own, after], [want, wanted])


def by_name(path: Any, shape: Any) -> str:
    return "first" if path[0] == "a" else "second"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("batches", [1, 2])
def test_a_gradient_may_be_a_parameter_or_a_state_in_a_planned_step(
    batches: int, front_end: str
) -> None:
    """In a planned step, a gradient may be a parameter or state of a part that steps before it."""
    parts = partition({"first": sgd(0.1, momentum=0.9), "second": adamw(0.1)}, by_name)
    optimizer = chain(accumulate(batches), parts, lookahead(3)) if batches > 1 else parts
    want = {name: normal(3, 2, seed=k) for k, name in enumerate("ab")}
    run, after = FRONT_ENDS[front_end](optimizer, cloned(want)), optimizer.init(want)
    for step in range(12):
        grads: Tree = {name: normal(3, 2, seed=10 * step + k) for k, name in enumerate("ab")}
        if step % 4 == 3 and isinstance(run, Groups):
            grads = {"a": run.trained["b"].detach(), "b": run.trained["a"].detach()}
        elif step % 4 == 3:
            momentum = optree.tree_leaves(run.state.leaves["a"].stages)[-1]
            grads = {"a": run.params["b"], "b": run.params["a"] if step < 8 else momentum}
        wanted = cloned(grads)
        run.step(grads)
        with torch.no_grad():
            want, after = optimizer.using(executor="reference").update(want, wanted, after)
        with case(step=step):
            run.assert_same(want, after)


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


def test_a_state_of_an_earlier_version_says_after_a_planned_step_how_often_gates_opened() -> None:
    optimizer = COMPOSED["accumulate"]()
    params = params_of()
    state = optimizer.init(params)
    for step in range(4):
        params, state = optimizer.update(params, grads_at(step), state)
    earlier = State(state.leaves, state.shared._replace(opened=()))
    made = optimizer.update(params, grads_at(4), earlier)
    want = optimizer.using(executor="reference").update(params, grads_at(4), earlier)
    assert [int(one) for one in optree.tree_leaves(made[1].shared.opened)] == [4]
    assert_same(list(made), list(want))


def test_a_pure_step_of_tensors_with_gaps_is_not_made_by_the_plan_of_dense_ones() -> None:
    """torch rounds 16-bit sums of tensors with gaps in another way than those of their copies."""
    optimizer = sgd(lr=1e-3, maximize=True)
    dense, grad = normal(33, 17).bfloat16(), normal(33, 17, seed=1).bfloat16()
    gaps = torch.zeros(33, 34, dtype=torch.bfloat16)[:, ::2]
    found = []
    for param in (dense, gaps):
        param.copy_(dense)
        found.append(optimizer.update(param, grad, optimizer.init(param))[0])
    reference = optimizer.using(executor="reference")
    wanted = [reference.update(one, grad, reference.init(one))[0] for one in (dense, gaps)]
    assert not torch.equal(*wanted)
    assert_same(found, wanted)
