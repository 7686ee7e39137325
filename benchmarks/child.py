"""Process of one part of the benchmark, named in JSON on standard input.

The process answers with lines of JSON: ``{"progress": ...}`` while it runs, and ``{"result": ...}``
at the end.
"""

import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")


ANSWERS = os.fdopen(os.dup(1), "w")


def _say(**line: Any) -> None:
    ANSWERS.write(json.dumps(line) + "\n")
    ANSWERS.flush()


def _tell(what: str) -> None:
    _say(progress=what)


def cpu_name() -> str:
    """Return the name of the processor."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Return the versions and devices that the figures depend on."""
    torch = importlib.import_module("torch")
    cuda = torch.cuda.is_available()
    return {
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if cuda else "",
        "no_gpu": "" if cuda else f"torch {torch.__version__} sees no CUDA device on this machine",
        "no_memory": importlib.import_module("benchmarks.memory").missing(),
    }


def _cell(**given: Any) -> Any:
    return asdict(importlib.import_module("benchmarks.cell").run_cell(**given, tell=_tell))


def _memory(**given: Any) -> Any:
    found = importlib.import_module("benchmarks.memory").run_memory(**given, tell=_tell)
    return [asdict(one) for one in found]


def _threads(**given: Any) -> Any:
    return asdict(importlib.import_module("benchmarks.threads").run_threads(**given))


def _ready(**given: Any) -> Any:
    return importlib.import_module("benchmarks.ready").run_ready(**given)


def _convergence(**given: Any) -> Any:
    module = importlib.import_module("benchmarks.convergence")
    return asdict(module.run_convergence(**given, tell=_tell))


def _sharded(**given: Any) -> Any:
    module = importlib.import_module("benchmarks.sharded_parts")
    return asdict(module.run_sharded(**given, tell=_tell))


def _sharded_peak(**given: Any) -> Any:
    module = importlib.import_module("benchmarks.sharded_parts")
    return asdict(module.run_peak(**given, tell=_tell))


def _sharded_saving(**given: Any) -> Any:
    module = importlib.import_module("benchmarks.sharded_parts")
    return asdict(module.run_saving(**given, tell=_tell))


def _balance(**given: Any) -> Any:
    found = importlib.import_module("benchmarks.sharded_balance").run_balance(**given)
    return [asdict(one) for one in found]


def _averaging_sent(**given: Any) -> Any:
    found = importlib.import_module("benchmarks.averaging_sent").run_sent(**given, tell=_tell)
    return {**found, "sent": [asdict(one) for one in found.get("sent", [])]}


def _averaging_races(**given: Any) -> Any:
    found = importlib.import_module("benchmarks.averaging_race").run_races(**given, tell=_tell)
    return {**found, "races": [asdict(one) for one in found.get("races", [])]}


def _remote(**given: Any) -> Any:
    found = importlib.import_module("benchmarks.remote_run").run_remote(**given, tell=_tell)
    return [asdict(one) for one in found]


PARTS: dict[str, Callable[..., Any]] = {
    "machine": machine,
    "cell": _cell,
    "memory": _memory,
    "threads": _threads,
    "ready": _ready,
    "convergence": _convergence,
    "sharded": _sharded,
    "sharded peak": _sharded_peak,
    "sharded saving": _sharded_saving,
    "balance": _balance,
    "averaging sent": _averaging_sent,
    "averaging races": _averaging_races,
    "remote": _remote,
}


if __name__ == "__main__":
    os.dup2(2, 1)  # libraries must not print between the answers
    order = json.load(sys.stdin)
    _say(result=PARTS[order["part"]](**order["given"]))
