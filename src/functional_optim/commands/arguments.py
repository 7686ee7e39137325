"""Arguments of commands that name a user's code."""

from collections.abc import Callable
from typing import TypeVar

import click

from functional_optim import algorithms

T = TypeVar("T")


def complete_algorithm(ctx: click.Context, param: click.Parameter, begin: str) -> list[str]:
    """Return the names of algorithms with this prefix, for shell completion."""
    return [name for name in algorithms.__all__ if name.startswith(begin)]


def checked_argument(name: str, source: str | None, build: Callable[[], T]) -> T:
    """Call ``build``, and report its errors as errors of the command-line argument ``name``.

    The message starts with ``source``, the value of the argument, unless that is None. ``build``
    may
    run a user's code, which may raise any error.

    Raises:
        click.BadParameter: the function raised an Exception.
    """
    try:
        return build()
    except Exception as error:
        plain = isinstance(error, (ValueError, OSError))
        text = str(error) if plain else f"{type(error).__name__}: {error}"
        raise click.BadParameter(
            text if source is None else f"{source}: {text}", param_hint=name
        ) from error
