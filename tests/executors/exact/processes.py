"""Child processes that make steps, and compilers that record what they compile."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

import functional_optim.testing.compiled_executor  # noqa: F401  adds the executor "compiled"
from functional_optim import lion
from functional_optim.native.private_folder import SOURCE

ROOT = Path(__file__).parents[3]
CHAINS = 2
"""Number of chains that are stepped."""


def stepped(executor: Any, count: int) -> dict[str, Any]:
    """Step two chains in this process; return their bits, explanation, and warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        param = torch.linspace(-1, 1, count)
        bound = lion(0.1).using(executor=executor).bind({"w": param})
        for step in range(3):
            bound.step({"w": torch.linspace(-2, 1, count) * (step + 1)})
        other = lion(0.1, weight_decay=0.3).using(executor=executor)
        state = other.init(param)
        for _ in range(3):
            other.update_(param, torch.linspace(-3, 1, count), state)
    return {
        "digest": hashlib.sha256(param.numpy().tobytes()).hexdigest(),
        "explained": bound.explain(),
        "imported": "torch._inductor" in sys.modules,
        "warnings": [f"{one.category.__name__}: {one.message}" for one in seen],
    }


class Began(NamedTuple):
    """File that exists once a compiler has begun."""

    file: Path

    def wait(self, seconds: float = 240.0) -> None:
        """Wait until the file exists."""
        until = time.monotonic() + seconds
        while not self.file.exists():
            assert time.monotonic() < until, "no compiler has begun"
            threading.Event().wait(0.01)


def compiler(folder: Path, first: str) -> Path:
    """Return a command for ``CXX``: g++ that runs ``first`` before it compiles."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "slow-g++"
    script.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            case " $* " in *" -o "*) {first} ;; esac
            exec {shutil.which("g++")} "$@"
            """
        )
    )
    script.chmod(0o755)
    return script


def noting_compiler(folder: Path, *, after: str = "true") -> tuple[Path, Path]:
    """Return a compiler, and the file in which it records what it compiles.

    Args:
        folder: the folder in which both are created.
        after: a shell command, which the compiler repeats until the command succeeds.
    """
    log = folder / "compilations"
    made = compiler(folder, f"cksum < {SOURCE} >> '{log}'; until {after}; do sleep 0.02; done")
    log.touch()
    return made, log


def waiting_compiler(folder: Path) -> tuple[Path, Began, Path]:
    """Return a compiler, the file that it creates at its start, and the file that it waits for."""
    began, go = folder / "began", folder / "go"
    made = compiler(folder, f"touch '{began}'; until [ -e '{go}' ]; do sleep 0.02; done")
    return made, Began(began), go


def compilations(log: Path) -> list[str]:
    """Return the recorded compilations: one line for each, equal for equal texts."""
    return log.read_text().splitlines()


def started(executor: str, count: int, **environment: str) -> "subprocess.Popen[str]":
    """Start a process that makes these steps."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", __name__, executor, str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
    )


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the result that a process prints; the process must succeed."""
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(output)
    return found


if __name__ == "__main__":
    if "STEPS" in os.environ:  # one file per running process
        (Path(os.environ["STEPS"]) / str(os.getpid())).touch()
    sys.stdout.write(json.dumps(stepped(sys.argv[1], int(sys.argv[2]))))
