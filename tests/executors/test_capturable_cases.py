"""Steps that are captured: cases at the edges, and what is refused."""

from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Rule,
    Transform,
    adamw,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.executors import EXECUTORS, LaneExecutor, lanes
from functional_optim.executors.errors import UntraceableError
from functional_optim.executors.leaf import Leaf
from functional_optim.transforms.decoupled_weight_decay import DECOUPLED_WEIGHT_DECAY

from .bound_tree import full, parameters
from .graph_recorder import Graph
from .support import noise
from .test_capturable import assert_close, captured, gradients, replays, steps, tree

pytestmark = pytest.mark.usefixtures("without_loops", "captured_on_the_cpu")

REFERENCE = adamw(0.1).using(executor="reference")


class Hyper(NamedTuple):
    lr: float
    betas: tuple[float, float] = (0.9, 0.99)


class Moments(NamedTuple):
    first: Tensor  # of the parameter's shape and dtype
    second: Tensor  # the same


def moments(param: Tensor, hyper: Any) -> Moments:
    return Moments(torch.zeros_like(param), torch.zeros_like(param))


def plain_adam(param: Tensor, grad: Tensor, state: Moments, c: Hyper) -> tuple[Tensor, Moments]:
    """Arithmetic with numbers, and torch's functions that take some."""
    beta_1, beta_2 = c.betas
    first = beta_1 * state.first + (1 - beta_1) * grad
    second = torch.addcmul(beta_2 * state.second, grad, grad, value=1 - beta_2)
    return torch.addcdiv(param, first, second.sqrt() + 1e-3, value=-c.lr), Moments(first, second)


PLAIN = Rule(name="plain", hyper=Hyper, state=Moments, init=moments, rule=plain_adam)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float64"), ("float64", "float64", "float64")], ids=str
)
def test_lanes_that_were_at_one_step_count_on_their_own(dtypes: tuple[str, ...]) -> None:
    """Of another buffer, or of the same but no neighbours."""
    sizes = {name: getattr(torch, one) for name, one in zip("abc", dtypes, strict=False)}

    def made() -> dict[str, Tensor]:
        return {name: noise(3, 20, dtype=dtype) for name, dtype in sizes.items()}

    def state_at(*counts: int) -> Any:
        state = REFERENCE.init(made())
        for leaf, count in zip(state.leaves.values(), counts, strict=True):
            leaf.step.fill_(count)
        return state

    grads = {name: noise(4, 20, dtype=dtype) for name, dtype in sizes.items()}
    first, then = ((0, 0), (0, 499)) if len(sizes) == 2 else ((0, 1, 0), (0, 1, 499))
    bound = REFERENCE.bind(made(), state_at(*first), capturable=True)
    graph = Graph()
    with graph.recording():
        bound.step(grads)
    bound.load_state(state_at(*then))
    for name, one in made().items():
        bound.params[name].copy_(one)
    graph.replay()
    want = REFERENCE.update(made(), grads, state_at(*then))
    assert_close((bound.params, bound.state), want)


def test_a_count_set_between_replays_is_that_parameter_s_alone() -> None:
    params = {"a": noise(1, 20), "b": noise(2, 20, dtype=torch.float64)}
    grads = {"a": noise(3, 20), "b": noise(4, 20, dtype=torch.float64)}
    bound = REFERENCE.bind(params, capturable=True)
    graph = Graph()
    with graph.recording():
        bound.step(grads)
    for _ in range(50):
        graph.replay()
    bound.state.leaves["a"].step.fill_(1)
    before = optree.tree_map(torch.clone, (bound.params, bound.state))
    bound.step(grads)
    assert_close((bound.params, bound.state), REFERENCE.update(before[0], grads, before[1]))


@pytest.mark.parametrize("executor", ["reference", "compile"])
def test_the_first_step_may_be_the_one_that_is_captured(executor: Any) -> None:
    """Everything that takes a look at numbers was done at binding, for parameters apart too."""
    bound = adamw(0.01).using(executor=executor).bind(parameters(), capturable=True)
    assert bound.ready()
    graph, given = Graph(), full(50)
    with graph.recording():
        bound.step(given)
    graph.replay()
    want = steps(adamw(0.01), parameters(), lambda _: given, count=2)
    assert_close((bound.params, bound.state), want, 32.0)


