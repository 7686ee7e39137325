"""Changes between steps that a plan must notice, compared with runs without plans."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim import Optimizer, TorchOptimizer, adamw, asgd, nadam, sgd, stored
from functional_optim.core.state import State, map_state
from functional_optim.plan import tree_steps
from functional_optim.plan.planned_steps import PlannedSteps
from tests.choices import case
from tests.tensors import assert_same, normal


@contextmanager
def without_plans() -> Iterator[None]:
    """Disable plans inside the context."""
    with (
        mock.patch.object(PlannedSteps, "plan", return_value=False),
        mock.patch.object(PlannedSteps, "_decided_for", return_value=None),
        mock.patch.object(tree_steps, "_PLANS", []),
    ):
        yield


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_steps, "_PLANS", [])


def as_without_plans(program: Callable[[], Any]) -> None:
    with without_plans():
        expected = program()
    assert_same(program(), expected)


class Groups:
    """Parameters of one group, and the TorchOptimizer that steps them."""

    def __init__(self, optimizer: Optimizer, params: list[Parameter]) -> None:
        self.params, self.optimizer = params, TorchOptimizer(params, optimizer)
        self.steps = 0
        self.state: dict[Any, dict[str, Any]] = self.optimizer.state

    def step(self, times: int, without: int | None = None) -> None:
        """Make several steps with different gradients; one parameter can have none."""
        for _ in range(times):
            self.steps += 1
            for k, param in enumerate(self.params):
                grad = normal(*param.shape, seed=100 * self.steps + k).to(param.dtype)
                param.grad = None if k == without else grad
            self.optimizer.step()

    def result(self) -> list[Any]:
        return [
            [one.detach().clone() for one in self.params],
            [dict(self.state[p]) for p in self.params],
        ]


def of_shapes(*shapes: tuple[int, ...]) -> list[Parameter]:
    return [Parameter(normal(*shape, seed=k)) for k, shape in enumerate(shapes)]


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
def test_a_tensor_of_state_at_two_places_and_then_at_one(key: str) -> None:
    def program() -> Any:
        run = Groups(adamw(0.1), of_shapes((3,), (3,), (3,)))
        first, second, _ = run.params
        run.step(3)
        run.state[second][key] = run.state[first][key]
        run.step(2)
        run.state[second][key] = run.state[second][key].clone()
        run.step(4)
        return run.result()

    as_without_plans(program)


def test_state_that_moves_to_another_parameter() -> None:
    def program() -> Any:
        run = Groups(adamw(0.1), of_shapes((3,), (3,), (3,)))
        _, second, third = run.params
        run.step(1)
        del run.state[second]
        run.step(5, without=1)
        run.state[second] = run.state.pop(third)
        run.step(2, without=1)
        return run.result()

    as_without_plans(program)


@pytest.mark.parametrize(
    "count",
    [5, 5.0, torch.tensor(5, dtype=torch.int32), torch.tensor(5.0), torch.tensor([5])],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["complex", "gaps"])
def test_the_step_count_of_a_leaf_that_is_stepped_alone(count: Any, kind: str) -> None:
    def program() -> Any:
        data = torch.ones(3, dtype=torch.complex64) if kind == "complex" else torch.ones(6)[::2]
        params = [Parameter(data), *of_shapes((3,), (3,))]
        run = Groups(adamw(0.1), params)
        run.step(5)
        run.state[params[0]]["step"] = count.clone() if isinstance(count, Tensor) else count
        run.step(3)
        return run.result()

    as_without_plans(program)


@pytest.mark.parametrize(
    "data", [normal(1, 6), normal(6, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_a_parameter_with_gaps_that_gets_another_shape_or_dtype(data: Tensor) -> None:
    run = Groups(adamw(0.1), [Parameter(torch.ones(6)[::2]), *of_shapes((3,), (3,))])
    run.step(3)
    run.params[0].grad = None
    run.params[0].data = data[..., ::2]
    before = run.result()
    with pytest.raises(ValueError, match=r"exp_avg.* has (shape|dtype)"):
        run.step(1)
    assert_same(run.result(), before)


@pytest.mark.parametrize("first", [0, 3])
def test_a_gradient_in_the_memory_of_a_parameter_with_gaps(first: int) -> None:
    def program() -> Any:
        run = Groups(adamw(0.1), [Parameter(torch.ones(8)[::2]), *of_shapes((3,), (3,))])
        run.step(first)
        memory = normal(8, seed=9)
        run.params[0].data = memory[::2]
        run.params[0].grad, run.params[1].grad = normal(4, seed=7), memory[1:4]
        run.params[2].grad = normal(3, seed=8)
        run.optimizer.step()
        return run.result()

    as_without_plans(program)


@pytest.mark.parametrize("what", ["a lazy conjugate", "not a leaf of autograd"])
def test_a_complex_parameter_that_becomes_one_that_cannot_be_written_to(what: str) -> None:
    optimizer, dtype = adamw(0.1), torch.complex64
    params = {"a": normal(4, dtype=dtype), "b": normal(3)}
    state = optimizer.init(params)
    for k in range(3):
        grads = {"a": normal(4, seed=10 * k + 1, dtype=dtype), "b": normal(3, seed=10 * k + 2)}
        optimizer.update_(params, grads, state)
    one = torch.ones((), requires_grad=True)
    params["a"] = params["a"].conj() if what == "a lazy conjugate" else params["a"] * one
    with pytest.raises(ValueError, match=f"'a' is {what}"):
        optimizer.update_(params, grads, state)


def test_ordered_dicts_with_the_keys_of_another_in_another_order() -> None:
    optimizer = sgd(lr=1.0)
    first = OrderedDict(a=torch.zeros(2, 2), b=torch.zeros(2, 2))
    state = optimizer.init(first)
    for _ in range(3):
        optimizer.update_(first, {name: torch.ones(2, 2) for name in "ab"}, state)
    second = OrderedDict(b=torch.zeros(2), a=torch.zeros(2))
    trees: list[Any] = [second, {"x": second}, [second]]
    earlier: list[Any] = [{}, {"x": dict(first)}, [dict(first)]]
    for tree, before in zip(trees, earlier, strict=True):
        with case(kind=type(tree).__name__, length=len(tree)):
            second.update(a=torch.zeros(2), b=torch.zeros(2))
            if before:
                kept = optimizer.init(before)
                optimizer.update_(before, before, kept)
            state = optimizer.init(tree)
            grads = {"a": torch.full((2,), 1.0), "b": torch.full((2,), 5.0)}
            given = {dict: {"x": grads}, list: [grads]}.get(type(tree), grads)
            for _ in range(4):
                optimizer.update_(tree, given, state)
            assert second["a"].tolist() == [-4.0, -4.0] and second["b"].tolist() == [-20.0, -20.0]


def with_one_step_count(state: State) -> State:
    """Return a state in which all leaves share the step count of the first."""
    first = next(iter(state.leaves.values())).step
    return State({k: one._replace(step=first) for k, one in state.leaves.items()}, state.shared)


def test_a_tree_with_one_step_count_and_another_tree_of_its_form() -> None:
    optimizer = adamw(0.1)

    def tree(seed: int) -> dict[str, Tensor]:
        return {name: normal(3, seed=seed + k) for k, name in enumerate("abc")}

    def in_place() -> Any:
        first, other = tree(0), tree(10)
        state, own = with_one_step_count(optimizer.init(first)), optimizer.init(other)
        for k in range(2):
            optimizer.update_(first, tree(k + 20), state)
        for k in range(3):
            optimizer.update_(other, tree(k + 30), own)
        return [other, [one.step for one in own.leaves.values()]]

    as_without_plans(in_place)
    params = tree(0)
    state = with_one_step_count(optimizer.init(params))
    for k in range(3):
        _, after = optimizer.update(params, tree(k + 5), state)
        assert [int(one.step) for one in after.leaves.values()] == [1, 1, 1]


@pytest.mark.parametrize("in_place", [True, False])
def test_optimizers_that_differ_in_overrides_only(in_place: bool) -> None:
    base = sgd(0.1)
    optimizers = [base.override(("a",), lr=lr) for lr in (0.2, 0.4)]
    optimizers.append(base.override(("a",), lr=0.2).override(("b",), lr=0.4))
    optimizers += [base.override(("b",), lr=0.4), base]

    def program() -> Any:
        params = {name: normal(3, seed=k) for k, name in enumerate("ab")}
        state = base.init(params)
        for k, optimizer in enumerate(3 * optimizers):
            grads = {name: normal(3, seed=10 * k + 7) for name in "ab"}
            if in_place:
                optimizer.update_(params, grads, state)
            else:
                params, state = optimizer.update(params, grads, state)
        return params

    as_without_plans(program)


@pytest.mark.parametrize("name", ["adamw", "int8"])
@pytest.mark.parametrize("warm", [0, 3])
def test_a_bound_step_by_a_gradient_that_is_a_bound_parameter(name: str, warm: int) -> None:
    optimizer = adamw(0.1) if name == "adamw" else stored(adamw(0.1), state="int8")
    found = []
    for copied in (False, True):
        params = {name: normal(32, 16, seed=k) for k, name in enumerate("adc")}
        params["a"] = params["a"].t()
        bound = optimizer.bind(params)
        grads = {name: torch.ones_like(one) for name, one in params.items()}
        for _ in range(warm):
            bound.step(grads)
        read = params["d"].detach().view(16, 32)
        bound.step({**grads, "a": read.clone() if copied else read})
        found.append([params, map_state(torch.clone, bound.state.leaves["a"].stages[-1])])
    assert_same(*found)


@pytest.mark.parametrize("constructor", [asgd, nadam])
@pytest.mark.parametrize("executor", ["auto", "blocked"])
def test_numbers_for_whole_parameters_without_dimensions(
    constructor: Callable[..., Optimizer], executor: str
) -> None:
    """A number per parameter is not state per element, even for parameters without dimensions."""

    def program(by: str) -> Any:
        run = Groups(constructor(lr=0.1).using(executor=by), of_shapes((), (), ()))
        run.step(6)
        return run.result()

    assert_same(program(executor), program("reference"))

    def bound(by: str) -> Any:
        params = {name: normal(seed=k) for k, name in enumerate("abc")}
        made = constructor(lr=0.1).using(executor=by).bind(params)
        for k in range(6):
            made.step({name: normal(seed=10 * k + place) for place, name in enumerate("abc")})
        return params

    assert_same(bound(executor), bound("reference"))
