"""Ctrl-C at every place of a step: all of it is made, or nothing (fault 27).

The interrupt is a real one, sent by the process to itself: before each operation of torch, and at
each line of the package, that a step comes to.
"""

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functional_optim
from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.unbroken import unbroken

from .support import noise, same_bits, tensors

HOME = str(Path(functional_optim.__file__).parent)
EXECUTORS = ("reference", "blocked", "script", "compile", "fused", "auto")
Tree = dict[str, Tensor]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class AtOperation(TorchDispatchMode):
    """Sends the interrupt before one operation; counts them all."""

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
    """Sends the interrupt at one line of the package; counts them all."""

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
        if event == "line":
            self.seen += 1
            if self.seen == self.place:
                interrupt()
        return self._line


class Case(NamedTuple):
    step: Callable[[Tree], Any]
    seen: Callable[[], list[Tensor]]
    """Copies of parameters, state and step counts."""


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


def program(optimizer: Optimizer) -> Case:
    given = params()
    made = optimizer.script(given)
    return Case(
        lambda one: made.step([one[key] for key in sorted(one)]),
        lambda: copies(given, made.state),
    )


def front(optimizer: Optimizer, *, flat: bool = False) -> Case:
    given = [torch.nn.Parameter(one) for one in params().values()]
    made = TorchOptimizer(given, optimizer, flat=flat)

    def step(one: Tree) -> None:
        for param, grad in zip(given, one.values(), strict=True):
            param.grad = grad
        made.step()

    return Case(step, lambda: copies(given, [[*made.state[one].values()] for one in given]))


def flat(optimizer: Optimizer) -> Case:
    return front(optimizer, flat=True)


WAYS: dict[str, Callable[[Optimizer], Case]] = {
    "update_": in_place,
    "bound": bound,
    "TorchOptimizer": front,
    "TorchOptimizer, flat": flat,
}
CHAINS = {
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_global_norm(1.0), sgd(0.1, momentum=0.9)),
}
TABLE = [
    *((way, executor, "adamw") for way in WAYS for executor in EXECUTORS),
    *((way, "blocked", "clipped") for way in WAYS),
]


def places(make: Callable[[], Case], where: Callable[[int], Any], most: int) -> list[int]:
    """The places of the second step: all, or so many of them, spread evenly, and both ends."""
    case = make()
    case.step(grads(1))
    with where(0) as counted:
        case.step(grads(2))
    every = range(1, counted.seen + 1)
    return sorted({*every[:: max(1, len(every) // most)], 1, counted.seen})


def check(make: Callable[[], Case], where: Callable[[int], Any], most: int = 40) -> None:
    """A step interrupted at each place is whole or not made, and the next one goes on."""
    plain = make()
    plain.step(grads(1))
    before = plain.seen()
    plain.step(grads(2))
    after = plain.seen()
    plain.step(grads(3))
    last = plain.seen()
    found = set()
    for place in places(make, where, most):
        case = make()
        case.step(grads(1))
        with pytest.raises(KeyboardInterrupt), where(place):
            case.step(grads(2))
        got = case.seen()
        made = all(map(same_bits, got, after))
        assert made or all(map(same_bits, got, before)), f"place {place}: half a step"
        found.add(made)
        if not made:
            case.step(grads(2))
        case.step(grads(3))
        assert all(map(same_bits, case.seen(), last)), f"place {place}: the next step"
    # Of a step in C++, no operation of torch follows.
    assert True in found or where is AtOperation


@pytest.mark.parametrize(("way", "executor", "name"), TABLE)
def test_at_every_operation(way: str, executor: Any, name: str) -> None:
    """(fault 27)"""
    check(lambda: WAYS[way](CHAINS[name].using(executor=executor)), AtOperation, 1000)


@pytest.mark.parametrize(("way", "executor", "name"), TABLE)
def test_at_every_line(way: str, executor: Any, name: str) -> None:
    """(fault 27)"""
    check(lambda: WAYS[way](CHAINS[name].using(executor=executor)), AtLine)


@pytest.mark.parametrize("where", [AtOperation, AtLine])
def test_a_program(where: Any) -> None:
    """(fault 27)"""
    check(lambda: program(adamw(0.1)), where)


PURE = [(executor, AtLine) for executor in EXECUTORS]
# A script comes to no line of Python between its operations, and so to no interrupt.
PURE += [(executor, AtOperation) for executor in EXECUTORS if executor != "script"]


@pytest.mark.parametrize(("executor", "where"), PURE)
def test_the_pure_step_changes_nothing(executor: Any, where: Any) -> None:
    """(fault 27)"""
    optimizer = adamw(0.1).using(executor=executor)
    given, state = params(), optimizer.init(params())
    given, state = optimizer.update(given, grads(1), state)
    kept = copies(given, state)
    want = optimizer.update(given, grads(2), state)
    with where(0) as counted:  # as often as it comes once all is remembered that can be
        optimizer.update(given, grads(2), state)
    for place in {*range(1, counted.seen, max(1, counted.seen // 25)), counted.seen}:
        with pytest.raises(KeyboardInterrupt), where(place):
            optimizer.update(given, grads(2), state)
        assert all(map(same_bits, copies(given, state), kept))
    again = optimizer.update(given, grads(2), state)
    assert all(map(same_bits, optree.tree_leaves(again), optree.tree_leaves(want)))


def test_a_second_interrupt_breaks_in() -> None:
    """(fault 27)"""
    lines = []

    def hangs() -> None:
        interrupt()
        lines.append("held back")
        interrupt()
        lines.append("never")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        unbroken(hangs)
    assert lines == ["held back"]
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_the_caller_stay_and_are_called() -> None:
    """(fault 27)"""
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        own = signal.getsignal(signal.SIGINT)

        def outer() -> str:
            unbroken(interrupt)
            assert called == []
            return "done"

        assert unbroken(outer) == "done"
        assert called == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert unbroken(lambda: signal.getsignal(signal.SIGINT)) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_is_raised_as_it_is_and_handlers_are_put_back() -> None:
    """(fault 27)"""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        unbroken(lambda: 1 // 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_other_threads_it_is_the_plain_call() -> None:
    """(fault 27)"""
    found: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(
        target=lambda: found.append(unbroken(lambda: signal.getsignal(signal.SIGINT)))
    )
    thread.start()
    thread.join()
    assert found == [before]
