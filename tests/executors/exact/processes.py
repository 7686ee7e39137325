"""Other processes that step, and compilers that note what they are asked for."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

SCRIPT = textwrap.dedent(
    """
    import hashlib, json, sys, warnings
    import torch
    from functional_optim import lion

    executor, count = sys.argv[1], int(sys.argv[2])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = lion(0.1).using(executor=executor)
        param = torch.linspace(-1, 1, count)
        bound = optimizer.bind({"w": param})
        for step in range(3):
            bound.step({"w": torch.linspace(-2, 1, count) * (step + 1)})
        other = lion(0.1, weight_decay=0.3).using(executor=executor)
        state = other.init(param)
        for step in range(3):
            other.update_(param, torch.linspace(-3, 1, count), state)
    print(json.dumps({
        "digest": hashlib.sha256(param.numpy().tobytes()).hexdigest(),
        "explained": bound.explain(),
        "imported": "torch._inductor" in sys.modules,
        "warnings": [f"{one.category.__name__}: {one.message}" for one in seen],
    }))
    """
)
"""Steps of two chains."""


def noting_compiler(folder: Path, *, seconds: float = 0.0) -> tuple[Path, Path]:
    """A compiler as ``CXX`` names it, and the file in which it notes each compilation.

    Args:
        folder: where both are made.
        seconds: for which it waits first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script, log = folder / "noting-g++", folder / "compilations"
    script.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            case " $* " in *" -o "*) echo "$$" >> '{log}'; sleep {seconds} ;; esac
            exec {shutil.which("g++")} "$@"
            """
        )
    )
    script.chmod(0o755)
    log.touch()
    return script, log


def compilations(log: Path) -> int:
    """How many were noted."""
    return len(log.read_text().split())


def started(executor: str, count: int, **environment: str) -> "subprocess.Popen[str]":
    """A process that makes steps."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, executor, str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What it found."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(output)
    return found
