"""Table of checks: what is relied on of each private part of torch, and torch without it.

Each check is run with torch as it is, and again with the name hidden: then it holds as well, by
what is done instead, or there is another check, of the error.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

Check = Callable[[Any], None]


class Row(NamedTuple):
    """A private name, or several that are used together."""

    names: tuple[tuple[Any, str], ...]
    """Whose it is, and what it is called. Where its owner is only told of, as a string, the check
    alone finds out whether it is there, and it is not hidden."""
    holds: Check
    """Raises where what the package ``_torch`` has is not as it is relied on."""
    refuses: Check | None
    """Calls what raises an ImportError, where the name is hidden; None: ``holds`` holds."""


ROWS: dict[str, Row] = {}


def row(*names: tuple[Any, str], refuses: Check | None = None) -> Callable[[Check], Check]:
    """Enter a check into the table, under its own name."""

    def entered(holds: Check) -> Check:
        assert holds.__name__ not in ROWS
        ROWS[holds.__name__] = Row(names, holds, refuses)
        return holds

    return entered


def hide(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """Let torch have no such name, as far as this project looks."""
    if isinstance(owner, type):
        patch.setattr(owner, name, None)  # it may be a base's, or a builtin class's
    else:
        patch.delattr(owner, name)


@contextmanager
def loaded_anew() -> Iterator[ModuleType]:
    """The package ``_torch``, with the names that torch has now."""
    package = "functional_optim._torch"
    ours = {name: one for name, one in sys.modules.items() if f"{name}.".startswith(f"{package}.")}
    for name in ours:
        del sys.modules[name]
    try:
        yield importlib.import_module(package)
    finally:
        for name in [one for one in sys.modules if f"{one}.".startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules.update(ours)
        sys.modules["functional_optim"]._torch = ours[package]  # type: ignore[attr-defined]


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have one dtype and the same values, counting NaN as equal."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
