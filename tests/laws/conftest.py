"""Compiled steps of a test run lie in one folder, so that each is compiled once."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def compiled_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["FUNCTIONAL_OPTIM_CACHE"] = str(Path(shared) / "compiled_steps")
