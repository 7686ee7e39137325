"""Gathering in several threads costs the rest of the process nothing."""

import subprocess
import sys

PROGRAM = """
import os
import threading
import time

import torch

torch.set_num_threads(2)

from functional_optim import sgd

params = [torch.zeros(128, 256) for _ in range(64)]
bound = sgd(0.1).using(executor="blocked").bind(params)
bound.step(bound.gradients)  # the helpers of the main thread are there
before = len(os.listdir("/proc/self/task"))
bound.step([torch.ones(128, 256) for _ in params])
assert all(bool((param == -0.1).all()) for param in params)
seen = []
other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
other.start()
other.join()
more = len(os.listdir("/proc/self/task")) - before
until = time.monotonic() + 10.0
while more > 1 and time.monotonic() < until:  # one that has ended may be there for a moment
    time.sleep(0.01)
    more = len(os.listdir("/proc/self/task")) - before
print(more, torch.get_num_threads(), *seen)
"""


def test_the_copying_thread_has_no_helpers() -> None:
    """With some, OpenMP has more threads than processors, and all of them sleep between calls."""
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.split() == ["1", "2", "2"]  # more threads, threads of torch, and of others
