"""Table of checks: how this project uses each private part of torch, and what happens without it.

Each check runs with torch as it is, and again with the name hidden. With the name hidden, the same
check passes through a fallback, or a second check expects an error.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import functional_optim

Check = Callable[[Any], None]


class Row(NamedTuple):
    """Private name, or several that are used together."""

    names: tuple[tuple[Any, str], ...]
    """Owner and name of each. An owner given as a string is not hidden; only the check uses it."""
    holds: Check
    """Check that raises if the part in the package ``_torch`` does not behave as expected."""
    refuses: Check | None
    """Call that raises an ImportError if the name is hidden, or None if ``holds`` passes then."""


ROWS: dict[str, Row] = {}


def row(*names: tuple[Any, str], refuses: Check | None = None) -> Callable[[Check], Check]:
    """Return a decorator that adds a check to the table under the name of its function."""

    def entered(holds: Check) -> Check:
        assert holds.__name__ not in ROWS
        ROWS[holds.__name__] = Row(names, holds, refuses)
        return holds

    return entered


def hide(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """Hide a name of torch from this project."""
    if isinstance(owner, type):
        patch.setattr(owner, name, None)  # the name may belong to a base or a builtin class
    else:
        patch.delattr(owner, name)


HOME = Path(functional_optim.__file__).parent / "_torch"


def all_names() -> SimpleNamespace:
    """Return the public names of all modules of the package ``_torch``."""
    files = [file.stem for file in sorted(HOME.glob("[a-z]*.py"))]
    modules = [importlib.import_module(f"functional_optim._torch.{name}") for name in files]
    named = [item for module in modules for item in vars(module).items()]
    return SimpleNamespace(**{name: value for name, value in named if not name.startswith("_")})


@contextmanager
def loaded_anew() -> Iterator[SimpleNamespace]:
    """Yield the names of new imports of the modules of ``_torch``, which see torch as it is now."""
    package = "functional_optim._torch"
    ours = {name: one for name, one in sys.modules.items() if f"{name}.".startswith(f"{package}.")}
    for name in ours:
        del sys.modules[name]
    try:
        yield all_names()
    finally:
        for name in [one for one in sys.modules if f"{one}.".startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules.update(ours)
        sys.modules["functional_optim"]._torch = ours[package]  # type: ignore[attr-defined]


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have one dtype and the same values, counting NaN as equal."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
