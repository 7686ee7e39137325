"""The two operations together send an all-reduce's bytes: counted at the network interface."""

import functools
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

WORKER = "tests.transport.bytes_worker"
ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
NUMEL = 8 * 1024 * 1024


@functools.cache
def alone() -> list[str]:
    """A prefix for commands: a network of their own, where this machine allows it.

    Otherwise the counters also see what others send; the least of several tries is then taken.
    """
    if not (shutil.which("unshare") and shutil.which("ip")):
        return []
    tried = subprocess.run([*ALONE, "true"], capture_output=True, check=False)
    return ALONE if tried.returncode == 0 else []


def counted(ranks: int, memory: str) -> Any:
    search = os.pathsep.join(path for path in sys.path if path)
    finished = subprocess.run(
        [*alone(), sys.executable, "-m", WORKER, str(ranks)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env={
            **os.environ,
            "PYTHONPATH": search,
            "PYTHONSAFEPATH": "1",
            "FUNCTIONAL_OPTIM_SHARED_MEMORY": memory,
        },
    )
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout.splitlines()[-1])[0]
    assert seen["rank"] == 0
    return seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_an_all_reduce(ranks: int) -> None:
    seen = counted(ranks, "0")
    formula = 2 * (ranks - 1) * NUMEL * 4
    assert seen["counter"] == formula
    assert seen["exchange"] == pytest.approx(formula, rel=0.02)
    assert seen["exchange"] <= 1.02 * seen["all_reduce"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_one_host_send_nothing(ranks: int) -> None:
    """They hand over as many bytes as before, through memory."""
    seen = counted(ranks, "1")
    assert seen["counter"] == 2 * (ranks - 1) * NUMEL * 4
    assert seen["exchange"] <= 0.01 * seen["all_reduce"]
