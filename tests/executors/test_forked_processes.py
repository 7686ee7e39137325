"""A forked child and its parent both continue to step, even if the parent was compiling."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import adamw, lion
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.exact import kernel, program
from functional_optim.native import cache

from ..choices import case, pairs
from .exact.processes import waiting_compiler
from .exact.support import assert_equal, assert_steps_are_equal, explained
from .rules import RULES
from .support import copied, in_a_child, noise, torch_threads

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12
COUNT = 40_000
"""Number of elements that several threads share."""


def require_stepped_on(optimizer: Any, *, bound: bool) -> None:
    """Require that a step of a child and then a step of its parent give the same result."""
    params, grad = [noise(0, COUNT)], [noise(1, COUNT)]
    state = optimizer.init(params)
    held = optimizer.bind(params) if bound else None

    def step() -> None:
        if held is None:
            optimizer.update_(params, grad, state)
        else:
            held.step(held.gradients)

    if held is not None:
        held.gradients[0].copy_(grad[0])
    for _ in range(4):
        step()
    before = copied((params, state if held is None else held.state))
    want = optimizer.update(before[0], grad, before[1])

    def child() -> None:
        step()
        torch.set_num_threads(1)  # torch would wait for threads that the child lacks
        assert_equal((params, state if held is None else held.state), want)

    assert in_a_child(child) == 0
    assert_equal((params, state if held is None else held.state), before)
    step()
    assert_equal((params, state if held is None else held.state), want)


def test_a_forked_child_steps_on() -> None:
    """A child steps by torch's operations with one thread, or by loops, which use no threads there.

    The numbers of adamw change in each step. Those of lion do not, so one call serves many steps.
    """
    torch_s = pairs(executor=["reference", "blocked"], bound=[True, False])
    for one in torch_s:
        with case(**one), torch_threads(1):
            require_stepped_on(adamw(0.1).using(executor=one["executor"]), bound=one["bound"])
    for one in pairs(executor=["compiled", "auto"], make=[adamw, lion], bound=[True, False]):
        with case(**one), torch_threads(2):
            optimizer = one["make"](0.1).using(executor=one["executor"])
            require_stepped_on(optimizer, bound=one["bound"])


def test_a_child_compiles_that_was_forked_while_another_thread_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child does not wait for the compiling thread, which exists only in the parent."""
    compiler, began, go = waiting_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_LOADED", {})
    monkeypatch.setattr(kernel, "_PROGRAMS", Cache())
    monkeypatch.setattr(program, "_FOUND", [])
    optimizer = RULES["rotate"].using(executor="compiled")
    other = threading.Thread(target=lambda: explained(optimizer, noise(0, COUNT)))
    other.start()
    began.wait()

    def child() -> None:
        go.touch()
        swap = RULES["swap"]
        assert_steps_are_equal(swap, noise(0, 300), lambda step: noise(step + 1, 300))

    code = in_a_child(child)
    other.join()
    assert code == 0
