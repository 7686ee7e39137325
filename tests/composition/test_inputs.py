"""Inputs that are one tensor per leaf, beside the gradient: Sophia and AdaHessian use them."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import (
    LeafInput,
    Optimizer,
    Rule,
    accumulate,
    adahessian,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    descend,
    ema,
    freeze,
    lookahead,
    masked,
    partition,
    sam,
    scale_by_adahessian,
    scale_by_sophia,
    sgd,
    sophia,
    with_shape,
)
from functional_optim.core.stage import rows_of_sparse
from functional_optim.numeric import addcmul

from ..choices import case, each, pairs
from ..tensors import assert_same, normal
from .second_order import (
    BOTH,
    EVERY,
    adahessian_formula,
    cast,
    estimates_at,
    given_at,
    run_given,
    sophia_formula,
)
from .trees import HOLES, STEPS, grads_at, kind, params_of

IN_PYTHON = ("reference", "blocked")
"""Executors that compile nothing. ``tests/core/compiled`` tests the other executors."""


def by_formula(formula: Callable[..., Any], hyper: dict[str, Any], every: int) -> Tensor:
    """Return each element's parameter and two averages by a formula, as three rows."""
    start, steps = normal(6, dtype=torch.float64), range(6)
    grads = [normal(6, seed=k + 1, dtype=torch.float64).tolist() for k in steps]
    given = [normal(6, seed=k + 50, dtype=torch.float64).tolist() for k in steps]
    rows = []
    for e, p in enumerate(start.tolist()):
        columns = [(grads[k][e], None if k % every else given[k][e]) for k in steps]
        rows.append(formula(p, columns, hyper))
    return torch.tensor(rows, dtype=torch.float64).T


def by_steps(optimizer: Optimizer, every: int) -> Tensor:
    """Return each element's parameter and two averages by the optimizer, as three rows."""
    param = normal(6, dtype=torch.float64)
    state = optimizer.init(param)
    for k in range(6):
        given = {} if k % every else {"hessian": normal(6, seed=k + 50, dtype=torch.float64)}
        grad = normal(6, seed=k + 1, dtype=torch.float64)
        param, state = optimizer.update(param, grad, state, extra=given)
    average, second = next(one for one in state.leaves.stages if one)[:2]
    return torch.stack([param, average, second])


def test_sophia_is_the_algorithm() -> None:
    for hyper in pairs(
        lr=[0.1, 1.0],
        betas=[(0.96, 0.99), (0.0, 0.5), (0.9, 0.0)],
        gamma=[0.01, 1.0, 30.0, 0.0],
        eps=[1e-12, 0.5],
        weight_decay=[0.0, 0.2],
        every=[1, 3, 7],
    ):
        every = hyper.pop("every")
        with case(every=every, **hyper):
            want = by_formula(sophia_formula, hyper, every)
            got = by_steps(sophia(**hyper), every)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_adahessian_is_the_algorithm() -> None:
    for hyper in pairs(
        lr=[0.15, 1.0],
        betas=[(0.9, 0.999), (0.0, 0.5), (0.8, 0.0)],
        eps=[1e-4, 0.5],
        weight_decay=[0.0, 0.2],
        hessian_power=[1.0, 0.5, 0.0],
        maximize=[False, True],
    ):
        with case(**hyper):
            want = by_formula(adahessian_formula, hyper, 1)
            got = by_steps(adahessian(**hyper), 1)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@each(name=list(BOTH), executor=IN_PYTHON, dtype=[torch.float32, torch.bfloat16, torch.complex64])
