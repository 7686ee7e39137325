"""One optimizer stepped from several threads: its steps are made one after the other (fault 7)."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer, adamw, sgd

from .support import noise, same_bits

THREADS = 4
ROUNDS = 5
EXECUTORS = ("reference", "blocked", "script", "compile", "fused", "auto")

Tree = dict[str, Tensor]
Step = Callable[[Tree], None]


def start() -> Tree:
    return {"a": noise(1, 3, 5), "b": noise(2, 7), "c": noise(3)}


def gradient(seed: int) -> Tree:
    return {key: noise(10 * seed + k, *one.shape) for k, (key, one) in enumerate(start().items())}


def in_threads(calls: list[Callable[[], None]]) -> None:
    """All calls at once, each in a thread of its own; the first error is raised here."""
    ready = threading.Barrier(len(calls))
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            ready.wait()
            call()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def bound(optimizer: Optimizer, params: Tree) -> tuple[Step, Callable[[], list[int]]]:
    made = optimizer.bind(params)
    return made.step, lambda: [int(leaf.step) for leaf in made.state.leaves.values()]


def program(optimizer: Optimizer, params: Tree) -> tuple[Step, Callable[[], list[int]]]:
    made = optimizer.script(params)
    return (
        lambda grads: made.step([grads[key] for key in sorted(grads)]),
        lambda: [int(leaf.step) for leaf in made.state.leaves.values()],
    )


WAYS = [(bound, executor) for executor in EXECUTORS] + [(program, "script")]


@pytest.mark.parametrize(("way", "executor"), WAYS)
def test_steps_are_those_of_some_order(way: Any, executor: Any) -> None:
    """Every one is counted, and the bits are those of the four made in some order (fault 7)."""
    optimizer = adamw(lr=0.1).using(executor=executor)
    params = start()
    step, counts = way(optimizer, params)
    want = {key: one.clone() for key, one in params.items()}
    state = optimizer.init(want)
    for number in range(ROUNDS):
        grads = [gradient(THREADS * number + k) for k in range(THREADS)]
        in_threads([lambda one=one: step(one) for one in grads])
        assert counts() == [THREADS * (number + 1)] * 3
        found = []
        for order in itertools.permutations(range(THREADS)):
            one, own = optree.tree_map(torch.clone, (want, state))
            for place in order:
                one, own = optimizer.update(one, grads[place], own)
            if all(same_bits(one[key], params[key]) for key in params):
                found.append((one, own))
        assert found, f"round {number}: no order of the four gives what was found"
        want, state = found[0]


class Seen:
    """A learning rate that notes how many are computing it, and lets the others come."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.steps: list[float] = []

    def __call__(self, made: float) -> float:
        self.now += 1
        self.most = max(self.most, self.now)
        self.steps.append(float(made))
        time.sleep(0.002)
        self.now -= 1
        return 0.1


@pytest.mark.parametrize("executor", ["reference", "blocked", "script"])
def test_no_two_are_within_a_step(executor: Any) -> None:
    """(fault 7)"""
    seen = Seen()
    made = sgd(lr=seen, momentum=0.9).using(executor=executor).bind(start())
    in_threads([lambda k=k: [made.step(gradient(k)) for _ in range(5)] for k in range(THREADS)])
    assert seen.most == 1
    assert sorted({*seen.steps}) == [float(k) for k in range(5 * THREADS)]


@pytest.mark.parametrize("flat", [False, True])
def test_a_torch_optimizer_too(flat: bool) -> None:
    """(fault 7)"""
    seen = Seen()
    params = [torch.nn.Parameter(one) for one in start().values()]
    made = TorchOptimizer(params, sgd(lr=seen, momentum=0.9), flat=flat)
    for param in params:
        param.grad = torch.ones_like(param)
    in_threads([lambda: [made.step() for _ in range(5)] for _ in range(THREADS)])
    assert seen.most == 1
    assert {int(made.state[param]["step"]) for param in params} == {5 * THREADS}
    want = [torch.nn.Parameter(one) for one in start().values()]
    serial = TorchOptimizer(want, sgd(lr=0.1, momentum=0.9), flat=flat)
    for param in want:
        param.grad = torch.ones_like(param)
    for _ in range(5 * THREADS):
        serial.step()
    assert all(map(same_bits, params, want))


def test_a_closure_may_step_another_and_itself() -> None:
    """What is called within a step may step again, in the same thread (fault 7)."""
    param = torch.nn.Parameter(torch.ones(2))
    made = TorchOptimizer([param], sgd(lr=0.5))
    param.grad = torch.ones(2)

    def closure() -> float:
        made.step()
        return 1.0

    assert made.step(closure) == 1.0
    assert param.tolist() == [0.0, 0.0]
