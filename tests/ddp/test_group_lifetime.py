"""Groups that are destroyed right after a backward pass, while threads use them."""

import subprocess
import sys
from pathlib import Path


def test_programs_may_end_while_threads_of_gloo_are_at_work() -> None:
    """Programs can end at any moment: with groups destroyed, being freed, or left."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.ddp.ending"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=1500,
        check=False,
    )
    assert (made.stdout, made.returncode) == ("done\n", 0), made.stderr[-3000:]
