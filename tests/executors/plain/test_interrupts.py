"""Ctrl-C at every point of a step: the step is complete, or changes nothing.

The process sends itself a real interrupt, before an operation of torch or at a line of the package.
"""

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functional_optim
from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.core.interrupts import defer_interrupts

from ...choices import case, pairs
from ..support import Tree, assert_same, noise, same_bits, tensors

HOME = str(Path(functional_optim.__file__).parent)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class AtOperation(TorchDispatchMode):
    """Interrupt before one operation of torch; counts all operations."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.seen = place, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        if self.seen == self.place:
            interrupt()
        return function(*args, **(kwargs or {}))


class AtLine:
    """Interrupt at one line of the package; counts all lines except those of ``with``.

    Python traces a ``with`` line again when its block ends, and lets no interrupt through there. An
    interrupt raised at that point would leave the block without its exit.
    """

    def __init__(self, place: int) -> None:
        self.place, self.seen = place, 0

    def __enter__(self) -> Self:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(HOME) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not text.lstrip().startswith("with "):
            self.seen += 1
            if self.seen == self.place:
                interrupt()
        return self._line


class Case(NamedTuple):
    step: Callable[[Tree], Any]
    seen: Callable[[], list[Tensor]]
    """Function that returns copies of parameters, state, and step counts."""


def params() -> Tree:
    return {"a": noise(1, 3, 5), "b": noise(2, 7), "c": noise(3)}


def grads(step: int) -> Tree:
    return {key: noise(10 * step + k, *one.shape) for k, (key, one) in enumerate(params().items())}


def copies(*trees: Any) -> list[Tensor]:
    return [one.detach().clone() for one in tensors(*trees)]


def in_place(optimizer: Optimizer) -> Case:
    given = params()
    state = optimizer.init(given)
    return Case(lambda one: optimizer.update_(given, one, state), lambda: copies(given, state))


def bound(optimizer: Optimizer) -> Case:
    given = params()
    made = optimizer.bind(given)
    return Case(made.step, lambda: copies(given, made.state))


def front(optimizer: Optimizer) -> Case:
    given = [torch.nn.Parameter(one) for one in params().values()]
    made = TorchOptimizer(given, optimizer)

    def step(one: Tree) -> None:
        for param, grad in zip(given, one.values(), strict=True):
            param.grad = grad
        made.step()

    return Case(step, lambda: copies(given, [[*made.state[one].values()] for one in given]))


WAYS: dict[str, Callable[[Optimizer], Case]] = {
    "update_": in_place,
    "bound": bound,
    "TorchOptimizer": front,
}
CHAINS = {
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9)),
}


def places(make: Callable[[], Case], where: Callable[[int], Any], most: int) -> list[int]:
    """Return evenly spread places of the second step, with the first and the last."""
    tried = make()
    tried.step(grads(1))
    with where(0) as counted:
        tried.step(grads(2))
    every = range(1, counted.seen + 1)
    return sorted({*every[:: max(1, len(every) // most)], 1, counted.seen})


def check(make: Callable[[], Case], where: Callable[[int], Any], most: int) -> None:
    """Require that an interrupted step is complete or not made, and that later steps work."""
    plain = make()
    plain.step(grads(1))
    before = plain.seen()
    plain.step(grads(2))
    after = plain.seen()
    plain.step(grads(3))
    last = plain.seen()
    found = set()
    for place in places(make, where, most):
        tried = make()
        tried.step(grads(1))
        with pytest.raises(KeyboardInterrupt), where(place):
            tried.step(grads(2))
        got = tried.seen()
        made = all(map(same_bits, got, after))
        assert made or all(map(same_bits, got, before)), f"place {place}: half a step"
        found.add(made)
        if not made:
            tried.step(grads(2))
        tried.step(grads(3))
        assert all(map(same_bits, tried.seen(), last)), f"place {place}: the next step"
    # No operation of torch follows a step in C++.
    assert True in found or where is AtOperation


def test_a_step_in_place_is_whole_or_not_made(executors: Any) -> None:
    for one in pairs(way=WAYS, executor=executors, where=[AtOperation, AtLine]):
        name = "clipped" if one["executor"] == "blocked" else "adamw"
        optimizer = CHAINS[name].using(executor=one["executor"])
        with case(**one):
            check(lambda o=optimizer, w=one["way"]: WAYS[w](o), one["where"], 10)


def test_the_pure_step_changes_nothing(executors: Any) -> None:
    for one in pairs(executor=executors, where=[AtLine, AtOperation]):
        optimizer = adamw(0.1).using(executor=one["executor"])
        given, state = optimizer.update(params(), grads(1), optimizer.init(params()))
        kept = copies(given, state)
        want = optimizer.update(given, grads(2), state)
        with one["where"](0) as counted:  # counts with warm caches
            optimizer.update(given, grads(2), state)
        for place in {*range(1, counted.seen, max(1, counted.seen // 12)), counted.seen}:
            with case(**one, place=place):
                with pytest.raises(KeyboardInterrupt), one["where"](place):
                    optimizer.update(given, grads(2), state)
                assert all(map(same_bits, copies(given, state), kept))
        assert_same(optimizer.update(given, grads(2), state), want)


def test_a_second_interrupt_breaks_in() -> None:
    lines = []

    def hangs() -> None:
        interrupt()
        lines.append("held back")
        interrupt()
        lines.append("never")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        defer_interrupts(hangs)
    assert lines == ["held back"]
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_the_caller_stay_and_are_called() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        own = signal.getsignal(signal.SIGINT)

        def outer() -> str:
            defer_interrupts(interrupt)
            assert called == []
            return "done"

        assert defer_interrupts(outer) == "done"
        assert called == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert defer_interrupts(lambda: signal.getsignal(signal.SIGINT)) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_is_raised_as_it_is_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        defer_interrupts(lambda: 1 // 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_other_threads_it_is_the_plain_call() -> None:
    found: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(
        target=lambda: found.append(defer_interrupts(lambda: signal.getsignal(signal.SIGINT)))
    )
    thread.start()
    thread.join()
    assert found == [before]
