"""Gathering in several threads costs the rest of the process nothing."""

import os
import subprocess
import sys

import pytest

from functional_optim.native.loader import SWITCH

PROGRAM = """
import os
import sys
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
# One that has ended may be there for a moment.
while more > int(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.01)
    more = len(os.listdir("/proc/self/task")) - before
print(more, torch.get_num_threads(), *seen)
"""


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.usefixtures("with_loops")
def test_the_copying_thread_has_no_helpers(loops: bool) -> None:
    """With some, OpenMP has more threads than processors, and all of them sleep between calls."""
    kept = 0 if loops else 1  # the loops' own threads end with the copying
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(kept)],
        env=os.environ | {SWITCH: str(int(loops))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    # More threads of the process; those of torch, here and in other threads.
    assert made.stdout.split() == [str(kept), "2", "2"]
