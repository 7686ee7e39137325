"""Steps that CUDA graphs may capture: each replay is a step of its own number."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import (
    BoundOptimizer,
    CapturableOptimizer,
    NoState,
    Optimizer,
    Rule,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    lion,
    qhm,
    sgd,
    stored,
    weight_decay,
)
from functional_optim.executors.errors import UntraceableError
from functional_optim.executors.lane_executor import LaneExecutor
from functional_optim.testing import CASES, CHAINS

from .bound_tree import full, parameters
from .graph_recorder import Graph
from .support import assert_same, noise


class Hyper(NamedTuple):
    lr: float
    beta: float = 0.9


class Average(NamedTuple):
    average: Tensor  # of the gradient, of its shape


def signed(param: Tensor, grad: Tensor, state: Average, c: Hyper) -> tuple[Tensor, Average]:
    """torch's functions, with plain numbers where they want such."""
    average = torch.lerp(grad, state.average, c.beta)
    return torch.add(param, average.sign().clamp(max=c.beta), alpha=-c.lr), Average(average)


def by_rows(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad / grad.norm(dim=-1, keepdim=True), state


def looks(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - math.sqrt(c.lr) * grad, state


SIGNED = Rule(
    name="signed",
    hyper=Hyper,
    state=Average,
    init=lambda param, hyper: Average(torch.zeros_like(param)),
    rule=signed,
)
ROWS = Rule(name="by_rows", hyper=Hyper, rule=by_rows, kind="per_matrix")
LOOKS = Rule(name="looks", hyper=Hyper, rule=looks)

pytestmark = pytest.mark.usefixtures("without_loops", "captured_on_the_cpu")

CHAINS_HERE: dict[str, Callable[..., Optimizer]] = {
    "sgd": sgd,
    "momentum": lambda lr: sgd(lr, momentum=0.9, dampening=0.1, nesterov=False),
    "adamw": adamw,
    "amsgrad": lambda lr: adamw(lr, amsgrad=True, maximize=True),
    "lion": lion,
    "clipped": lambda lr: chain(clip_by_value(0.5), weight_decay(0.1), qhm(lr)),
    "norm": lambda lr: chain(clip_by_global_norm(1.0), adamw(lr)),
    "norm in between": lambda lr: chain(weight_decay(0.1), clip_by_global_norm(1.0), adamw(lr)),
}
COUNT = 640
"""Elements that compiled steps take whole."""


def tree(dtype: torch.dtype = torch.float64, count: int = COUNT) -> dict[str, Tensor]:
    return {"a": noise(1, count, dtype=dtype), "b": noise(2, 2, count // 2, dtype=dtype)}


def replays(
    optimizer: Optimizer,
    params: Any,
    grads: Callable[[int], Any],
    *,
    count: int = 4,
    between: Callable[[int, BoundOptimizer], None] = lambda k, bound: None,
) -> tuple[Any, Any]:
    """Parameters and state after a step, one that is recorded, and replays of that."""
    bound = optimizer.bind(params, capturable=True)
    assert bound.ready()
    into = optree.tree_map(torch.clone, grads(0))
    graph = Graph()
    for k in range(count):
        optree.tree_map(lambda a, b: a.copy_(b), into, grads(k))
        between(k, bound)
        if k == 0:
            bound.step(into)
        elif k == 1:
            with graph.recording():
                bound.step(into)
        else:
            graph.replay()
    return params, bound.state


def steps(
    optimizer: Optimizer,
    params: Any,
    grads: Callable[[int], Any],
    *,
    count: int = 4,
    between: Callable[[int, BoundOptimizer], None] = lambda k, bound: None,
    capturable: bool = False,
) -> tuple[Any, Any]:
    """The same steps, one by one: with Python's numbers, or as they would be captured."""
    bound = optimizer.bind(params, capturable=capturable)
    assert bound.ready()
    for k in range(count):
        between(k, bound)
        bound.step(grads(k))
    return params, bound.state


def gradients(dtype: torch.dtype = torch.float64, count: int = COUNT) -> Callable[[int], Any]:
    return lambda k: optree.tree_map(
        lambda one: noise(10 + k, *one.shape, dtype=dtype), tree(dtype, count)
    )


def assert_close(got: Any, want: Any, ulps: float = 8.0) -> None:
    """The same up to some units in the last place of the largest number."""
    paths, left, _ = optree.tree_flatten_with_path(got)
    for path, a, b in zip(paths, left, optree.tree_leaves(want), strict=True):
        if a.dtype.is_floating_point or a.is_complex():
            room = ulps * torch.finfo(a.dtype).eps
            scale = float(b.abs().max()) if b.numel() else 0.0
            assert torch.allclose(a, b, rtol=0.0, atol=room * max(scale, 1e-30)), path
        else:
            assert torch.equal(a, b), path


@pytest.mark.parametrize("name", CHAINS_HERE)
def test_each_replay_is_a_step_of_its_own_number(name: str) -> None:
    optimizer = CHAINS_HERE[name](0.1).using(executor="reference")
    got = replays(optimizer, tree(), gradients(), count=6)
    assert_close(got, steps(optimizer, tree(), gradients(), count=6))
    assert [int(leaf.step) for leaf in got[1].leaves.values()] == [6, 6]


@pytest.mark.parametrize("name", ["momentum", "adamw", "clipped", "norm in between"])
def test_what_is_compiled_is_replayed_to_the_bit(name: str) -> None:
    optimizer = CHAINS_HERE[name](0.1).using(executor="compile")
    f32 = torch.float32
    got = replays(optimizer, tree(f32), gradients(f32), count=5)
    assert_same(got, steps(optimizer, tree(f32), gradients(f32), count=5, capturable=True))
    assert_close(got, steps(optimizer, tree(f32), gradients(f32), count=5), 32.0)


@pytest.mark.parametrize("count", [2, 30, 646])
def test_lanes_of_any_length(count: int) -> None:
    optimizer = adamw(0.1).using(executor="compile")
    f32 = torch.float32
    got = replays(optimizer, tree(f32, count), gradients(f32, count))
    assert_close(got, steps(optimizer, tree(f32, count), gradients(f32, count)))


@pytest.mark.parametrize("executor", ["reference", "auto"])
def test_parameters_of_every_kind(executor: Any) -> None:
    def given(k: int) -> Any:
        return full(50 + k)

    optimizer = adamw(0.01).using(executor=executor)
    got = replays(optimizer, parameters(), given)
    assert_close(got, steps(optimizer.using(executor="reference"), parameters(), given), 32.0)


def test_whole_matrices() -> None:
    optimizer = chain(ROWS(lr=lambda k: 0.1 * 0.5**k)).using(executor="auto")
    got = replays(optimizer, tree(), gradients())
    assert_close(got, steps(optimizer.using(executor="reference"), tree(), gradients()))


@pytest.mark.parametrize("executor", ["reference", "compile"])
def test_rules_that_give_torch_their_numbers(executor: Any) -> None:
    optimizer = chain(SIGNED(lr=0.1)).using(executor=executor)
    got = replays(optimizer, tree(), gradients())
    assert_close(got, steps(optimizer.using(executor="reference"), tree(), gradients()))


@pytest.mark.parametrize("kind", ["pointwise", "per_matrix"])
def test_rules_that_look_at_their_numbers_are_refused(kind: Any) -> None:
    params = tree()
    with pytest.raises(UntraceableError, match=r"\(looks\) cannot be stepped with numbers that"):
        chain(replace(LOOKS, kind=kind)(lr=0.1)).bind(params, capturable=True)


@pytest.mark.parametrize("case", [*CASES, *CHAINS])
def test_every_algorithm_can_be_captured(case: str) -> None:
    optimizer = {**CASES, **CHAINS}[case].factory().using(executor="reference")
    dtype = next((s.dtypes[0] for s in optimizer.stages if s.dtypes), torch.float64)
    count = 512
    got = replays(optimizer, tree(dtype, count), gradients(dtype, count), count=3)
    want = steps(optimizer, tree(dtype, count), gradients(dtype, count), count=3)
    assert [int(one.step) for one in got[1].leaves.values()] == [3, 3]
    assert_close(got[0], want[0], 64.0)


@pytest.mark.parametrize(
    "kept",
    [
        stored(adamw(0.01), param="bfloat16+stochastic"),
        stored(adamw(0.01), param="bfloat16+kahan"),
        stored(adamw(0.01), state="int8"),
        stored(sgd(0.01, momentum=0.9), state="int8+stochastic"),
    ],
    ids=["stochastic", "kahan", "int8", "int8+stochastic"],
)
def test_what_is_stored_in_few_bits(kept: Optimizer) -> None:
    """Random bits of each replay are those of its step; blocks of 256 end within parameters."""
    optimizer = kept.using(executor="compile")
    dtype = next((s.dtypes[0] for s in optimizer.stages if s.dtypes), torch.float32)
    got = replays(optimizer, tree(dtype, 600), gradients(dtype, 600))
    assert_same(got, steps(optimizer, tree(dtype, 600), gradients(dtype, 600), capturable=True))


def test_hyper_parameters_change_between_replays() -> None:
    def change(k: int, bound: BoundOptimizer) -> None:
        bound.set_hyper(lr=0.1 / (k + 1), betas=(0.9, 0.99 - 0.01 * k))

    optimizer = adamw(0.1).override(("b",), lr=0.5).using(executor="reference")
    got = replays(optimizer, tree(), gradients(), between=change)
    assert_close(got, steps(optimizer, tree(), gradients(), between=change))


def test_what_is_written_into_a_tensor_holds_from_the_next_replay_on() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)

    def change(k: int, bound: BoundOptimizer) -> None:
        lr.fill_(0.1 / (k + 1))

    optimizer = adamw(lr).using(executor="reference")
    got = replays(optimizer, tree(), gradients(), between=change)
    assert_close(got, steps(optimizer, tree(), gradients(), between=change))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda k: 0.1 * 0.9**k,
        lambda k: 0.1 * torch.cos(torch.as_tensor(k, dtype=torch.float64) / 8),
    ],
    ids=["arithmetic", "of tensors"],
)
def test_schedules_are_computed_at_each_replay(schedule: Any) -> None:
    optimizer = adamw(schedule).using(executor="reference")
    got = replays(optimizer, tree(), gradients())
    assert_close(got, steps(optimizer, tree(), gradients()))


def test_gradients_are_read_where_they_were() -> None:
    """The ``.grad`` of parameters, which backward writes to again, and flat gradients."""
    for attached in (False, True):
        params = {name: one.requires_grad_() for name, one in tree().items()}
        optimizer = adamw(0.1).using(executor="reference")
        bound = optimizer.bind(params, capturable=True)
        if attached:
            bound.layout.attach_gradients()
        graph = Graph()
        for k in range(4):
            for name, one in gradients()(k).items():
                if params[name].grad is None:
                    params[name].grad = one
                else:
                    params[name].grad.copy_(one)
            if k == 0:
                with graph.recording():
                    bound.step(bound.gradients if attached else None)
            else:
                graph.replay()
        want, _ = steps(optimizer, tree(), gradients())
        assert_close({name: one.detach() for name, one in params.items()}, want)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    def some(k: int) -> Any:
        return {**gradients()(k), "b": None}

    optimizer = adamw(0.1).using(executor="reference")
    got = replays(optimizer, tree(), some)
    assert_close(got, steps(optimizer, tree(), some))
    assert [int(leaf.step) for leaf in got[1].leaves.values()] == [4, 0]


def test_parameters_at_different_steps_keep_their_own_numbers() -> None:
    optimizer = adamw(0.1).using(executor="reference")
    plain = optimizer.bind(tree())
    plain.step({**gradients()(7), "b": None})
    bound = optimizer.bind(tree(), plain.state, capturable=True)
    other = optimizer.bind(tree(), plain.state)
    given = gradients()(0)
    graph = Graph()
    with graph.recording():
        bound.step(given)
    graph.replay()
    for _ in range(2):
        other.step(given)
    assert [int(leaf.step) for leaf in bound.state.leaves.values()] == [3, 2]
    assert_close((bound.params, bound.state), (other.params, other.state))


def test_state_is_saved_and_loaded_between_replays() -> None:
    optimizer = adamw(0.1).using(executor="reference")
    bound = optimizer.bind(tree(), capturable=True)
    given = gradients()(0)
    graph = Graph()
    with graph.recording():
        bound.step(given)
    graph.replay()
    saved = optree.tree_map(torch.clone, (bound.params, bound.state))
    graph.replay()
    once = optree.tree_map(torch.clone, (bound.params, bound.state))
    for name, one in bound.params.items():
        one.copy_(saved[0][name])
    bound.load_state(saved[1])
    assert int(bound.state.leaves["a"].step) == 2
    graph.replay()
    assert_same((bound.params, bound.state), once)
    params, state = optimizer.update(saved[0], given, saved[1])
    assert_close((params, state), once)


def test_a_step_without_a_graph_and_replays_take_turns() -> None:
    optimizer = adamw(0.1).using(executor="reference")
    bound = optimizer.bind(tree(), capturable=True)
    given = gradients()(0)
    graph = Graph()
    with graph.recording():
        bound.step(given)
    graph.replay()
    bound.step(given)
    graph.replay()
    bound.step(given)
    want = steps(optimizer, tree(), lambda _: given, count=5)
    assert_close((bound.params, bound.state), want)


def captured(optimizer: Optimizer) -> CapturableOptimizer:
    bound = optimizer.bind(tree(), capturable=True)
    assert isinstance(bound, CapturableOptimizer)
    with Graph().recording():
        bound.step(gradients()(0))
    return bound


def test_other_gradients_than_were_captured_are_an_error() -> None:
    bound = captured(adamw(0.1).using(executor="reference"))
    before = optree.tree_map(torch.clone, (bound.params, bound.state))
    with pytest.raises(RuntimeError, match=r"of 'b' that is no longer so.*give it a gradient of z"):
        bound.step({**gradients()(0), "b": None})
    assert_same((bound.params, bound.state), before)


def test_other_counts_than_were_captured_are_an_error() -> None:
    bound = captured(adamw(0.1).using(executor="reference"))
    plain = adamw(0.1).bind(tree())
    plain.step({**gradients()(0), "b": None})
    before = optree.tree_map(torch.clone, (bound.params, bound.state))
    with pytest.raises(RuntimeError, match="are now at 1 and 0: bind the parameters again"):
        bound.load_state(plain.state)
    assert_same((bound.params, bound.state), before)
    bound.state.leaves["b"].step.add_(1)
    with pytest.raises(RuntimeError, match="bind the parameters again"):
        bound.step(gradients()(0))
    assert_same(bound.params, before[0])


def test_counts_that_were_not_equal_may_become_so() -> None:
    optimizer = adamw(0.1).using(executor="reference")
    plain = optimizer.bind(tree())
    plain.step({**gradients()(7), "b": None})
    bound = optimizer.bind(tree(), plain.state, capturable=True)
    given = gradients()(0)
    graph = Graph()
    with graph.recording():
        bound.step(given)
    bound.load_state(optimizer.init(tree()))
    for name, one in tree().items():
        bound.params[name].copy_(one)
    graph.replay()
    bound.step(given)
    graph.replay()
    want = steps(optimizer, tree(), lambda _: given, count=3)
    assert_close((bound.params, bound.state), want)


def test_memory_that_was_captured_is_not_left() -> None:
    bound = captured(adamw(0.1).using(executor="reference"))
    for name, one in gradients()(0).items():
        bound.params[name].grad = one
    with pytest.raises(RuntimeError, match="follow the gradients before"):
        bound.follow_gradients()


def test_gradients_are_followed_before() -> None:
    optimizer = adamw(0.1).using(executor="reference")
    params = tree()
    bound = optimizer.bind(params, capturable=True)
    bucket = torch.cat([one.reshape(-1) for one in reversed(gradients()(0).values())])
    params["b"].grad = bucket[:COUNT].view(2, -1)
    params["a"].grad = bucket[COUNT:]
    bound.step()
    bound.follow_gradients()
    graph = Graph()
    with graph.recording():
        bound.step()
    graph.replay()
    want = steps(optimizer, tree(), lambda _: gradients()(0), count=3)
    assert_close((params, bound.state), want)


def test_numbers_for_one_step_are_an_error() -> None:
    bound = adamw(0.1).bind(tree(), capturable=True)
    with pytest.raises(TypeError, match="use set_hyper"):
        bound.step(gradients()(0), lr=0.2)


def test_hyper_parameters_are_not_captured() -> None:
    bound = adamw(0.1).bind(tree(), capturable=True)
    with pytest.raises(RuntimeError, match="set_hyper before, or between"), Graph().recording():
        bound.set_hyper(lr=0.2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"lr": lambda k: 0.1}, "lr was a number, and is to be the schedule"),
        ({"lr": torch.tensor(0.3)}, "lr was a number, and is to be a tensor"),
        ({"nesterov": False}, "a flag or a whole number"),
        ({"weight_decay": 0.1}, "a stage decides by weight_decay"),
    ],
)
def test_what_is_more_than_a_number_cannot_be_set_once_captured(
    value: dict[str, Any], text: str
) -> None:
    bound = captured(sgd(0.1, momentum=0.9, nesterov=True).using(executor="reference"))
    kept = bound.optimizer
    with pytest.raises(ValueError, match=text):
        bound.set_hyper(**value)
    assert bound.optimizer is kept
    bound.step(gradients()(1))


