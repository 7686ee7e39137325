"""Nothing is compiled here, and no process started."""

import math
import sys
from typing import Any

import pytest
import torch

from functional_optim.native import cache
from functional_optim.native.cache import Build


@pytest.fixture(autouse=True)
def nothing_is_compiled(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever compiles all the same is told so."""
    script = torch.jit.script

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("something was to be compiled: such a test belongs elsewhere")

    def scripted(*given: Any, **more: Any) -> Any:
        """Torch has functions of its own that it scripts."""
        if sys._getframe(1).f_globals["__name__"].startswith("functional_optim"):
            refused()
        return script(*given, **more)

    monkeypatch.setattr(
        "functional_optim.kernels.exact.kernel.WORTH_COMPILING", math.inf
    )  # it stands in for the reference
    monkeypatch.setattr(cache, "library", refused)
    monkeypatch.setattr(Build, "start", refused)
    monkeypatch.setattr(torch.jit, "script", scripted)
    monkeypatch.setattr(torch, "compile", refused)


@pytest.fixture
def near_borders(near_borders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is worth compiling all the same."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", math.inf)


@pytest.fixture
def executors(near_borders: None) -> tuple[str, ...]:
    """Names of the executors that are the reference bit for bit, and compile nothing."""
    return "reference", "blocked"
