"""A planned step is reused, with the numbers of each step."""

from itertools import combinations, compress, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, Rule, adamw, chain, clip_by_value, lion, qhm, sgd
from functional_optim.core.stage import NoState
from functional_optim.kernels import chunks
from functional_optim.optimizer.bound import BoundOptimizer

from ...choices import case, pairs
from ..support import Twins, assert_same, broken_off, noise

EVERY: dict[str, Optimizer] = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9, dampening=0.5),
    "adamw": adamw(0.1, weight_decay=0.1),
    "lion": lion(0.1),
    "a chain": chain(clip_by_value(0.5), qhm(0.1)),
}

MOST_CALLS = 50
"""Most calls of the package's Python functions in a step with gradients in their buffer."""


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
"""Rule with a branch that depends on the step."""


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.nn.Parameter(noise(seed, 5, seed + 1, dtype=dtype)) for seed in range(3)]


def fill(bound: BoundOptimizer, seed: int) -> None:
    for place, grad in enumerate(bound.gradients):
        grad.copy_(noise(10 * seed + place, *grad.shape, dtype=grad.dtype))


def drawn(seed: int) -> list[Tensor]:
    return [noise(10 * seed + place, *one.shape) for place, one in enumerate(tensors())]


def bound_to(optimizer: Optimizer, executor: Any) -> BoundOptimizer:
    return optimizer.using(executor=executor).bind(tensors())


def trained(bound: BoundOptimizer, steps: int = 5) -> Any:
    for seed in range(steps):
        fill(bound, seed)
        bound.step(bound.gradients)
    return bound.params, bound.state


def test_steps_are_the_reference_bit_for_bit(executors: Any, planned: list[Any]) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    for one in pairs(name=EVERY, executor=executors, dtype=dtypes):
        optimizer, dtype = EVERY[one["name"]], one["dtype"]
        planned.clear()
        found = trained(optimizer.using(executor=one["executor"]).bind(tensors(dtype)))
        with case(**one):
            assert planned == [None]
            assert_same(found, trained(optimizer.using(executor="reference").bind(tensors(dtype))))


MASKS = [bytes(mask) for mask in product((0, 1), repeat=3) if not all(mask)] + [None]


def test_masks_in_turn_have_a_plan_each(executors: Any, planned: list[Any]) -> None:
    """Each mask has one plan, and a new plan when the step counts of its leaves diverge."""
    for executor in executors:
        for one, other in combinations(MASKS, 2):
            twins = Twins(adamw(0.1), tensors, executor)
            planned.clear()
            with case(executor=executor, one=one, other=other):
                for seed in range(8):
                    mask = (other if seed % 2 else one) or b"\1\1\1"
                    given: Any = [
                        g if there else None for g, there in zip(drawn(seed), mask, strict=True)
                    ]
                    twins.bound.step(given, lr=0.1 / (seed + 1))
                    twins.optimizer.update_(twins.plain, given, twins.state, lr=0.1 / (seed + 1))
                twins.require_same()
                first, second = (set(compress("abc", m or b"\1\1\1")) for m in (one, other))
                parts = executor != "reference" and first & second and first - second
                made = [one, other, one] if parts else [one, other]
                made = [m for m in made if m != bytes(3)]  # a step of no leaf has no plan
                assert [None if m is None else bytes(m) for m in planned] == made


def test_what_decides_is_looked_at_in_each_step(executors: Any, planned: list[Any]) -> None:
    want = trained(bound_to(TURNING, "reference"), 8)
    for executor in executors:
        planned.clear()
        with case(executor=executor):
            assert_same(trained(bound_to(TURNING, executor), 8), want)
            assert planned == [None]


def test_a_step_by_its_own_gradients_makes_few_calls(executors: Any, calls: Any) -> None:
    """The number of calls does not depend on the number of parameters."""
    for one in pairs(name=["sgd", "momentum", "adamw", "lion"], executor=executors):
        if one["executor"] == "reference":
            continue  # the reference calls each stage for each leaf
        found = []
        for count in (1, 30):
            params = [noise(seed, 5) for seed in range(count)]
            bound = EVERY[one["name"]].using(executor=one["executor"]).bind(params)
            for _ in range(2):
                bound.step(bound.gradients)
            found.append(calls(lambda made=bound: made.step(made.gradients)))
        with case(**one):
            assert found[0] == found[1]
            assert len(found[0]) <= MOST_CALLS, found[0]


def test_gradients_that_were_gathered_make_the_same_step(
    executors: Any, planned: list[Any]
) -> None:
    want = trained(bound_to(adamw(0.1), "reference"), 4)
    for one in pairs(executor=executors, form=["a tree", ".grad", "attached"]):
        bound = bound_to(adamw(0.1), one["executor"])
        planned.clear()
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
            assert_same((bound.params, bound.state), want)
            assert planned == [None]


def test_a_step_that_is_broken_off_is_whole_or_not_made_for_each_leaf(
    executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails before the first group of leaves is written, or after it.

    The unstepped leaves continue as if their gradients had been missing. Autograd detects all
    tensors that the step could have written.
    """
    monkeypatch.setattr(chunks, "LARGE", 1)  # no leaves are stepped in a list
    errors, made = [MemoryError, KeyboardInterrupt], set()
    for one in pairs(executor=executors, at=[1, 2], error=errors, own=[True, False]):
        if one["executor"] == "reference" and one["at"] == 2:
            continue  # the reference steps all leaves in one call
        optimizer = adamw(0.1).override((1,), lr=0.2)
        twins = Twins(optimizer, tensors, one["executor"])
        with case(**one):
            for seed in range(2):
                twins.step(drawn(seed))
            given: Any = drawn(2)
            if one["own"]:
                for view, grad in zip(twins.bound.gradients, given, strict=True):
                    view.copy_(grad)
            versions = [param._version for param in twins.bound.params]
            with monkeypatch.context() as patch:
                broken_off(patch, one["at"], one["error"])
                with pytest.raises(one["error"], match="broken off"):
                    twins.bound.step(twins.bound.gradients if one["own"] else given)
            stepped = [int(leaf.step) == 3 for leaf in twins.bound.state.leaves]
            made.add(tuple(stepped))
            assert sum(stepped) == 0 if one["at"] == 1 else stepped.count(True) in (1, 2)
            if one["executor"] != "reference":
                now = [param._version for param in twins.bound.params]
                assert any(new > old for new, old in zip(now, versions, strict=True))
            missing = [grad if is_in else None for grad, is_in in zip(given, stepped, strict=True)]
            optimizer.update_(twins.plain, missing, twins.state)
            twins.require_same()
            for seed in range(3, 6):
                twins.step(drawn(seed))
    assert made >= {(False,) * 3, (True, False, True)}


def test_a_step_that_is_broken_off_between_chunks_is_whole_for_those_before(
    executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed step of a chunk keeps the step of the chunk before it in the same buffer."""
    monkeypatch.setattr(chunks, "LARGE", 1)  # each run is a separate chunk
    by_one_call = ("reference", "compiled", "auto")
    for executor in (one for one in executors if one not in by_one_call):
        twins = Twins(adamw(0.1), tensors, executor)
        first, _, last = drawn(2)
        with case(executor=executor):
            for _ in range(3):
                twins.step([first, None, last])
            with monkeypatch.context() as patch:
                broken_off(patch, 2)
                with pytest.raises(MemoryError):
                    twins.bound.step([first, None, last])
            twins.optimizer.update_(twins.plain, [first, None, None], twins.state)
            twins.require_same()
            twins.step(drawn(5))
