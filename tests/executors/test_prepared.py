"""Short lanes that come again are stepped by what was found out once: the same step, each time."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, adamw, chain, clip_by_value, lion, qhm, sgd
from functional_optim.bound import BoundOptimizer
from functional_optim.executors import EXECUTORS, LaneExecutor
from functional_optim.executors.prepared import MOST
from functional_optim.stage import NoState

from .support import assert_same, noise

EXACT = ["blocked", "script"]
EVERY: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: sgd(0.1),
    "momentum": lambda: sgd(0.1, momentum=0.9, dampening=0.5),
    "adamw": lambda: adamw(0.1, weight_decay=0.1),
    "lion": lambda: lion(0.1),
    "a chain": lambda: chain(clip_by_value(0.5), qhm(0.1)),
}


class Turning(NamedTuple):
    lr: float


class Turned(NamedTuple):
    lr: float
    backwards: bool


def turned(step: float, hyper: Turning) -> Turned:
    if step % 3 == 0:
        return Turned(hyper.lr, True)
    return Turned(hyper.lr, False)


def turning_rule(param: Tensor, grad: Tensor, state: NoState, c: Turned) -> tuple[Tensor, NoState]:
    if c.backwards:
        return param + c.lr * grad, state
    return param - c.lr * grad, state


TURNING = Rule(name="turning", hyper=Turning, rule=turning_rule, coefficients=turned)


def turning() -> Optimizer:
    """A choice that depends on the step."""
    return chain(TURNING(lr=0.25))


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.nn.Parameter(noise(seed, 5, seed + 1, dtype=dtype)) for seed in range(3)]


def fill(bound: BoundOptimizer, seed: int) -> None:
    for place, grad in enumerate(bound.gradients):
        grad.copy_(noise(10 * seed + place, *grad.shape, dtype=grad.dtype))


def trained(bound: BoundOptimizer, steps: int = 5) -> Any:
    for seed in range(steps):
        fill(bound, seed)
        bound.step(bound.gradients)
    return bound.params, bound.state


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the lanes that were stepped by finding out what steps them."""
    names: list[str] = []
    for executor in {type(one) for one in EXECUTORS.values() if isinstance(one, LaneExecutor)}:
        step_lane = executor.step_lane

        def counted(self: Any, stages: Any, lane: Any, totals: Any, step: Any = step_lane) -> None:
            names.append(lane.name)
            step(self, stages, lane, totals)

        monkeypatch.setattr(executor, "step_lane", counted)
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("executor", EXACT)
@pytest.mark.parametrize("name", EVERY)
def test_steps_are_the_reference_bit_for_bit(
    name: str, executor: Any, dtype: torch.dtype, asked: list[str]
) -> None:
    apart = dtype == torch.bfloat16  # stepped leaf by leaf
    found = trained(EVERY[name]().using(executor=executor).bind(tensors(dtype)))
    assert len(asked) == (3 * 5 if apart else 2)
    assert_same(found, trained(EVERY[name]().using(executor="reference").bind(tensors(dtype))))


