"""Gathering in several threads costs the rest of the process nothing."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
import threading
import time

import torch

torch.set_num_threads(2)

from functional_optim import sgd
from functional_optim.native import LOOPS

def threads():
    return set(os.listdir("/proc/self/task"))

def more_threads():
    params = [torch.zeros(128, 256) for _ in range(64)]
    bound = sgd(0.1).using(executor="blocked").bind(params)
    bound.step(bound.gradients)  # the helpers of the main thread are there
    before = threads()
    bound.step([torch.ones(128, 256) for _ in params])
    assert all(bool((param == -0.1).all()) for param in params)
    made = threads() - before
    seen = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    until = time.monotonic() + 120.0
    # One that has ended may be there for a moment.
    while threads() - before and time.monotonic() < until:
        time.sleep(0.01)
    return len(made), len(threads() - before), torch.get_num_threads(), *seen

assert LOOPS.get(0) is not None
print(more_threads())
LOOPS.forget()
os.environ["FUNCTIONAL_OPTIM_LOOPS"] = "0"
assert LOOPS.get(0) is None
print(more_threads())
"""


@pytest.mark.usefixtures("with_loops")
def test_no_thread_is_made_for_copying() -> None:
    """By the loops or by torch: it is done by the threads that torch computes with, no more."""
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250, check=False
    )
    assert made.returncode == 0, made.stderr
    # Threads that are there behind the step, and later; those of torch, here and in other threads.
    assert made.stdout.splitlines() == ["(0, 0, 2, 2)"] * 2
