"""L-BFGS: equal to torch.optim.LBFGS in every bit, with a closure and as a pure function."""

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_optim as fo
from functional_optim import TorchOptimizer, as_functional_optim, from_torch, lbfgs
from functional_optim.algorithms.lbfgs import LBFGSState
from functional_optim.frontends.closure_interop import torch_entries

from ..choices import case, each, examples
from .closure_problems import (
    KINDS,
    SEARCHED,
    Problem,
    assert_same,
    closure_of,
    quadratic,
    rosenbrock,
    run_front_end,
    run_of,
    run_pure,
    run_torch,
    same,
    value_and_grad,
)

DTYPES = (torch.float32, torch.float64)
SEARCHES = (None, "strong_wolfe")

OPTIONS = st.fixed_dictionaries(
    {"line_search_fn": st.sampled_from(SEARCHES)},
    optional={
        "lr": st.sampled_from([1e-3, 0.1, 1, 1.7, torch.tensor(0.25)]),
        "max_iter": st.sampled_from([0, 1, 2, 5, 30]),
        "max_eval": st.sampled_from([1, 2, 4, 40]),
        "tolerance_grad": st.sampled_from([0.0, 1e-3, 1.0]),
        "tolerance_change": st.sampled_from([1e-6, 1e-2]),
        "history_size": st.sampled_from([1, 2, 5]),
    },
)


@examples(30)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    options=OPTIONS,
    steps=st.integers(1, 4),
)
def test_bits_are_those_of_torch(
    kind: str, seed: int, dtype: torch.dtype, options: dict[str, Any], steps: int
) -> None:
    problem = Problem(*KINDS[kind](seed, dtype), options=options, steps=steps)
    losses, params, state = run_torch(problem)
    if options.get("max_iter") == 0:  # torch writes the keys of the state with None
        state = {name: state[name] for name in ("func_evals", "n_iter")}
    ours = run_front_end(problem)
    assert same(losses, ours[0])
    assert_same(params, ours[1])
    assert_same(state, ours[2])
    pure, pure_state = run_pure(problem)
    assert_same(params, pure)
    assert_same(state, torch_entries(pure_state))


def test_each_branch_of_the_line_search_has_the_bits_of_torch() -> None:
    """Searches start with steps that are too short and too long, to reach each branch."""
    for kind in SEARCHED:
        for seed, lr in itertools.product(range(6), (1e-3, 0.02, 0.2, 1.0)):
            options = {"line_search_fn": "strong_wolfe", "lr": lr, "max_iter": 4}
            problem = Problem(*kind(seed, torch.float64), options=options, steps=1)
            theirs, ours = run_torch(problem), run_front_end(problem)
            with case(kind=kind.__name__, seed=seed, lr=lr):
                assert_same(theirs[1], ours[1])
                assert_same(theirs[2], ours[2])


@each(search=SEARCHES, kind=["complex_quadratic", "least_squares", "quadratic", "rosenbrock"])
def test_frozen_parameters_and_missing_gradients_count_as_zeros(search: Any, kind: str) -> None:
    params, loss = KINDS[kind](3, torch.float64)
    frozen = tuple(params)[-1:]
    problem = Problem(params, loss, frozen, {"line_search_fn": search, "lr": 0.01})
    theirs, ours, pure = run_torch(problem), run_front_end(problem), run_pure(problem)
    assert same(params[frozen[0]], ours[1][frozen[0]])
    assert_same(theirs[1], ours[1])
    assert_same(theirs[2], ours[2])
    assert_same(theirs[1], pure[0])


@each(search=SEARCHES)
def test_mixed_dtypes_have_a_flat_vector_of_the_widest(search: Any) -> None:
    params = {"w": torch.tensor([0.3, -2.0]), "d": torch.ones(2, dtype=torch.float64)}
    problem = Problem(
        params,
        lambda given: ((given["w"].double() - given["d"]) ** 2 + given["d"] ** 4).sum(),
        options={"line_search_fn": search, "lr": 0.05},
    )
    theirs, ours, pure = run_torch(problem), run_front_end(problem), run_pure(problem)
    assert ours[2]["d"].dtype == torch.float64
    for one, other in zip(theirs[1:], ours[1:], strict=True):
        assert_same(one, other)
    assert_same(theirs[1], pure[0])


