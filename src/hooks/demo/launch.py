"""The ranks, started by torchrun in processes of their own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hooks.demo.result import RankResult, load
from hooks.demo.settings import RPC, Settings


class LaunchError(Exception):
    """The ranks did not finish; what they said stands above, on stderr."""


def launch(settings: Settings) -> list[RankResult]:
    """Train on ``settings.ranks`` processes and return what each of those that train measured.

    Raises:
        LaunchError: a rank failed.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # BLAS reads it before Python runs
        "PYTHONSAFEPATH": "1",  # a package called `hooks` in the working directory is not ours
    }
    module, trainers = "hooks.demo.train", settings.ranks
    if settings.front_end == RPC:
        module, trainers = "hooks.demo.rpc_train", 1
    with tempfile.TemporaryDirectory(prefix="functional-optim-demo-") as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(settings.ranks)),
            *("-m", module),
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
    """Run to the end. If this process is interrupted, torchrun is given time to end its ranks."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
