"""TorchScript in threads that step programs of one chain, or compile one chain."""

import dataclasses
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from functional_optim import Optimizer, chain, clip_by_global_norm, rmsprop

from ..support import assert_same, noise, steps

THREADS, STEPS = 4, 20
ROUNDS = 4
"""Number of chains that all threads compile, so that threads meet in the compiler sometimes."""


def tensors_of(step: int) -> list[Tensor]:
    return [noise(10 * step, 3, 2), noise(10 * step + 1, 4), noise(10 * step + 2, 2).mul(1 + 1j)]


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    """Make threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], Any]) -> None:
    """Run ``work(index)`` in threads that start together, and raise the first error."""
    barrier, errors = threading.Barrier(THREADS), []

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except Exception as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_programs_of_one_chain_step_in_threads() -> None:
    optimizer = chain(clip_by_global_norm(1.0), rmsprop(0.1, momentum=0.9, centered=True))
    wanted, _ = steps(optimizer, tensors_of(0), lambda index: tensors_of(index + 1), STEPS)
    results = [tensors_of(0) for _ in range(THREADS)]
    programs = [optimizer.script(params) for params in results]

    def work(index: int) -> None:
        for step in range(STEPS):
            programs[index].step(tensors_of(step + 1))

    in_threads(work)
    for params in results:
        assert_same(params, wanted)


_numbers = itertools.count()


def new_chain() -> Optimizer:
    """Return a chain that was not scripted before, because its rule has a new name."""
    *before, last = rmsprop(0.1, momentum=0.9, centered=True).links
    stage = dataclasses.replace(last.stage, name=f"rmsprop_{next(_numbers)}")
    return chain(*before, last._replace(stage=stage))


def step_program(optimizer: Optimizer, params: list[Tensor]) -> None:
    optimizer.script(params).step(tensors_of(1))


def test_a_chain_is_compiled_by_several_threads_at_once() -> None:
    """The workers of one process compile the same program when they make their first optimizers."""
    for _ in range(ROUNDS):
        optimizer = new_chain()
        results = [tensors_of(0) for _ in range(THREADS)]
        in_threads(lambda i, o=optimizer, r=results: step_program(o, r[i]))
        wanted, _ = steps(optimizer, tensors_of(0), lambda _: tensors_of(1), 1)
        for params in results:
            assert_same(params, wanted)
