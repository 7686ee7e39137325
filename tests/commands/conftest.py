"""Fixture of a working directory with a module of a user."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import OWN


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own", None)
