"""The harness of ``tests/ddp``, a copy of its modules for this folder's jobs."""

import importlib
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
HOUSE = HERE.parent / "ddp"
NAME = f"house_of_{HERE.name}"


def _load() -> None:
    spec = importlib.util.spec_from_file_location(
        NAME, HOUSE / "__init__.py", submodule_search_locations=[str(HOUSE)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


_load()
_processes = importlib.import_module(f"{NAME}.processes")
_processes.HERE = HERE  # ranks are started from here: see rank.py
Job = _processes.Job
Outcomes = _processes.Outcomes
run_ranks = _processes.run_ranks
Launched = importlib.import_module(f"{NAME}.conftest").Launched
launched = importlib.import_module(f"{NAME}.conftest").launched
