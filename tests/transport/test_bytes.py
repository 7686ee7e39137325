"""Test that reduce_scatter and all_gather together send as many bytes as an all-reduce."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.choices import case

from .bytes_worker import NUMEL

ALONE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def alone() -> list[str]:
    """Return a prefix that gives a command its own network, or nothing if that is not allowed.

    Without the prefix the counters include the traffic of other processes. The minimum of several
    tries reduces this error.
    """
    if not (shutil.which("unshare") and shutil.which("ip")):
        return []
    tried = subprocess.run([*ALONE, "true"], capture_output=True, check=False)
    return ALONE if tried.returncode == 0 else []


def counted() -> list[dict[str, Any]]:
    finished = subprocess.run(
        [*alone(), sys.executable, "-m", "tests.transport.bytes_worker"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert finished.returncode == 0, finished.stderr
    found: list[dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_bytes_of_an_all_reduce() -> None:
    """Ranks that share memory count the same bytes, but send almost none through the network."""
    runs = counted()
    assert [(one["ranks"], one["memory"]) for one in runs] == [
        (2, "0"),
        (2, "1"),
        (4, "0"),
        (4, "1"),
    ]
    for one in runs:
        formula = 2 * (one["ranks"] - 1) * NUMEL * 4
        with case(**one):
            assert one["counter"] == formula
            if one["memory"] == "0":
                assert one["exchange"] == pytest.approx(formula, rel=0.02)
                assert one["exchange"] <= 1.02 * one["all_reduce"]
            else:
                assert one["exchange"] <= 0.01 * one["all_reduce"]
