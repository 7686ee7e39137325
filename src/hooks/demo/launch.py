"""Ranks of the demo, which torchrun starts as processes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hooks.demo.result import RankResult, load
from hooks.demo.settings import RPC, Settings


class LaunchError(Exception):
    """Error for ranks that did not finish. Their own errors are above, on stderr."""


def launch(settings: Settings) -> list[RankResult]:
    """Train on ``settings.ranks`` processes, and return the result of each that trains."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # BLAS reads it before Python runs
        "PYTHONSAFEPATH": "1",  # the working directory may have another package `hooks`
    }
    trainers = 1 if settings.front_end == RPC else settings.ranks
    with tempfile.TemporaryDirectory(prefix="functional-optim-demo-") as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(settings.ranks)),
            *("-m", "hooks.demo.train"),
            *("--settings", settings.to_json(), "--results", folder),
        ]
        code = _run(command, environment)
        results = load(Path(folder))
    if code != 0 or len(results) != trainers:
        raise LaunchError(
            f"training ended early (exit code {code}, results of {len(results)} of "
            f"{trainers} ranks); the first error above says why"
        )
    return results


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command; after an interrupt, wait until torchrun has ended its ranks."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
