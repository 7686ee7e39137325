"""Stand-in for a private name that torch no longer has, and its error."""

from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import torch


class MissingName(NamedTuple):
    """Stand-in for a function that this torch lacks. A call raises ImportError."""

    name: str
    use: str
    """What does not work without the function, for the error."""
    instead: str
    """What the user can do instead, for the error."""

    @property
    def why(self) -> str:
        """The message of the error."""
        return (
            f"torch {torch.__version__} has no {self.name}, and without it {self.use}: "
            f"{self.instead}, or install torch 2.13, which has it"
        )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ImportError(self.why)


def why_missing(*functions: Any) -> str | None:
    """Return the message of the first missing function, or None if no function is missing."""
    return next((one.why for one in functions if isinstance(one, MissingName)), None)


def get_private(owner: Any, name: str, without: MissingName) -> Any:
    """Return a private attribute, or raise the ImportError of ``without``."""
    found = getattr(owner, name, None)
    return without() if found is None else found


def import_private(module: str, name: str, without: MissingName) -> Any:
    """Import a module and return a private name, or raise the ImportError of ``without``."""
    try:
        return get_private(import_module(module), name, without)
    except ModuleNotFoundError:
        return without()
