"""What all tests share: one folder of what is compiled, and two ways of looking at many tensors.

No example of Hypothesis has a deadline, here or in any folder: how long one takes says how busy the
machine is, and the first one also pays for what is compiled.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from functional_optim.native import LOOPS
from functional_optim.native.loader import SWITCH

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def compiled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled lies in one folder, so that it is compiled once, and for this run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(shared) / "compiled_steps"
    os.environ["FUNCTIONAL_OPTIM_CACHE"] = str(folder)
    return folder


@pytest.fixture
def with_loops(compiled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops in C++ look at tensors."""
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", str(compiled_folder))
    monkeypatch.delenv(SWITCH, raising=False)
    if LOOPS.get(0) is None:
        LOOPS.forget()
    assert LOOPS.wait(300)
    assert LOOPS.get(0) is not None


@pytest.fixture
def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks at tensors, however many."""
    monkeypatch.setattr(LOOPS, "_loops", None)
    monkeypatch.setattr(LOOPS, "_done", True)


@pytest.fixture(params=["with_loops", "without_loops"])
def both_ways(request: pytest.FixtureRequest) -> Any:
    """Once with the loops and once without."""
    request.getfixturevalue(request.param)
    return request.param


@pytest.fixture(autouse=True)
def grad_mode_is_restored() -> Iterator[None]:
    """No test, and nothing that it calls, leaves autograd switched off for those that follow."""
    yield
    assert torch.is_grad_enabled()
