"""A compiler that does as it is told, and a process that knows of no compiled step."""

import contextlib
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.executors import compiled, compiler
from functional_optim.executors.compile_request import Request, entry_files
from functional_optim.executors.compiler import Compiler

from .rules import RULES
from .support import noise

OPTIMIZER = RULES["swap"]
COUNT = 1 << 15
"""Elements for which auto asks for a compiled step."""

FAKE = textwrap.dedent(
    """
    import json, os, shutil, subprocess, sys, time
    mode, ready = sys.argv[1], sys.argv[2]
    for line in sys.stdin:
        folder = json.loads(line)[4]
        name = os.path.join(folder, [f for f in os.listdir(folder) if f.endswith(".lock")][0][:-5])
        os.makedirs(name + "-left", exist_ok=True)
        error = None
        if mode == "error":
            error = "CppCompileError: no such header"
        elif mode == "exit":
            sys.exit(3)
        elif mode == "hang":
            child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
            with open(os.path.join(os.path.dirname(folder), "child"), "w") as file:
                file.write(str(child.pid))
            time.sleep(300)
        elif mode == "slow":
            time.sleep(1.0)
        if mode in ("copy", "slow"):
            for suffix in (".so", ".json"):
                shutil.copy(os.path.join(ready, os.path.basename(name) + suffix), folder)
        elif mode == "half":
            shutil.copy(os.path.join(ready, os.path.basename(name) + ".so"), folder)
        print(json.dumps({"error": error}), flush=True)
    """
)
"""A compiling process that does what it is told, and compiles nothing."""


def params() -> Tensor:
    return noise(0, COUNT)


def request_of(optimizer: Optimizer) -> Request:
    """What the compiler is asked for."""
    state = optimizer.init(params())
    hypers = tuple(link.hyper for link in optimizer.links)
    lane = compiled.Leaf(params(), params(), state.leaves.stages, hypers, "w", hypers, 1.0)
    return compiled.request_for(optimizer.stages, lane)


def files(folder: Path) -> tuple[Path, Path]:
    return entry_files(folder, request_of(OPTIMIZER).key, "cpu")


def fresh_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Compiler]:
    made = Compiler()
    monkeypatch.setattr(compiler, "COMPILER", made)
    monkeypatch.setattr(compiled, "COMPILER", made)
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(folder))
    yield made
    made._stop()


def stepped(executor: Any, count: int = 3) -> Any:
    optimizer, param = OPTIMIZER.using(executor=executor), params()
    state = optimizer.init(param)
    for step in range(count):
        optimizer.update_(param, noise(step + 1, COUNT), state)
    return param, state


def require_right(got: Any) -> None:
    """Within a few units in the last place of what the reference makes."""
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(WANT), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


WANT = stepped("reference")


@contextlib.contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Exactly one warning, a RuntimeWarning, from this very thread."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [one.category for one in seen] == [RuntimeWarning], [str(one.message) for one in seen]
    assert match in str(seen[0].message)


def finish(made: Compiler) -> None:
    """Wait for the background."""
    for job in list(made._jobs.values()):
        assert job.done.wait(60)


def until(condition: Callable[[], Any]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def require_ended(pid: int) -> None:
    """A process that is gone, or that nobody has waited for yet."""

    def ended() -> bool:
        try:
            return ") Z " in Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return True

    until(ended)
