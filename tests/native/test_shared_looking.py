"""Looking at very many tensors is shared among threads, and says the same."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim.native import LOOPS, Loops

MANY = 5000
"""More than one thread looks at."""

pytestmark = pytest.mark.usefixtures("with_loops")

CHILD = f"""
import os, signal
import torch
from functional_optim.native import LOOPS

assert LOOPS.wait(100)
torch.set_num_threads(2)
torch.randn(1 << 20).exp()  # in two threads
loops = LOOPS.get(0)
places = torch.zeros({MANY}, 100)
there = loops.remember(list(places))
grads = list(torch.ones({MANY}, 100))
assert loops.hold(there, list(places), True, 0)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    held = loops.hold(there, list(places), True, {MANY})
    copied = loops.copy(there, grads, 2) and float(places[-1, -1]) == 1.0
    os._exit(0 if held and copied else 1)
raise SystemExit(os.waitpid(pid, 0)[1])
"""


def loops() -> Loops:
    found = LOOPS.get(0)
    assert found is not None
    return found


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows(flat: Tensor) -> list[Tensor]:
    return list(flat.view(MANY, -1))


@pytest.mark.parametrize("place", [0, 1, MANY // 2, MANY - 1])
def test_one_that_differs_is_seen_wherever_it_is(place: int, threads: int) -> None:
    ours = rows(torch.zeros(3 * MANY))
    there = loops().remember(ours)
    assert loops().hold(there, ours, True, 0)
    others: dict[str, Any] = {
        "moved": torch.zeros(3),
        "short": torch.zeros(2),
        "nothing": None,
        "a number": 1.0,
    }
    for what, one in others.items():
        other: list[Any] = list(ours)
        other[place] = one
        assert not loops().hold(there, other, True, 0)
        assert loops().hold(there, other, False, 0) == (what == "moved")
        assert loops().copy(there, other, threads) is False
        found = loops().addresses(there, other, loops().remember([]))
        assert (found is None) == (what != "moved")
    assert loops().hold(there, ours, True, 0)


def test_autograd_is_told_once_of_each(threads: int) -> None:
    ours = [torch.zeros(2) for _ in range(MANY)]
    there = loops().remember(ours)
    told = MANY - 700
    assert loops().hold(there, ours, True, told)
    assert [one._version for one in ours] == [1] * told + [0] * (MANY - told)


def test_all_are_copied(threads: int) -> None:
    target = torch.zeros(100 * MANY)
    grads = [torch.full((100,), float(k)) for k in range(MANY)]
    there = loops().remember(rows(target))
    found = loops().addresses(there, grads, loops().remember([]))
    assert found is not None
    assert memoryview(found).cast("q").tolist() == [grad.data_ptr() for grad in grads]
    assert loops().copy(there, grads, threads)
    assert torch.equal(target.view(MANY, -1), torch.stack(grads))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_whose_parent_used_threads_does_not_wait_for_them() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], check=True, timeout=150)
