"""Stand-in for a name that torch no longer has, and its error."""

from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import torch


class Missing(NamedTuple):
    """Stands for a function that this torch lacks: it can be called, and then raises."""

    name: str
    use: str
    """What cannot be done without it."""
    instead: str
    """What can be done instead."""

    @property
    def why(self) -> str:
        """The sentence for an error."""
        return (
            f"torch {torch.__version__} has no {self.name}, and without it {self.use}: "
            f"{self.instead}, or install torch 2.13, which has it"
        )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ImportError(self.why)


def why_missing(*functions: Any) -> str | None:
    """Return why one of these functions cannot be called; None if all can."""
    return next((one.why for one in functions if isinstance(one, Missing)), None)


def held(owner: Any, name: str, without: Missing) -> Any:
    """An attribute, where it is looked up at each use.

    Raises:
        ImportError: it is not there.
    """
    found = getattr(owner, name, None)
    return without() if found is None else found


def imported(module: str, name: str, without: Missing) -> Any:
    """A name of a module that is slow to import.

    Raises:
        ImportError: one of them is not there.
    """
    try:
        return held(import_module(module), name, without)
    except ModuleNotFoundError:
        return without()
