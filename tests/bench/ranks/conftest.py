"""Ranks that other tests use, too, are started as those tests want them: with loops."""

import pytest


@pytest.fixture(autouse=True)
def compiled_little() -> None:
    """Change nothing: no process is started for these tests alone."""
