"""Looking at very many tensors is shared among threads, and says the same."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ..choices import case
from .support import MANY, loops

pytestmark = pytest.mark.usefixtures("with_loops")

CHILD = f"""
import os, signal
import torch
from functional_optim.native import LOOPS

assert LOOPS.wait(900)
torch.set_num_threads(2)
torch.randn(1 << 20).exp()  # in two threads
loops = LOOPS.get(0)
places = torch.zeros({MANY}, 100)
there = loops.remember(list(places))
grads = list(torch.ones({MANY}, 100))
assert loops.hold(there, list(places), True)
pid = os.fork()
if pid == 0:
    signal.alarm(200)
    held = loops.hold(there, list(places), True)
    copied = loops.copy(there, grads, 2) and float(places[-1, -1]) == 1.0
    os._exit(0 if held and copied else 1)
raise SystemExit(os.waitpid(pid, 0)[1])
"""


THREADS = (1, 2, 3)


@contextmanager
def computing_in(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with case(threads=threads):
            yield
    finally:
        torch.set_num_threads(before)


def rows(flat: Tensor) -> list[Tensor]:
    return list(flat.view(MANY, -1))


def test_one_that_differs_is_seen_wherever_it_is() -> None:
    ours = rows(torch.zeros(3 * MANY))
    there, nothing = loops().remember(ours), loops().remember([])
    others = {"moved": torch.zeros(3), "short": torch.zeros(2), "nothing": None, "a number": 1.0}
    for threads, place in itertools.product(THREADS, [0, 1, MANY // 2, MANY - 1]):
        for what, one in others.items():
            with computing_in(threads), case(place=place, what=what):
                assert loops().hold(there, ours, True)
                other: list[Any] = list(ours)
                other[place] = one
                assert not loops().hold(there, other, True)
                assert loops().hold(there, other, False) == (what == "moved")
                assert loops().copy(there, other, threads) is False
                found = loops().addresses(there, other, nothing)
                assert (found is None) == (what != "moved")


def test_autograd_is_told_once_of_each() -> None:
    for threads in THREADS:
        with computing_in(threads):
            ours = [torch.zeros(2) for _ in range(MANY)]
            told = MANY - 700
            loops().bump(ours[:told])
            assert [one._version for one in ours] == [1] * told + [0] * (MANY - told)


def test_all_are_copied() -> None:
    target = torch.zeros(100 * MANY)
    grads = [torch.full((100,), float(k)) for k in range(MANY)]
    there = loops().remember(rows(target))
    for threads in THREADS:
        with computing_in(threads):
            target.zero_()
            found = loops().addresses(there, grads, loops().remember([]))
            assert found is not None
            assert memoryview(found).cast("q").tolist() == [grad.data_ptr() for grad in grads]
            assert loops().copy(there, grads, threads)
            assert torch.equal(target.view(MANY, -1), torch.stack(grads))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_whose_parent_used_threads_does_not_wait_for_them() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], check=True, timeout=900)
