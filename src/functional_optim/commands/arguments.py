"""Arguments of commands that name what a user wrote."""

from collections.abc import Callable
from typing import TypeVar

import click

from functional_optim import algorithms

T = TypeVar("T")


def complete_algorithm(ctx: click.Context, param: click.Parameter, begin: str) -> list[str]:
    """Return the algorithms whose names begin with a text, for the shell's completion."""
    return [name for name in algorithms.__all__ if name.startswith(begin)]


def checked_argument(name: str, source: str | None, build: Callable[[], T]) -> T:
    """Return what a function returns; its errors become those of a command-line argument.

    Args:
        name: of the argument, for the message.
        source: its value, for the message; None if the error shows it.
        build: the function. It may run a user's code, which may raise anything.

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
