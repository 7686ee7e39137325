"""All rows: the ``ROWS`` of every module ``rows_FAMILY`` and ``oracle_FAMILY``."""

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.agreement.row import Row

FOLDER = Path(__file__).parent


def modules() -> Iterator[ModuleType]:
    """Yield every module ``rows_FAMILY`` and ``oracle_FAMILY`` of this folder."""
    for file in sorted([*FOLDER.glob("rows_*.py"), *FOLDER.glob("oracle_*.py")]):
        yield importlib.import_module(f"tests.agreement.{file.stem}")


@functools.cache
def rows() -> dict[str, Row]:
    """Return every row by a name. A second row of the same pair has a number after its name."""
    found: dict[str, Row] = {}
    for module in modules():
        for row in getattr(module, "ROWS", ()):
            key = f"{row.algorithm} / {row.other}"
            count = sum(one == key or one.startswith(f"{key} (") for one in found)
            found[f"{key} ({count + 1})" if count else key] = row
    return found


def variant(name: str) -> Callable[..., Any]:
    """Return a function of the modules ``variants_FAMILY`` by its name.

    Raises:
        LookupError: no module has the function.
    """
    for file in sorted(FOLDER.glob("variants*.py")):
        module = importlib.import_module(f"tests.agreement.{file.stem}")
        if name in vars(module):
            found: Callable[..., Any] = vars(module)[name]
            return found
    raise LookupError(f"no variant is called {name!r}")


def comparisons() -> dict[str, Callable[[], float]]:
    """Return every function ``compare_NAME`` of the modules ``oracle_FAMILY``, by NAME."""
    found: dict[str, Callable[[], float]] = {}
    for module in modules():
        for name, one in vars(module).items():
            if name.startswith("compare_") and one.__module__ == module.__name__:
                found[name.removeprefix("compare_")] = one
    return found