def test_in_place_and_by_every_executor_it_is_the_same(
    name: str, executor: Any, dtype: torch.dtype
) -> None:
    """Every executor matches the reference, purely and in place, and does not write to the inputs.

    The test also compares the version counters of the inputs.
    """
    make, every = BOTH[name]
    want = run_given(make(), every=every, missing=HOLES, dtype=dtype)
    optimizer = make().using(executor=executor)
    assert_same(run_given(optimizer, every=every, missing=HOLES, dtype=dtype), want)
    params = cast(params_of(), dtype)
    state = optimizer.init(params)
    tensors = optree.tree_leaves((params, state))
    for step in range(STEPS):
        given = cast(given_at(step, every), dtype)
        versions = [one._version for one in optree.tree_leaves(given)]
        optimizer.update_(params, cast(grads_at(step, missing=HOLES), dtype), state, extra=given)
        assert_same(given, cast(given_at(step, every), dtype))
        assert [one._version for one in optree.tree_leaves(given)] == versions
    assert_same((params, state), want)
    assert all(a is b for a, b in zip(tensors, optree.tree_leaves((params, state)), strict=True))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda one: one,
    "transposed": lambda one: one.T.contiguous().T,
    "expanded": lambda one: one[:1, :1].expand(one.shape),
    "part of a graph": lambda one: one.clone().requires_grad_() * 1.0,
}


@each(layout=list(LAYOUTS), executor=IN_PYTHON, name=list(BOTH))
def test_it_may_lie_in_memory_as_it_likes(layout: str, executor: Any, name: str) -> None:
    optimizer = BOTH[name][0]().using(executor=executor)
    params, grad = normal(4, 4), normal(4, 4, seed=1)
    given = LAYOUTS[layout](normal(4, 4, seed=2))
    plain = given.detach().clone(memory_format=torch.contiguous_format)
    want = optimizer.update(params, grad, optimizer.init(params), extra={"hessian": plain})
    got = optimizer.update(params, grad, optimizer.init(params), extra={"hessian": given})
    stepped, state = params.clone(), optimizer.init(params)
    optimizer.update_(stepped, grad, state, extra={"hessian": given})
    assert_same(optree.tree_map(torch.detach, got), want)
    assert_same((stepped, state), want)


def test_it_may_be_the_gradient_or_the_parameter_itself() -> None:
    """A step in place may take the gradient or the parameter as the input, too."""
    for name, (make, _) in BOTH.items():
        for which in ("gradient", "parameter"):
            with case(name=name, which=which):
                optimizer, param, grad = make(), normal(5), normal(5, seed=1)
                own = grad if which == "gradient" else param
                want = optimizer.using(executor="reference").update(
                    param, grad, optimizer.init(param), extra={"hessian": own.clone()}
                )
                state = optimizer.init(param)
                optimizer.update_(param, grad, state, extra={"hessian": own})
                assert_same((param, state), want)


def test_between_steps_it_costs_nothing_and_a_checkpoint_has_nothing_of_it() -> None:
    for name, (make, every) in BOTH.items():
        with case(name=name):
            optimizer, params = make(), params_of()
            state = optimizer.init(params)
            for step in range(STEPS):
                file = io.BytesIO()
                torch.save({"params": params, "state": state}, file)
                file.seek(0)
                loaded = torch.load(file)  # with its safe defaults
                assert len(optree.tree_leaves(state)) == 3 * len(params)
                params, state = optimizer.update(
                    loaded["params"],
                    grads_at(step),
                    loaded["state"],
                    extra=given_at(step, every),
                )
            assert_same((params, state), run_given(make(), every=every))


def test_other_leaves_take_no_notice() -> None:
    """Estimates change only the leaves of Sophia, and not those that AdamW steps."""
    parts = {"matrices": sophia(0.1, gamma=0.5), "rest": adamw(0.01)}
    optimizer = partition(parts, kind)
    params = params_of()
    names = [name for name, one in params.items() if one.dim() == 2]
    whole = run_given(optimizer, every=EVERY)
    state = optimizer.init(params)
    for step in range(STEPS):
        given: Any = given_at(step, EVERY)
        for tree in given.values():
            tree.update({name: None for name in tree if name not in names})
        params, state = optimizer.update(params, grads_at(step), state, extra=given)
    assert_same((params, state), whole)
    for label, own in {"matrices": names, "rest": [n for n in params if n not in names]}.items():
        alone: Any = {name: params_of()[name] for name in own}
        own_state = parts[label].init(alone)
        for step in range(STEPS):
            extra = {} if label == "rest" or step % EVERY else {"hessian": estimates_at(step)}
            extra = {one: {name: tree[name] for name in own} for one, tree in extra.items()}
            alone, own_state = parts[label].update(
                alone, {name: grads_at(step)[name] for name in own}, own_state, extra=extra
            )
        assert_same(alone, {name: whole[0][name] for name in own})