def test_before_that_a_schedule_may_take_the_place_of_a_number() -> None:
    optimizer = adamw(0.1).using(executor="reference")
    bound = optimizer.bind(tree(), capturable=True)
    bound.set_hyper(lr=lambda k: 0.3 * 0.5**k)
    for k in range(3):
        bound.step(gradients()(k))
    want = steps(adamw(lambda k: 0.3 * 0.5**k), tree(), gradients(), count=3)
    assert_close((bound.params, bound.state), want)


def test_values_out_of_bounds_change_nothing() -> None:
    bound = adamw(0.1).using(executor="reference").bind(tree(), capturable=True)
    with pytest.raises(ValueError, match="lr must be"):
        bound.set_hyper(lr=-1.0)
    bound.step(gradients()(0))
    assert_close(bound.params, steps(adamw(0.1), tree(), gradients(), count=1)[0])


@pytest.mark.parametrize("executor", ["script", "blocked", "fused"])
def test_executors_that_take_pythons_numbers_are_refused(executor: Any) -> None:
    params = tree()
    where = params["a"].data_ptr()
    with pytest.raises(ValueError, match="'auto' or 'compile' or 'reference'"):
        adamw(0.1).using(executor=executor).bind(params, capturable=True)
    assert params["a"].data_ptr() == where


