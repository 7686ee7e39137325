"""What the tests of the compiler share."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from functional_optim.executors import compiler
from functional_optim.executors.compiler import Compiler

from .compiler_support import FAKE, files, fresh_compiler, stepped


@pytest.fixture(scope="session")
def ready(compiled_folder: Path) -> Path:
    """A folder that holds the compiled step."""
    stepped("compile")
    assert all(file.exists() for file in files(compiled_folder))
    return compiled_folder


@pytest.fixture
def fresh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_loops: None
) -> Iterator[Compiler]:
    """A process that knows of no compiled step, with an empty cache."""
    yield from fresh_compiler(monkeypatch, tmp_path / "cache")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, ready: Path) -> Callable[[str], list[Any]]:
    """Put a process that only seems to compile in the place of the one that does."""

    def put(mode: str) -> list[Any]:
        started: list[Any] = []

        def start() -> subprocess.Popen[str]:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", FAKE, mode, str(ready)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    process_group=0,
                )
            )
            return started[-1]

        monkeypatch.setattr(compiler, "_start", start)
        return started

    return put