def plain() -> Optimizer:
    return chain(scale_by_sophia(gamma=0.5), descend(0.1))


MATRICES = with_shape(lambda shape: len(shape) == 2)
AROUND: dict[str, Callable[[], Optimizer]] = {
    "frozen": lambda: chain(freeze(with_shape(lambda shape: shape == (4, 4))), plain()),
    "masked": lambda: chain(
        masked(scale_by_sophia(gamma=0.5), with_shape(lambda s: len(s) == 2)), sgd(0.1)
    ),
    "clipped": lambda: chain(scale_by_sophia(gamma=0.5), clip_by_global_norm(0.1), descend(0.1)),
    "averaged": lambda: chain(plain(), ema(0.9)),
    "looking ahead": lambda: chain(plain(), lookahead(2)),
    "finite": lambda: chain(apply_if_finite(2), plain()),
    "two of a name": lambda: chain(scale_by_sophia(), scale_by_adahessian(), descend(0.1)),
}


@each(name=list(AROUND), executor=IN_PYTHON)
def test_it_reaches_its_stage_through_any_nesting(name: str, executor: Any) -> None:
    """A nested stage gets its input, in place and purely, for every kind of composition."""
    optimizer = AROUND[name]()
    every = 1 if name == "two of a name" else EVERY
    want = run_given(optimizer, every=every, missing=HOLES)
    other = optimizer.using(executor=executor)
    params = params_of()
    state = other.init(params)
    for step in range(STEPS):
        other.update_(params, grads_at(step, missing=HOLES), state, extra=given_at(step, every))
    assert_same((params, state), want)
    if name != "two of a name":
        seldom = run_given(optimizer, every=STEPS, missing=HOLES)[0]
        assert not torch.equal(seldom["body.weight"], want[0]["body.weight"])


def test_of_accumulated_gradients_it_is_given_with_the_last() -> None:
    optimizer, params = chain(accumulate(2), plain()), params_of()
    state = optimizer.init(params)
    for step in range(4):
        extra = given_at(step) if step % 2 else {}
        params, state = optimizer.update(params, grads_at(step), state, extra=extra)
    own: Any = params_of()
    other = plain().init(own)
    for step in (1, 3):
        both = [grads_at(step - 1), grads_at(step)]
        mean = {name: both[0][name] * 0.5 + both[1][name] * 0.5 for name in own}
        own, other = plain().update(own, mean, other, extra=given_at(step))
    for name, one in own.items():
        torch.testing.assert_close(params[name], one)


def test_of_a_worst_point_nearby_it_is_given_with_the_second_call() -> None:
    optimizer = chain(sam(0.1), adahessian(0.1))
    params, state = params_of(), optimizer.init(params_of())
    for step in range(4):
        extra = given_at(step) if step % 2 else {}
        params, state = optimizer.update(params, grads_at(step), state, extra=extra)
    assert int(state.leaves["scale"].step) == 2


def test_a_step_that_is_skipped_skips_it_too() -> None:
    """A step that is skipped does not use its input: no average changes."""
    optimizer, params = chain(apply_if_finite(3), plain()), params_of()
    state = optimizer.init(params)
    params, state = optimizer.update(params, grads_at(0), state, extra=given_at(0))
    bad = {name: one * float("nan") for name, one in grads_at(1).items()}
    new, after = optimizer.update(params, bad, state, extra=given_at(1))
    assert_same(new, params)
    for name, leaf in after.leaves.items():
        assert_same(leaf.stages[1:], state.leaves[name].stages[1:])


def test_a_total_behind_it_is_measured_with_it() -> None:
    """``measure`` uses the input of an earlier stage, so the total matches that of the step."""
    optimizer = AROUND["clipped"]()
    params, grads = params_of(), grads_at(0)
    state = optimizer.init(params)
    total = optimizer.measure(params, grads, state, extra=given_at(0))
    assert not torch.equal(total, optimizer.measure(params, grads, state))
    want = optimizer.update(params, grads, state, extra=given_at(0))
    got = optimizer.update(params, grads, state, extra=given_at(0), measured=[total])
    assert_same(got, want)


