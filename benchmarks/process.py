"""Processes of parts: memory, compiled code and failures of a part end with its process."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 1200.0


class PartError(RuntimeError):
    """Error for a process that ends without a result. The text is the end of its output."""


def run_part(
    part: str,
    given: Mapping[str, Any],
    *,
    threads: int,
    tell: Callable[[str], object] = lambda _: None,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Any:
    """Run one part of the benchmark and return its result.

    Args:
        part: a key of ``benchmarks.child.PARTS``.
        given: its arguments.
        threads: threads inside a step.
        tell: called with each line of progress.
        environment: more environment variables.
        limit_seconds: the time limit.

    Raises:
        PartError: the process ended without a result, or took too long.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        **(environment or {}),
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.child"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        clock = threading.Timer(limit_seconds, process.kill)
        clock.start()
        try:
            results = _converse(process, {"part": part, "given": dict(given)}, tell)
        finally:
            late = clock.finished.is_set()
            clock.cancel()
            process.kill()
            process.wait()
        if results:
            return results[-1]
        errors.seek(0)
        said = errors.read().strip()[-1500:]
        why = f"took more than {limit_seconds:g} s" if late else f"ended with {process.returncode}"
        raise PartError(f"{why}: {said or 'nothing was said'}")


def _converse(
    process: subprocess.Popen[str], order: Mapping[str, Any], tell: Callable[[str], object]
) -> list[Any]:
    """Send the order, and collect the result: a list of one result, or an empty list."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # the process may have ended already
        json.dump(order, process.stdin)
    results = []
    for line in process.stdout:
        said = json.loads(line)
        if "progress" in said:
            tell(said["progress"])
        else:
            results.append(said["result"])
    process.wait()
    return results
