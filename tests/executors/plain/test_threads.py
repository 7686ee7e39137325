"""Threads share optimizers and executors, but one optimizer makes one step at a time."""

import gc
import itertools
import sys
import time
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    lamb,
    sgd,
)
from functional_optim.kernels import scratch
from functional_optim.kernels.pieces import PIECE_VARIABLE

from ...choices import case, pairs
from ..rules import VARIANTS
from ..support import LARGE, Tree, assert_same, copied, noise, same_bits, together

CLIPPED = chain(clip_by_global_norm(3.0), VARIANTS["adamw"])
THREADS = 4


def model(seed: int) -> Tree:
    return {"w": noise(seed, 33, 7), "b": noise(seed + 1, 5), "z": noise(seed + 2, LARGE)}


def trained(optimizer: Optimizer, way: str, seed: int) -> Any:
    params = model(seed)
    if way == "bound":
        bound = optimizer.bind(params)
        assert bound.ready()
        for step in range(6):
            bound.step(model(10 * seed + step))
        return copied((params, bound.state))
    state = optimizer.init(params)
    for step in range(6):
        if way == "pure":
            params, state = optimizer.update(params, model(10 * seed + step), state)
        else:
            optimizer.update_(params, model(10 * seed + step), state)
    return params, state


@pytest.mark.usefixtures("quick_switches")
def test_models_at_once_are_models_one_after_the_other(executors: Any) -> None:
    for one in pairs(executor=executors, way=["pure", "in place", "bound"]):
        optimizer, way = CLIPPED.using(executor=one["executor"]), one["way"]
        want = [trained(optimizer, way, seed) for seed in (1, 2, 3)]
        for _ in range(2):
            got = together(
                *(lambda s=seed, o=optimizer, w=way: trained(o, w, s) for seed in (1, 2, 3))
            )
            with case(**one):
                assert_same(got, want)


def test_scratch_is_not_shared_between_threads() -> None:
    def pieces() -> list[int]:
        optimizer = lamb(0.1).using(executor="blocked")
        params, grads = ({key: noise(k, 9) for key in "ab"} for k in range(2))
        optimizer.update_(params, grads, optimizer.init(params))
        return [tensor.data_ptr() for tensor in scratch._SCRATCH.pieces.values()]

    first, second = together(pieces, pieces)
    assert first and second
    assert not set(first) & set(second)


class Opcodes:
    """Counter of the Python instructions of one call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
        return self

    def of(self, work: Any, *arguments: Any) -> int:
        self.count = 0
        before = sys.gettrace()
        gc.disable()  # callbacks of the collector would be counted
        sys.settrace(self)
        try:
            work(*arguments)
        finally:
            sys.settrace(before)
            gc.enable()
        return self.count


def instructions(optimizer: Optimizer, way: str, many: int) -> int:
    """Return the number of Python instructions of a fourth bound step."""
    params = {str(k): torch.nn.Parameter(noise(k, 3)) for k in range(many)}
    bound = optimizer.bind(params)
    given: Any = bound.gradients
    if way == "attached":
        bound.layout.attach_gradients()
        given = None
    elif way == "separate":
        given = {key: noise(7, 3) for key in params}
    for _ in range(3):
        bound.step(given)
    return Opcodes().of(bound.step, given)


def test_no_python_runs_per_parameter(executors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PIECE_VARIABLE)
    for one in pairs(executor=executors, way=["own", "attached", "separate"]):
        optimizer = VARIANTS["adamw"].using(executor=one["executor"])
        few, many = (instructions(optimizer, one["way"], count) for count in (10, 100))
        with case(**one):
            assert (few == many) is (one["executor"] != "reference")  # the reference loops
            assert few > 100


def gradient(seed: int) -> Tree:
    return {key: noise(10 * seed + k, *one.shape) for k, (key, one) in enumerate(start().items())}


def start() -> Tree:
    return {"a": noise(1, 3, 5), "b": noise(2, 7), "c": noise(3)}


def require_some_order(optimizer: Optimizer, made: Any, params: Tree, step: Any) -> None:
    """Require that concurrent steps are all counted and equal the steps in some order."""
    want = {key: one.clone() for key, one in params.items()}
    state = optimizer.init(want)
    for number in range(3):
        grads = [gradient(THREADS * number + k) for k in range(THREADS)]
        together(*(lambda one=one: step(one) for one in grads))
        counts = [int(leaf.step) for leaf in made.state.leaves.values()]
        assert counts == [THREADS * (number + 1)] * 3
        for order in itertools.permutations(range(THREADS)):
            one, own = want, state
            for place in order:
                one, own = optimizer.update(one, grads[place], own)
            if all(same_bits(one[key], params[key]) for key in params):
                break
        else:
            raise AssertionError(f"round {number}: no order gives what was found")
        want, state = one, own


def test_steps_of_one_optimizer_are_those_of_some_order(executors: Any) -> None:
    for executor in executors:
        optimizer, params = adamw(lr=0.1).using(executor=executor), start()
        bound = optimizer.bind(params)
        with case(executor=executor):
            require_some_order(optimizer, bound, params, bound.step)


class Seen:
    """Learning rate that records how many threads compute it at once."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.steps: list[float] = []

    def __call__(self, made: float) -> float:
        self.now += 1
        self.most = max(self.most, self.now)
        self.steps.append(float(made))
        for _ in range(20):
            time.sleep(0)  # lets another thread run
        self.now -= 1
        return 0.1


@pytest.mark.usefixtures("quick_switches")
def test_no_two_are_within_a_step(executors: Any) -> None:
    for executor in executors:
        seen = Seen()
        made = sgd(lr=seen, momentum=0.9).using(executor=executor).bind(start())
        together(
            *(lambda k=k, m=made: [m.step(gradient(k)) for _ in range(5)] for k in range(THREADS))
        )
        with case(executor=executor):
            assert seen.most == 1
            assert sorted({*seen.steps}) == [float(k) for k in range(5 * THREADS)]


@pytest.mark.usefixtures("quick_switches")
def test_no_two_are_within_a_step_of_a_torch_optimizer() -> None:
    def optimizer_of(lr: Any) -> tuple[list[torch.nn.Parameter], TorchOptimizer]:
        params = [torch.nn.Parameter(one) for one in start().values()]
        for param in params:
            param.grad = torch.ones_like(param)
        return params, TorchOptimizer(params, sgd(lr=lr, momentum=0.9))

    seen = Seen()
    params, made = optimizer_of(seen)
    together(*[lambda: [made.step() for _ in range(5)]] * THREADS)
    assert seen.most == 1
    assert {int(made.state[param]["step"]) for param in params} == {5 * THREADS}
    want, serial = optimizer_of(0.1)
    for _ in range(5 * THREADS):
        serial.step()
    assert all(map(same_bits, params, want))


def test_a_closure_may_step_another_and_itself() -> None:
    """A closure that a step calls can step again in the same thread."""
    param = torch.nn.Parameter(torch.ones(2))
    made = TorchOptimizer([param], sgd(lr=0.5))
    param.grad = torch.ones(2)

    def closure() -> float:
        made.step()
        return 1.0

    assert made.step(closure) == 1.0
    assert param.tolist() == [0.0, 0.0]