@each(sparse=(False, True))
def test_sparse_gradients_are_made_dense(sparse: bool) -> None:
    """Sparse gradients become dense, as in torch, and give the same bits as dense gradients."""
    weight = torch.arange(12, dtype=torch.float64).reshape(4, 3)
    index = torch.tensor([2, 0, 2])

    def loss(given: Any) -> Tensor:
        rows = torch.nn.functional.embedding(index, given["weight"], sparse=sparse)
        return (rows - 1).square().sum()

    problem = Problem({"weight": weight}, loss, options={"lr": 0.1})
    theirs, ours = run_torch(problem), run_front_end(problem)
    assert_same(theirs[1], ours[1])
    assert_same(theirs[1], run_pure(problem)[0])
    assert same(ours[1]["weight"][1], weight[1])


@each(search=SEARCHES)
def test_parameters_in_any_layout(search: Any) -> None:
    """Parameters may have any layout: a transposed matrix, and every second element of a vector.

    torch fails on such gradients, so it runs on contiguous parameters.
    """
    rows, many = (
        torch.linspace(-2, 1, 12).double().reshape(4, 3),
        torch.linspace(-1, 1, 10).double(),
    )
    loss: Any = lambda given: (given["w"] ** 4).sum() + (given["v"] - 2).square().sum()  # noqa: E731
    options = {"line_search_fn": search, "lr": 0.01}
    strided = {"w": rows.t(), "v": many[::2]}
    theirs = run_torch(
        Problem({name: one.contiguous() for name, one in strided.items()}, loss, options=options)
    )
    leaves = {"w": rows.clone().t().requires_grad_(), "v": many.clone()[::2].requires_grad_()}
    optimizer = TorchOptimizer(leaves.values(), lbfgs(**options))
    for _ in range(3):
        optimizer.step(closure_of(optimizer, leaves, loss))
    assert_same(theirs[1], {name: leaf.detach() for name, leaf in leaves.items()})
    assert_same(theirs[1], run_pure(Problem(strided, loss, options=options))[0])


@each(search=SEARCHES, by_data=[False, True])
def test_a_closure_may_project_parameters_in_place(search: Any, by_data: bool) -> None:
    """A closure may change parameters in place, as in style transfer, which clamps the picture."""
    params, loss = quadratic(4, torch.float64)

    def run(make: Any) -> dict[str, Tensor]:
        leaves = Problem(params, loss).leaves()
        optimizer = make(list(leaves.values()), line_search_fn=search, lr=0.05)
        evaluate = closure_of(optimizer, leaves, loss)

        def closure() -> Any:
            for leaf in leaves.values():
                with torch.no_grad():
                    (leaf.data if by_data else leaf).clamp_(-0.25, 0.5)
            return evaluate()

        for _ in range(3):
            optimizer.step(closure)
        return {name: leaf.detach() for name, leaf in leaves.items()}

    theirs = run(torch.optim.LBFGS)
    assert_same(theirs, run(lambda given, **options: TorchOptimizer(given, lbfgs(**options))))


def test_threads_make_one_step_after_the_other() -> None:
    params, loss = rosenbrock(4, torch.float64)
    twin, leaves = Problem(params, loss).leaves(), Problem(params, loss).leaves()
    alone = TorchOptimizer(twin.values(), lbfgs(lr=1e-3, max_iter=5))
    for _ in range(4):
        alone.step(closure_of(alone, twin, loss))
    optimizer = TorchOptimizer(leaves.values(), lbfgs(lr=1e-3, max_iter=5))
    closure = closure_of(optimizer, leaves, loss)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: optimizer.step(closure), range(4)))
    assert_same(twin, leaves)


