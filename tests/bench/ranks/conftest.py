"""Fixture for shared ranks: they start with compiled loops, because other tests use them too."""

import pytest


@pytest.fixture(autouse=True)
def compiled_little() -> None:
    """Override the parent folder's fixture: the shared ranks keep their compiled loops."""