def test_it_is_differentiated_and_mapped_over() -> None:
    for name, (make, _) in BOTH.items():
        optimizer, param = make(), normal(5, dtype=torch.float64)
        grad = normal(5, seed=1, dtype=torch.float64)
        state = optimizer.init(param)
        given = normal(5, seed=2, dtype=torch.float64).abs() + 1.0

        def ahead(hessian: Tensor, of: Any = (optimizer, param, grad, state)) -> Tensor:
            optimizer, param, grad, state = of
            new, state = optimizer.update(param, grad, state, extra={"hessian": hessian})
            kept: Tensor = next(one for one in state.leaves.stages if one)[1]
            return (new + kept).sum()

        with case(name=name):
            leaf = given.clone().requires_grad_()
            (want,) = torch.autograd.grad(ahead(leaf), leaf)
            assert bool((want != 0).all())
            assert_same(torch.func.grad(ahead)(given), want)
            several = torch.stack([given, 2 * given, -given])
            mapped = torch.vmap(ahead)(several)
            torch.testing.assert_close(mapped, torch.stack([ahead(one) for one in several]))


class WeightedState(NamedTuple):
    importance: list[Tensor]  # [w], the shape of the parameter; [] for equal weights


class WeightedHyper(NamedTuple):
    lr: float


def weighted_rule(
    param: Tensor, grad: Tensor, state: WeightedState, c: WeightedHyper
) -> tuple[Tensor, WeightedState]:
    if state.importance:
        return addcmul(param, grad, state.importance[0], -c.lr), state
    return param.add(grad, alpha=-c.lr), state


WEIGHTED = Rule(
    name="weighted",
    hyper=WeightedHyper,
    state=WeightedState,
    init=lambda param, hyper: WeightedState([]),
    rule=weighted_rule,
    sparse=rows_of_sparse,
    inputs=(LeafInput("importance", required=False),),
)


def test_an_input_that_a_leaf_without_a_gradient_requires_may_be_missing_in_some_steps() -> None:
    optimizer = partition({"a": sophia(0.1), "b": adahessian(0.1)}, lambda path, shape: path[0])
    found = []
    for executor in ("auto", "reference"):
        own, params = optimizer.using(executor=executor), {"a": normal(4), "b": normal(4)}
        state = own.init(params)
        for step in range(9):
            hessian = {"a": normal(4, seed=step + 30), "b": None}
            grads = {"a": normal(4, seed=step + 1), "b": None}
            own.update_(params, grads, state, extra={} if step % 3 else {"hessian": hessian})
        found.append([params, state])
    assert_same(*found)


def test_a_rule_of_ones_own_takes_what_it_names() -> None:
    optimizer, params = chain(WEIGHTED(lr=1.0)), {"a": torch.zeros(2), "b": None}
    state = optimizer.init(params)
    grads = {"a": torch.ones(2), "b": None}
    given = {"importance": {"a": torch.tensor([1.0, 3.0]), "b": None}}
    assert optimizer.update(params, grads, state, extra=given)[0]["a"].tolist() == [-1.0, -3.0]
    assert optimizer.update(params, grads, state)[0]["a"].tolist() == [-1.0, -1.0]
    with pytest.raises(TypeError, match=r"'hessian'; inputs of this chain: 'importance'"):
        optimizer.update(params, grads, state, extra={"hessian": grads})


def test_of_a_sparse_gradient_the_rows_that_it_stores_have_theirs() -> None:
    """For a sparse gradient, a stage gets those rows of the input that the gradient stores."""
    optimizer, param, given = chain(WEIGHTED(lr=1.0)), torch.zeros(4, 2), normal(4, 2)
    rows = torch.tensor([[2, 0]])
    grad = torch.sparse_coo_tensor(rows, torch.ones(2, 2), (4, 2), check_invariants=True)
    new, _ = optimizer.update(param, grad, optimizer.init(param), extra={"importance": given})
    optimizer.update_(param, grad, optimizer.init(param), extra={"importance": given})
    want = torch.zeros(4, 2)
    want[rows[0]] = -given[rows[0]]
    assert_same((new, param), (want, want))
    assert_same(given, normal(4, 2))
