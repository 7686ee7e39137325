"""Threads: they share optimizers and executors, not results, and a long step lets others run."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, chain, clip_by_global_norm, lion
from functional_optim.executors import blocked, lanes

from .rules import RULES, VARIANTS
from .support import assert_same, copied, noise

OPTIMIZER = chain(clip_by_global_norm(3.0), VARIANTS["adamw"])
EXECUTORS = ["reference", "script", "blocked", "auto", "compile", "fused"]


def optimizer_for(executor: Any) -> Optimizer:
    """A chain that the executor takes."""
    if executor in ("compile", "auto"):
        return RULES["swap"].using(executor=executor)  # compiled by other tests, too
    return (VARIANTS["adamw"] if executor == "fused" else OPTIMIZER).using(executor=executor)


def model(seed: int) -> dict[str, Tensor]:
    return {"w": noise(seed, 33, 7), "b": noise(seed + 1, 5), "z": noise(seed + 2, 70_001)}


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once; what each returned."""
    barrier, results = threading.Barrier(len(works)), [None] * len(works)

    def run(index: int) -> None:
        barrier.wait()
        results[index] = works[index]()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def quick_switches() -> Any:
    """Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("way", ["pure", "in place", "bound"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_models_at_once_are_two_models_one_after_the_other(executor: Any, way: str) -> None:
    optimizer = optimizer_for(executor)

    def train(seed: int) -> Any:
        params = model(seed)
        if way == "bound":
            bound = optimizer.bind(params)
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

    train(0)  # what is prepared once is there, or the switch would come at some step
    if executor == "auto":
        assert optimizer.bind(model(0)).ready()
    want = [train(1), train(2), train(3)]
    for _ in range(2):
        got = together([lambda: train(1), lambda: train(2), lambda: train(3)])
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)


class _Ticks(threading.Thread):
    """Counts how often Python gets to run while something else is done."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.done = False

    def run(self) -> None:
        while not self.done:
            self.count += 1
            time.sleep(0.0005)

    def during(self, work: Callable[[], Any]) -> int:
        before = self.count
        work()
        return self.count - before


@pytest.fixture
def ticks() -> Any:
    thread = _Ticks()
    thread.start()
    yield thread
    thread.done = True
    thread.join()


def holds_the_lock() -> None:
    """One long call that keeps Python's lock."""
    sum(range(20_000_000))


@pytest.mark.parametrize("executor", ["script", "blocked", "compile", "fused"])
def test_other_threads_run_during_a_step(executor: Any, ticks: _Ticks) -> None:
    # Python never takes the lock away by itself here: whoever runs has let go of it.
    before = sys.getswitchinterval()
    optimizer = optimizer_for(executor)
    count = 8_000_000
    bound = optimizer.bind({"w": torch.zeros(count)})
    bound.gradients["w"].fill_(1.0)
    bound.step(bound.gradients)
    sys.setswitchinterval(1000.0)
    try:
        seen = [ticks.during(lambda: bound.step(bound.gradients)) for _ in range(5)]
        assert max(seen) >= 5
        assert ticks.during(holds_the_lock) <= 1
    finally:
        sys.setswitchinterval(before)


def test_scratch_is_not_shared_between_threads() -> None:
    def scratch() -> list[int]:
        optimizer = RULES["reuses"].using(executor="blocked")
        params = {"a": noise(0, 9), "b": noise(1, 9)}
        optimizer.update_(params, params, optimizer.init(params))
        kept = [*blocked._SCRATCH.blocks.values(), *lanes._SCRATCH.packs.values()]
        return [tensor.data_ptr() for tensor in kept]

    first, second = together([scratch, scratch])
    assert first and second
    assert not set(first) & set(second)


class _Opcodes:
    """Counts the Python instructions of one call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
        return self

    def of(self, work: Callable[[], Any]) -> int:
        self.count = 0
        before = sys.gettrace()
        gc.disable()  # what is called after a collection would be counted
        sys.settrace(self)
        try:
            work()
        finally:
            sys.settrace(before)
            gc.enable()
        return self.count


@pytest.mark.parametrize("executor", ["blocked", "fused", "auto", "script"])
@pytest.mark.parametrize("way", ["own", "attached", "separate"])
@pytest.mark.usefixtures("both_ways")
def test_no_python_runs_per_parameter(executor: Any, way: str) -> None:
    optimizer = VARIANTS["adamw"].using(executor=executor)
    counts = []
    for many in (10, 1000):
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
        counts.append(_Opcodes().of(lambda: bound.step(given)))  # noqa: B023  called at once
    assert counts[0] == counts[1]
    assert counts[0] > 100  # they were counted


def test_python_per_parameter_would_be_seen() -> None:
    counts = []
    for many in (10, 1000):
        params = {str(k): noise(k, 3) for k in range(many)}
        state = VARIANTS["adamw"].init(params)
        step = VARIANTS["adamw"].update_
        counts.append(_Opcodes().of(lambda: step(params, params, state)))  # noqa: B023  called at once
    assert counts[1] > 10 * counts[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_forked_process_steps_on(executor: Any) -> None:
    optimizer = optimizer_for(executor)
    params = model(1)
    bound = optimizer.bind(params)
    bound.step(model(2))
    if executor == "auto":
        assert bound.ready()
    before = copied((params, bound.state))
    bound.step(model(3))
    want = copied((params, bound.state))
    bound.load_state(before[1])
    for key, param in params.items():
        param.copy_(before[0][key])
    pid = os.fork()
    if pid == 0:
        try:
            bound.step(model(3))
            assert_same((params, bound.state), want)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert_same((params, bound.state), before)  # the child has stepped a copy


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_process_does_not_wait_for_threads_that_were_there_before() -> None:
    """Also where all numbers of a step are those of the last one, and nothing is looked at anew."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        bound = lion(0.1).using(executor="auto").bind(noise(0, 50_000))
        bound.gradients.fill_(1.0)
        for _ in range(6):
            bound.step(bound.gradients)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # it ends a child that waits for ever
            bound.step(bound.gradients)
            os._exit(0 if int(bound.state.leaves.step) == 7 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
