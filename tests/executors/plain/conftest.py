"""Fixtures for tests that compile nothing and start no process."""

import math
import sys
from typing import Any

import pytest
import torch

from functional_optim.native import cache
from functional_optim.native.cache import Build


@pytest.fixture(autouse=True)
def nothing_is_compiled(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an AssertionError if a test compiles something."""
    script = torch.jit.script

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("something was to be compiled: such a test belongs elsewhere")

    def scripted(*given: Any, **more: Any) -> Any:
        """Script functions for torch itself, but refuse calls from this package."""
        if sys._getframe(1).f_globals["__name__"].startswith("functional_optim"):
            refused()
        return script(*given, **more)

    monkeypatch.setattr(
        "functional_optim.kernels.exact.kernel.WORTH_COMPILING", math.inf
    )  # the exact kernel could replace the reference
    monkeypatch.setattr(cache, "library", refused)
    monkeypatch.setattr(Build, "start", refused)
    monkeypatch.setattr(torch.jit, "script", scripted)
    monkeypatch.setattr(torch, "compile", refused)


@pytest.fixture
def near_borders(near_borders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the sizes of chunks and blocks, but compile nothing."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", math.inf)


@pytest.fixture
def executors(near_borders: None) -> tuple[str, ...]:
    """Return the names of the exact executors that compile nothing."""
    return "reference", "blocked"