@pytest.mark.parametrize("executor", ["auto", "fused"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_a_fused_kernel_is_called_with_the_numbers_of_each_step(
    name: str, executor: Any, asked: list[str]
) -> None:
    bound = EVERY[name]().using(executor=executor).bind(tensors())
    found = trained(bound)
    assert len(asked) == 2
    other = EVERY[name]().using(executor=executor).bind(tensors())
    other._whole = None
    want = trained(other)
    assert len(asked) == 2 + 5
    assert_same(found, want)


@pytest.mark.parametrize("executor", EXACT)
def test_what_decides_is_looked_at_in_each_step(executor: Any) -> None:
    found = trained(turning().using(executor=executor).bind(tensors()), 8)
    want = trained(turning().using(executor="reference").bind(tensors()), 8)
    assert_same(found, want)


@pytest.mark.parametrize("executor", [*EXACT, "auto"])
@pytest.mark.parametrize("form", ["a tree", ".grad", "attached"])
def test_gradients_that_were_gathered_make_the_same_step(
    form: str, executor: Any, asked: list[str]
) -> None:
    bound = adamw(0.1).using(executor=executor).bind(tensors())
    if form == "attached":
        bound.layout.attach_gradients()
    for seed in range(4):
        grads = [noise(10 * seed + place, *p.shape) for place, p in enumerate(bound.params)]
        for param, grad in zip(bound.params, grads, strict=True):
            if form == ".grad":
                param.grad = grad
            elif form == "attached":
                param.grad.copy_(grad)
        bound.step(grads if form == "a tree" else None)
    assert len(asked) == 2
    other = adamw(0.1).using(executor=executor).bind(tensors())
    other._whole = None
    assert_same((bound.params, bound.state), trained(other, 4))


def test_nothing_is_prepared_for_hyper_parameters_that_change_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[Any] = []
    executor = EXECUTORS["blocked"]
    monkeypatch.setattr(executor, "prepare", lambda *of: prepared.append(of))
    bound = lion(0.1).using(executor="blocked").bind(tensors())
    for seed in range(5):
        bound.set_hyper(lr=0.1 / (1 + seed))
        trained(bound, 1)
    assert prepared == []
    trained(bound, 1)
    assert len(prepared) == 1


def test_preparing_is_given_up_where_it_is_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    executor = EXECUTORS["blocked"]
    assert isinstance(executor, LaneExecutor)
    prepare = executor.prepare

    def counted(stages: Any, lane: Any) -> Any:
        prepared.append(lane)
        return prepare(stages, lane)

    monkeypatch.setattr(executor, "prepare", counted)
    trained(turning().using(executor="blocked").bind(tensors()), 30)
    assert 1 <= len(prepared) <= 3


@pytest.mark.parametrize("executor", EXACT)
def test_preparing_that_fails_has_changed_nothing(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = adamw(0.1).using(executor=executor).bind(tensors())
    trained(bound, 1)
    before = [param.detach().clone() for param in bound.params]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EXECUTORS[executor], "prepare", interrupted)
        fill(bound, 1)
        with pytest.raises(KeyboardInterrupt):
            bound.step(bound.gradients)
    assert_same(bound.params, before)
    assert [int(leaf.step) for leaf in bound.state.leaves] == [1, 1, 1]
    for seed in range(1, 4):
        fill(bound, seed)
        bound.step(bound.gradients)
    assert_same(
        (bound.params, bound.state),
        trained(adamw(0.1).using(executor="reference").bind(tensors()), 4),
    )


def test_long_lanes_are_not_prepared(asked: list[str]) -> None:
    bound = sgd(0.1).using(executor="blocked").bind([torch.zeros(MOST + 1)])
    trained(bound, 3)
    assert len(asked) == 3


@pytest.fixture(params=["with_loops", "without_loops"])
def loops(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue(request.param)
    return str(request.param)


@pytest.mark.parametrize("executor", [*EXACT, "auto"])
def test_what_has_moved_is_seen_before_anything_is_written(executor: Any, loops: str) -> None:
    bound = adamw(0.1).using(executor=executor).bind(tensors())
    trained(bound, 3)
    before = [param.detach().clone() for param in bound.params]
    fill(bound, 9)
    there = bound.params[1].data
    bound.params[1].data = there.clone()
    with pytest.raises(RuntimeError, match="'1' has left its flat buffer"):
        bound.step(bound.gradients)
    bound.params[1].data = there
    bound.gradients[0].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was resized or given other memory"):
        bound.step(bound.gradients)
    assert_same(bound.params, before)
    assert [int(leaf.step) for leaf in bound.state.leaves] == [3, 3, 3]


@pytest.mark.parametrize("executor", [*EXACT, "auto"])
def test_autograd_is_told_of_parameters_only(executor: Any, loops: str) -> None:
    bound = adamw(0.1).using(executor=executor).bind(tensors())
    trained(bound, 3)
    own = [bound.layout.buffers[0].data, bound.gradients[0]]
    before = [one._version for one in (*bound.params, *own)]
    squares = bound.params[0].square().sum()
    bound.step(bound.gradients)
    after = [one._version for one in (*bound.params, *own)]
    changed = [new > old for new, old in zip(after, before, strict=True)]
    assert changed[:3] == [True] * 3 and not changed[-1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize("executor", [*EXACT, "auto"])
def test_counts_that_someone_changes_are_the_counts(executor: Any) -> None:
    def steps(one: BoundOptimizer) -> Any:
        trained(one, 3)
        for leaf in one.state.leaves:
            leaf.step.fill_(20)
        trained(one, 2)
        one.state.leaves[1].step.fill_(7)
        return trained(one, 2)

    found = steps(adamw(0.1).using(executor=executor).bind(tensors()))
    other = adamw(0.1).using(executor=executor).bind(tensors())
    other._whole = None
    assert_same(found, steps(other))
    assert [int(leaf.step) for leaf in found[1].leaves] == [24, 9, 24]


@pytest.mark.parametrize("executor", EXACT)
def test_a_step_that_fails_is_not_counted_and_autograd_is_told(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = adamw(0.1).using(executor=executor).bind(tensors())
    trained(bound, 3)
    before = [param._version for param in bound.params]

    def fails() -> None:
        raise KeyboardInterrupt

    assert bound._whole is not None
    for _, one in bound._whole._prepared:
        monkeypatch.setattr(type(one), "feed", lambda *_: True)
        one.run = fails
    with pytest.raises(KeyboardInterrupt):
        bound.step(bound.gradients)
    assert [int(leaf.step) for leaf in bound.state.leaves] == [3, 3, 3]
    assert all(
        new > old for new, old in zip((p._version for p in bound.params), before, strict=True)
    )


@pytest.mark.parametrize("executor", EXACT)
def test_threads_may_take_turns(executor: Any) -> None:
    bound = lion(0.1).using(executor=executor).bind(tensors())
    for seed in range(4):
        fill(bound, seed)
        turn = threading.Thread(target=bound.step, args=(bound.gradients,))
        turn.start()
        turn.join()
    other = lion(0.1).using(executor="reference").bind(tensors())
    assert_same((bound.params, bound.state), trained(other, 4))


@pytest.mark.parametrize("executor", [*EXACT, "auto"])
def test_what_is_prepared_in_inference_mode_serves_outside(executor: Any) -> None:
    bound = chain(clip_by_value(0.5), lion(0.1)).using(executor=executor).bind(tensors())
    with torch.inference_mode():
        trained(bound, 2)
    trained(bound, 2)
    other = chain(clip_by_value(0.5), lion(0.1)).using(executor=executor).bind(tensors())
    trained(other, 2)
    assert_same((bound.params, bound.state), trained(other, 2))


def test_hyper_parameters_that_are_set_hold_from_the_next_step_on() -> None:
    bound = sgd(0.5).using(executor="blocked").bind([torch.zeros(2)])
    bound.gradients[0].fill_(1.0)
    for lr, want in ((0.5, -0.5), (0.5, -1.0), (0.25, -1.25), (0.25, -1.5), (0.5, -2.0)):
        bound.set_hyper(lr=lr)
        bound.step(bound.gradients)
        assert bound.params[0].tolist() == [want, want]