def test_nothing_that_is_handed_in_changes() -> None:
    params, loss = quadratic(0, torch.float64)
    optimizer = lbfgs(lr=0.1)
    function = value_and_grad(loss)
    params, state = optimizer.update(params, None, optimizer.init(params), value_and_grad=function)
    value, grads = function({name: one.clone() for name, one in params.items()})
    before = copy.deepcopy((params, grads, tuple(state)))
    first = optimizer.update(params, grads, state, value_and_grad=function, loss=value)
    again = optimizer.update(params, grads, state, value_and_grad=function)
    assert_same(before[0], params)
    assert_same(before[1], grads)
    assert same(before[2], tuple(state))
    assert not any(param.requires_grad for param in params.values())
    for one, other in zip(first, again, strict=True):
        assert same(
            tuple(one.values() if isinstance(one, dict) else one),
            tuple(other.values() if isinstance(other, dict) else other),
        )


def test_known_loss_and_gradient_save_an_evaluation() -> None:
    params, loss = quadratic(0, torch.float64)
    function, calls = value_and_grad(loss), []

    def counted(given: Any) -> Any:
        calls.append(given)
        return function(given)

    optimizer = lbfgs(max_iter=4, lr=0.1)
    value, grads = function(dict(params))
    known = optimizer.update(
        params, grads, optimizer.init(params), value_and_grad=counted, loss=value.detach()
    )
    assert len(calls) == 3
    assert known[1].func_evals == 4
    asked = optimizer.update(params, None, optimizer.init(params), value_and_grad=counted)
    assert len(calls) == 3 + 4
    assert_same(known[0], asked[0])


def test_it_ends_at_an_optimum_without_a_step() -> None:
    """The optimizer stops without a step if the gradient equals the tolerance."""
    x = torch.tensor([1.0, -2.0])
    optimizer = lbfgs(tolerance_grad=0.5)
    function: Any = lambda given: (given.sum() / 2, torch.full((2,), 0.5))  # noqa: E731
    after, state = optimizer.update(x, None, optimizer.init(x), value_and_grad=function)
    assert same(after, x)
    assert (state.n_iter, state.func_evals, state.d) == (0, 1, None)
    after, state = optimizer.update(
        x, None, state, value_and_grad=function, tolerance_grad=0.25, max_iter=1
    )
    assert after.tolist() == [0.5, -2.5]
    assert (state.n_iter, state.func_evals) == (1, 2)


def test_torch_state_dicts_load_both_ways() -> None:
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe", "max_iter": 3, "history_size": 2}
    params, loss = rosenbrock(2, torch.float64)
    problem = Problem(params, loss, options=options)
    theirs, ours = problem.leaves(), problem.leaves()
    live = torch.optim.LBFGS(list(theirs.values()), **options)
    mine = TorchOptimizer(ours.values(), lbfgs())
    for _ in range(2):
        live.step(closure_of(live, theirs, loss))
    with torch.no_grad():
        for one, other in zip(ours.values(), theirs.values(), strict=True):
            one.copy_(other)
    mine.load_state_dict(live.state_dict())
    assert mine.param_groups[0]["history_size"] == 2
    kept = copy.deepcopy(mine.state_dict())
    live.step(closure_of(live, theirs, loss))
    assert_same(kept["state"][0], mine.state_dict()["state"][0])  # the state dicts share no memory
    mine.step(closure_of(mine, ours, loss))
    assert_same(theirs, ours)
    live.load_state_dict(copy.deepcopy(mine.state_dict()))
    live.step(closure_of(live, theirs, loss))
    mine.step(closure_of(mine, ours, loss))
    assert_same(theirs, ours)


def test_a_live_torch_optimizer_goes_on_as_a_pure_function() -> None:
    for begun in (0, 2):
        with case(begun=begun):
            params, loss = quadratic(1, torch.float64)
            leaves = Problem(params, loss).leaves()
            live = torch.optim.LBFGS(list(leaves.items()), lr=0.1, max_iter=3)
            for _ in range(begun):
                live.step(closure_of(live, leaves, loss))
            optimizer, (tree,), state = from_torch(live)
            assert isinstance(optimizer, fo.ClosureOptimizer)
            assert (optimizer.hyper["lr"], list(tree)) == (0.1, ["z", "m", "a"])
            inner = value_and_grad(loss)

            def function(given: Any, inner: Any = inner) -> Any:
                value, grads = inner(given[0])
                return value, (grads,)

            given: Any = ({name: one.detach().clone() for name, one in tree.items()},)
            (after,), state = optimizer.update(given, None, state, value_and_grad=function)
            live.step(closure_of(live, leaves, loss))
            assert_same({name: one.detach() for name, one in leaves.items()}, after)
            back = torch.optim.LBFGS(list(leaves.values()))
            back.load_state_dict(fo.to_torch_state_dict(optimizer, (after,), state))
            (after,), _ = optimizer.update((after,), None, state, value_and_grad=function)
            back.step(closure_of(back, leaves, loss))
            assert_same({name: one.detach() for name, one in leaves.items()}, after)


