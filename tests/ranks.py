"""The processes of ``tests/ddp``, for tests and jobs of another folder.

A rank knows the folder of its jobs as a package, and no package above that one, so this file is
found by its path: ``harness.py`` and ``rank.py`` of each folder run it.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

HOUSE = Path(__file__).parent / "ddp"

HELD = {
    "Job": "processes",
    "Outcomes": "processes",
    "run_ranks": "processes",
    "Launched": "conftest",
    "launched": "conftest",
}
"""What a ``harness.py`` holds, and the module of ``tests/ddp`` that has it."""

MODULES = ("compared", "models", "through_memory", "torch_side", "twins")
"""The modules of ``tests/ddp`` that a ``harness.py`` holds, too."""


def house_for(folder: Path) -> Callable[[str], ModuleType]:
    """Modules of ``tests/ddp`` by name, as a copy whose ranks run the jobs of ``folder``."""
    name = f"house_of_{folder.name}"
    spec = importlib.util.spec_from_file_location(
        name, HOUSE / "__init__.py", submodule_search_locations=[str(HOUSE)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

    def module(one: str) -> ModuleType:
        return importlib.import_module(f"{name}.{one}")

    module("processes").HERE = folder  # where ranks find their rank.py
    return module


def harness_for(folder: Path) -> Callable[[str], Any]:
    """The ``__getattr__`` of a folder's ``harness.py``: what is asked of it is taken from here."""
    house = house_for(folder)

    def held(name: str) -> Any:
        if name in MODULES:
            return house(name)
        if name not in HELD:
            raise AttributeError(
                f"no harness holds {name!r}; it has {', '.join((*HELD, *MODULES))}: see {__file__}"
            )
        return getattr(house(HELD[name]), name)

    return held


def run_rank(script: str, folder: str, rank: str, ranks: str) -> None:
    """Be one rank, with the jobs beside ``script``."""
    spec = importlib.util.spec_from_file_location("house_rank", HOUSE / "rank.py")
    assert spec is not None and spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    house.__file__ = script  # the package of jobs is the folder of this file
    house.main(Path(folder), int(rank), int(ranks))