def test_schedules_that_look_at_the_step_are_refused() -> None:
    optimizer = adamw(lambda k: 0.1 if k < 3 else 0.01)
    with pytest.raises(ValueError, match="write it with torch's operations, without a branch"):
        optimizer.bind(tree(), capturable=True)


def test_state_on_another_kind_of_device_is_refused() -> None:
    optimizer = stored(adamw(0.1), state="float32", state_device="cpu")
    with pytest.raises(ValueError, match="keeps its state on cpu"):
        optimizer.bind({"a": torch.empty(600, device="meta")}, capturable=True)


def test_without_it_the_error_says_what_to_do() -> None:
    bound = adamw(0.1).bind(tree())
    bound._numbers.watched = list(bound.params.values())  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="capturable=True"), Graph().recording():
        bound.step(bound.gradients)


def test_it_is_said_what_would_be_captured() -> None:
    optimizer = adamw(0.1).using(executor="auto")
    f32 = torch.float32
    bound = optimizer.using(executor="compile").bind(tree(f32), capturable=True)
    assert "of torch.float32 on cpu: compile" in bound.explain()
    half = tree(torch.float16)
    assert (
        ": reference; torch.float16 is not compiled"
        in optimizer.bind(half, capturable=True).explain()
    )


def test_nothing_is_examined_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a chain is pointwise, which is seen in numbers, is found out at binding."""
    calls: list[Any] = []
    examine = LaneExecutor.examine
    monkeypatch.setattr(
        LaneExecutor, "examine", lambda *given: (calls.append(given), examine(*given))[1]
    )
    bound = sgd(lr=lambda k: 0.1 * 0.99**k, momentum=0.8).bind(tree(torch.float16), capturable=True)
    assert calls
    with Graph().recording():
        bound.step(gradients(torch.float16)(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("executor", ["reference", "compile"])
@pytest.mark.parametrize("name", ["momentum", "adamw", "norm"])
def test_graphs_of_a_device(name: str, executor: Any) -> None:
    def on_device(values: Any) -> Any:
        return optree.tree_map(lambda one: one.cuda(), values)

    f32 = torch.float32
    optimizer = CHAINS_HERE[name](0.1).using(executor=executor)
    params = on_device(tree(f32))
    bound = optimizer.bind(params, capturable=True)
    assert bound.ready()
    into = bound.gradients
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    for k in range(6):
        optree.tree_map(lambda a, b: a.copy_(b), into, on_device(gradients(f32)(k)))
        if k < 3:
            with torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream())
                bound.step(into)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            if k == 3:
                with torch.cuda.graph(graph):  # records, and does nothing
                    bound.step(into)
            graph.replay()
    want = steps(CHAINS_HERE[name](0.1), tree(f32), gradients(f32), count=6)
    got = optree.tree_map(lambda one: one.cpu(), (params, bound.state))
    assert_close(got, want, 64.0)