def test_memory_that_other_optimizers_use_again_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leaves that no view makes a lane are gathered: into scratch, where nothing is captured."""

    def used(*_: Any) -> Any:
        raise AssertionError("scratch of the thread")

    monkeypatch.setattr(lanes, "_scratch", used)
    params = {"apart": noise(1, 6, 5)[::2], "flat": noise(2, 4)}
    grads = {"apart": noise(3, 5, 3).t(), "flat": noise(4, 4)}
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1)).using(executor="compile")
    bound = optimizer.bind(params, capturable=True)
    with Graph().recording():
        bound.step(grads)
    with pytest.raises(AssertionError, match="scratch of the thread"):
        optimizer.update_(params, grads, optimizer.init(params))


@pytest.mark.parametrize("decay", [0.1, lambda k: 0.05 * k, torch.zeros((), dtype=torch.float64)])
def test_a_decay_that_is_nothing_for_a_while(decay: Any) -> None:
    def change(k: int, bound: Any) -> None:
        if isinstance(decay, float):
            bound.set_hyper(weight_decay=[0.1, 0.0, 0.0, 0.3][k])
        elif isinstance(decay, Tensor):
            decay.fill_([0.0, 0.1, 0.0, 0.2][k])

    optimizer = adamw(0.1, weight_decay=decay).using(executor="reference")
    got = replays(optimizer, tree(), gradients(), between=change)
    assert_close(got, steps(optimizer, tree(), gradients(), between=change))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rules_of_torch_s_functions_round_as_with_numbers(dtype: torch.dtype) -> None:
    """Between two operations nothing is rounded that is not with numbers, and no number is."""

    def made() -> Tensor:
        return 0.01 * noise(1, 300, dtype=torch.float64).to(dtype)

    def given(k: int) -> Tensor:
        return 1e-3 * noise(5 + k, 300, dtype=torch.float64).to(dtype)

    optimizer = chain(PLAIN(lr=1e-3)).using(executor="reference")
    got, _ = replays(optimizer, made(), given, count=20)
    want, _ = steps(optimizer, made(), given, count=20)
    assert_close(got, want, 4.0)


def test_numbers_in_tensors_of_a_tuple_are_not_compiled_elsewhere() -> None:
    betas: Any = (torch.tensor(0.9), 0.99)
    optimizer = chain(PLAIN(lr=0.1, betas=betas)).using(executor="compile")
    said = optimizer.explain(noise(0, 70_000)).partition("each alone: ")[2]
    assert said.startswith("reference; plain has a hyper-parameter that is a tensor")


class NoHyper(NamedTuple):
    pass


def squares(grad: Tensor) -> Tensor:
    return grad.double().square().sum()


def by_norm(grad: Tensor, param: Tensor, state: NoState, c: NoHyper, total: Tensor) -> Any:
    return grad / total.sqrt().to(grad.dtype), state


def subtract(param: Tensor, grad: Tensor, state: NoState, c: NoHyper) -> tuple[Tensor, NoState]:
    return param - grad, state


def test_a_chain_that_has_no_numbers_but_a_sum() -> None:
    normed = Transform(name="normed", hyper=NoHyper, transform=by_norm, measure=squares)
    minus = Rule(name="minus", hyper=NoHyper, rule=subtract)
    optimizer = chain(normed(), minus()).using(executor="compile")
    got = replays(optimizer, tree(), gradients())
    assert_close(got, steps(optimizer.using(executor="reference"), tree(), gradients()))


def drifts(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * grad, state


def test_what_cannot_be_bound_leaves_parameters_as_they_were() -> None:
    """A number in double precision makes more of a 0-d parameter than it was."""
    params = {"a": noise(0, 4), "b": noise(1)}
    rule = Rule(name="drifts", hyper=Hyper, rule=drifts, kind="per_matrix")
    with pytest.raises(UntraceableError, match="torch.float64; it must keep both"):
        chain(rule(lr=0.1)).bind(params, capturable=True)
    assert all(one.untyped_storage().nbytes() == 4 * one.numel() for one in params.values())
    chain(rule(lr=0.1)).bind(params).step({"a": noise(2, 4), "b": noise(3)})


def test_a_hyper_parameter_that_cannot_be_set_changes_nothing() -> None:
    bound = REFERENCE.bind(tree(), capturable=True)
    kept = bound.optimizer
    with pytest.raises(ValueError, match="without a branch"):
        bound.set_hyper(lr=lambda k: 0.1 if k < 2 else 0.01)
    assert bound.optimizer is kept
    bound.step(gradients()(0))
    assert_close(bound.params, steps(REFERENCE, tree(), gradients(), count=1)[0])


def test_bound_in_inference_mode() -> None:
    params = tree()
    with torch.inference_mode():
        bound = REFERENCE.bind(params, capturable=True)
    bound.set_hyper(lr=0.2)
    bound.step(gradients()(0))
    assert_close(bound.params, steps(adamw(0.2), tree(), gradients(), count=1)[0])


def test_its_own_state_can_be_loaded_whatever_had_no_gradient() -> None:
    bound = REFERENCE.bind(tree(), capturable=True)
    with Graph().recording():
        bound.step({**gradients()(0), "b": None})
    for count in (0, 3):
        state = REFERENCE.init(tree())
        for leaf in state.leaves.values():
            leaf.step.fill_(count)
        bound.load_state(state)


def test_stages_with_a_rate_of_their_own_follow() -> None:
    def change(k: int, bound: Any) -> None:
        bound.set_hyper(lr=0.1 / (k + 1))

    decay = DECOUPLED_WEIGHT_DECAY(weight_decay=0.1, lr=0.3)
    optimizer = chain(decay, sgd(0.1)).using(executor="reference")
    got = replays(optimizer, tree(), gradients(), between=change)
    assert_close(got, steps(optimizer, tree(), gradients(), between=change))


def test_a_tensor_of_one_element_is_that_tensor_each_time() -> None:
    rate = torch.full((1,), 0.1, dtype=torch.float64)
    bound = captured(adamw(rate).using(executor="reference"))
    bound.set_hyper(lr=rate)


@pytest.mark.parametrize("where", ["parameters", "a total"])
def test_everything_is_on_one_device(where: str) -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1))
    if where == "parameters":
        params = {"a": noise(0, 3), "b": torch.empty(3, device="meta")}
        with pytest.raises(ValueError, match="on cpu and on meta, and a graph is captured on one"):
            optimizer.bind(params, capturable=True)
        return
    bound = optimizer.bind(tree(), capturable=True)
    total = torch.empty((), dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match="has to be on cpu, got a total on meta"):
        bound.step(gradients()(0), measured=[total])


def test_nothing_is_captured_while_a_compiler_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = adamw(0.1).using(executor="auto").bind(tree(), capturable=True)
    monkeypatch.setattr(LaneExecutor, "ready", lambda *_: False)
    with pytest.raises(RuntimeError, match=r"wait for ready\(\) before"), Graph().recording():
        bound.step(gradients()(0))
    assert int(bound.state.leaves["a"].step) == 0


def test_other_ways_of_stepping_refuse_to_be_captured() -> None:
    params = [noise(0, 3)]
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1)).using(executor="blocked")
    program = optimizer.script(params)
    program._on_cuda = params
    calls: dict[str, Any] = {
        "script": lambda: program.step([noise(1, 3)]),
        "measure": lambda: optimizer.measure(params, [noise(1, 3)], optimizer.init(params)),
    }
    for call in calls.values():
        refused = pytest.raises(RuntimeError, match="a CUDA graph is being captured")
        with refused, Graph().recording():
            call()
    assert torch.equal(params[0], noise(0, 3))


def test_a_lane_with_python_s_numbers_refuses_to_be_captured() -> None:
    class OnCuda:
        is_cuda = True

    executor: Any = EXECUTORS["blocked"]
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"), Graph().recording():
        executor.step_lane((), Leaf(OnCuda(), OnCuda(), (), (), "p"), ())  # type: ignore[arg-type]  # a tensor there
