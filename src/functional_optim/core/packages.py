"""Check that a file of the user does not hide a package of this distribution.

Python imports the first module of a name on its search path. So a ``hooks.py`` or ``sharding.py``
in the folder of a script hides the package of that name.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2]
"""Folder in which the packages are installed."""


def require_package(name: str) -> None:
    """Raise ImportError if another module hides the package ``"sharding"`` or ``"hooks"``.

    Nothing is imported. Names of other distributions are not checked.
    """
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else getattr(module, "__spec__", None)
    found = _locations(spec, getattr(module, "__file__", None))
    own = FOLDER / name
    if not found or not own.is_dir() or own in [one.resolve() for one in found]:
        return
    raise ImportError(
        f"{found[0]} hides the package {name!r} of functional-optim, which is installed in "
        f"{own}: Python finds your {name!r} first. Rename it, or move it into a package "
        f"of your own. If it is in the folder of your script, `python -P script.py` leaves that "
        f"folder out of the search path",
        name=name,
        path=str(found[0]),
    )


def _locations(spec: object, file: str | None) -> list[Path]:
    """Return the folders of a package, or the file of a module; an empty list if neither exists."""
    folders = getattr(spec, "submodule_search_locations", None)
    origin = getattr(spec, "origin", None) or file
    return [Path(one) for one in folders or ([origin] if origin else [])]
