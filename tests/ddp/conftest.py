"""One launch of processes for all tests of a file, whichever pytest process they run in."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .processes import Outcome, Outcomes

Launched = Callable[[str, Callable[[], Outcomes]], Outcomes]


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """``launched(name, launch)`` gives what ``launch()`` returned, the first time it was called.

    pytest-xdist spreads the tests of a file over processes: one of them launches, the others wait
    for what it found.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def once(name: str, launch: Callable[[], Outcomes]) -> Outcomes:
        with Path(folder, f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = Path(folder, f"{name}.outcomes")
            if not kept.exists():
                kept.write_text(json.dumps(launch()))
            return {
                job: [Outcome(*outcome) for outcome in outcomes]
                for job, outcomes in json.loads(kept.read_text()).items()
            }

    return once