def test_state_goes_through_files(tmp_path: Any) -> None:
    params, loss = rosenbrock(0, torch.float32)
    optimizer, function = lbfgs(max_iter=3, lr=1e-3), value_and_grad(loss)
    params, state = optimizer.update(params, None, optimizer.init(params), value_and_grad=function)
    torch.save(state, tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert isinstance(read, LBFGSState)
    assert same(tuple(state), tuple(read))
    one = optimizer.update(params, None, state, value_and_grad=function)[0]
    assert_same(one, optimizer.update(params, None, read, value_and_grad=function)[0])


def test_front_end_is_copied_and_pickled_with_its_state() -> None:
    params, loss = rosenbrock(0, torch.float64)
    leaves = Problem(params, loss).leaves()
    optimizer = TorchOptimizer(leaves.values(), lbfgs(lr=1e-3, max_iter=4))
    optimizer.step(closure_of(optimizer, leaves, loss))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = dict(zip(leaves, copied.param_groups[0]["params"], strict=True))
        assert type(copied) is type(optimizer)
        assert copied.chain == optimizer.chain
        copied.step(closure_of(copied, own, loss))
        other = {name: one.detach().clone().requires_grad_() for name, one in leaves.items()}
        third = TorchOptimizer(other.values(), lbfgs())
        third.load_state_dict(optimizer.state_dict())
        third.step(closure_of(third, other, loss))
        assert_same(other, own)


def test_value_is_compared_hashed_pickled_and_evaluates() -> None:
    made = lbfgs(lr=0.5, line_search_fn="strong_wolfe").using(namespace="mine")
    known = {"lbfgs": lbfgs}
    assert eval(repr(made), known) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(copy.copy(made)) == hash(made)
    assert made != made.replace(max_iter=3) != lbfgs()
    assert (
        as_functional_optim(torch.optim.LBFGS, 0.5, line_search_fn="strong_wolfe").using(
            namespace="mine"
        )
        == made
    )
    instance = torch.optim.LBFGS([torch.ones(1, requires_grad=True)])
    defaults = dict(instance.defaults)
    assert lbfgs().hyper == defaults == as_functional_optim(torch.optim.LBFGS).hyper


@each(search=SEARCHES)
def test_learning_rate_schedulers_work(search: Any) -> None:
    params, loss = quadratic(2, torch.float64)

    def run(make: Any) -> Any:
        def scheduled(given: Any) -> Any:
            optimizer = make(given)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
            return optimizer

        return run_of(scheduled, Problem(params, loss))

    options: dict[str, Any] = {"lr": 0.2, "max_iter": 4, "line_search_fn": search}
    theirs = run(lambda given: torch.optim.LBFGS(given, **options))
    assert_same(theirs[1], run(lambda given: TorchOptimizer(given, lbfgs(**options)))[1])


def test_an_error_of_the_closure_leaves_everything_as_it_was() -> None:
    params, loss = rosenbrock(3, torch.float64)
    leaves = Problem(params, loss).leaves()
    optimizer = TorchOptimizer(leaves.values(), lbfgs(lr=1e-3))
    optimizer.step(closure_of(optimizer, leaves, loss))
    before = copy.deepcopy(({k: v.detach() for k, v in leaves.items()}, optimizer.state_dict()))
    closure, calls = closure_of(optimizer, leaves, loss), []

    def failing() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert_same(before[0], {name: one.detach() for name, one in leaves.items()})
    assert_same(before[1]["state"][0], optimizer.state_dict()["state"][0])


def test_view_is_the_parameters() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = TorchOptimizer([("w", weight)], lbfgs())
    viewed: Any = optimizer.view()
    assert viewed["w"] is weight
    assert "one flat vector: lbfgs" in optimizer.explain()
