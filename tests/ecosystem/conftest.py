"""Settings of the libraries: no network, and quick collections of garbage."""

import gc
import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick() -> None:
    """Exempt the objects of earlier tests: Trainer collects garbage several times in each run."""
    gc.collect()
    gc.freeze()
