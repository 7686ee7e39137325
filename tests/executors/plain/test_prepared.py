"""Short lanes that come again are stepped by what was found out once: the same step, each time."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, adamw, chain, clip_by_value, lion, qhm, sgd
from functional_optim.bound import BoundOptimizer
from functional_optim.executors import EXECUTORS, LaneExecutor
from functional_optim.executors.prepared import MOST
from functional_optim.stage import NoState

from ...choices import case, pairs
from ..support import assert_same, noise

EVERY: dict[str, Optimizer] = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9, dampening=0.5),
    "adamw": adamw(0.1, weight_decay=0.1),
    "lion": lion(0.1),
    "a chain": chain(clip_by_value(0.5), qhm(0.1)),
}


class Turning(NamedTuple):
    lr: float


class Turned(NamedTuple):
    lr: float
    backwards: bool


def turned(step: float, hyper: Turning) -> Turned:
    return Turned(hyper.lr, bool(step % 3 == 0))


def turning_rule(param: Tensor, grad: Tensor, state: NoState, c: Turned) -> tuple[Tensor, NoState]:
    if c.backwards:
        return param + c.lr * grad, state
    return param - c.lr * grad, state


TURNING = chain(
    Rule(name="turning", hyper=Turning, rule=turning_rule, coefficients=turned)(lr=0.25)
)
"""A choice that depends on the step."""


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.nn.Parameter(noise(seed, 5, seed + 1, dtype=dtype)) for seed in range(3)]


def fill(bound: BoundOptimizer, seed: int) -> None:
    for place, grad in enumerate(bound.gradients):
        grad.copy_(noise(10 * seed + place, *grad.shape, dtype=grad.dtype))


def bound_to(optimizer: Optimizer, executor: Any, *, whole: bool = True) -> Any:
    bound = optimizer.using(executor=executor).bind(tensors())
    if not whole:
        bound._whole = None  # all is found out at each step
    return bound


def trained(bound: BoundOptimizer, steps: int = 5) -> Any:
    for seed in range(steps):
        fill(bound, seed)
        bound.step(bound.gradients)
    return bound.params, bound.state


def test_steps_are_the_reference_bit_for_bit(executors: Any, asked: list[str]) -> None:
    """Bfloat16 is stepped leaf by leaf, unless it is a loop."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    for one in pairs(name=EVERY, executor=executors, dtype=dtypes):
        optimizer, dtype = EVERY[one["name"]], one["dtype"]
        asked.clear()
        found = trained(optimizer.using(executor=one["executor"]).bind(tensors(dtype)))
        with case(**one):
            if one["executor"] in ("blocked", "script"):
                assert len(asked) == (3 * 5 if dtype == torch.bfloat16 else 2)
            assert_same(found, trained(optimizer.using(executor="reference").bind(tensors(dtype))))


def test_a_fused_kernel_is_called_with_the_numbers_of_each_step(asked: list[str]) -> None:
    for name in ("sgd", "momentum", "adamw"):
        asked.clear()
        found = trained(bound_to(EVERY[name], "fused"))
        assert len(asked) == 2
        with case(name=name):
            assert_same(found, trained(bound_to(EVERY[name], "fused", whole=False)))
            assert len(asked) == 2 + 5


def test_what_decides_is_looked_at_in_each_step(executors: Any) -> None:
    want = trained(bound_to(TURNING, "reference"), 8)
    for executor in executors:
        with case(executor=executor):
            assert_same(trained(bound_to(TURNING, executor), 8), want)


def test_gradients_that_were_gathered_make_the_same_step(executors: Any, asked: list[str]) -> None:
    want = trained(bound_to(adamw(0.1), "reference"), 4)
    for one in pairs(executor=executors, form=["a tree", ".grad", "attached"]):
        bound = bound_to(adamw(0.1), one["executor"])
        asked.clear()
        if one["form"] == "attached":
            bound.layout.attach_gradients()
        for seed in range(4):
            grads = [noise(10 * seed + place, *p.shape) for place, p in enumerate(bound.params)]
            for param, grad in zip(bound.params, grads, strict=True):
                if one["form"] == ".grad":
                    param.grad = grad
                elif one["form"] == "attached":
                    param.grad.copy_(grad)
            bound.step(grads if one["form"] == "a tree" else None)
        with case(**one):
            assert one["executor"] == "reference" or len(asked) == 2
            assert_same((bound.params, bound.state), want)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was prepared by blocks."""
    seen: list[Any] = []
    prepare = LaneExecutor.prepare

    def noted(self: LaneExecutor, stages: Any, lane: Any) -> Any:
        seen.append(lane)
        return prepare(self, stages, lane)

    monkeypatch.setattr(LaneExecutor, "prepare", noted)
    return seen


def test_nothing_is_prepared_for_hyper_parameters_that_change_at_each_step(
    prepared: list[Any],
) -> None:
    bound = bound_to(lion(0.1), "blocked")
    for seed in range(5):
        bound.set_hyper(lr=0.1 / (1 + seed))
        trained(bound, 1)
    assert prepared == []
    trained(bound, 1)
    assert len(prepared) == 1


def test_preparing_is_given_up_where_it_is_in_vain(prepared: list[Any]) -> None:
    trained(bound_to(TURNING, "blocked"), 30)
    assert 1 <= len(prepared) <= 3


def test_a_step_that_is_broken_off_is_not_counted(
    executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is prepared, nothing has changed; where it was run, autograd is told."""

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    for executor in (one for one in executors if one != "reference"):
        bound = bound_to(adamw(0.1), executor)
        trained(bound, 1)
        before = [param.detach().clone() for param in bound.params]
        fill(bound, 1)
        with monkeypatch.context() as patch:
            patch.setattr(EXECUTORS[executor], "prepare", broken)
            with pytest.raises(KeyboardInterrupt):
                bound.step(bound.gradients)
        assert_same(bound.params, before)
        trained(bound, 2)
        want = bound_to(adamw(0.1), "reference")
        trained(want, 1)
        with case(executor=executor):
            assert_same((bound.params, bound.state), trained(want, 2))
        versions = [param._version for param in bound.params]
        with monkeypatch.context() as patch:
            for _, one in bound._whole._prepared:
                patch.setattr(type(one), "feed", lambda *_: True)
                one.run = broken
            with pytest.raises(KeyboardInterrupt):
                bound.step(bound.gradients)
        assert [int(leaf.step) for leaf in bound.state.leaves] == [3, 3, 3]
        now = [param._version for param in bound.params]
        assert all(new > old for new, old in zip(now, versions, strict=True))


def test_long_lanes_are_not_prepared(asked: list[str]) -> None:
    bound = sgd(0.1).using(executor="blocked").bind([torch.zeros(MOST + 1)])
    trained(bound, 3)
    assert len(asked) == 3


def test_hyper_parameters_that_are_set_hold_from_the_next_step_on() -> None:
    bound = sgd(0.5).using(executor="blocked").bind([torch.zeros(2)])
    bound.gradients[0].fill_(1.0)
    for lr, want in ((0.5, -0.5), (0.5, -1.0), (0.25, -1.25), (0.25, -1.5), (0.5, -2.0)):
        bound.set_hyper(lr=lr)
        bound.step(bound.gradients)
        assert bound.params[0].tolist() == [want, want]
