"""Several real processes for one test: started together, killed when the time is up."""

import os
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"


def run_ranks(
    script: str, world_size: int, meeting: Path, *, timeout_s: float = 900.0
) -> list[str]:
    """Run ``script rank world_size meeting`` once per rank; every rank has to succeed.

    Args:
        script: a file of this folder. Warnings are errors in it.
        meeting: a file that does not exist yet, through which the ranks find one another (so that
            no port is chosen here).
        timeout_s: for all ranks together; whoever is left then is killed.

    Returns:
        What each rank wrote to its standard output.
    """
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE),
        "TP_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name(script))]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(meeting)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    outputs: list[str] = []
    problems: list[str] = []
    try:
        for rank, process in enumerate(started):
            try:
                out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                problems.append(f"rank {rank} was still running after {timeout_s} s\n{err}")
            else:
                if process.returncode != 0:
                    problems.append(f"rank {rank} ended with {process.returncode}\n{err}")
            outputs.append(out)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert not problems, "\n".join(problems)
    return outputs
