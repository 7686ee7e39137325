"""Short texts of values and names for error messages."""

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

MAX_LENGTH = 160
"""Maximum number of characters of a formatted value."""


def format_value(value: Any) -> str:
    """Return a text of at most :data:`MAX_LENGTH` characters.

    Args:
        value: any object. A function gives its name, a tensor or a module a description, and any
            other object its ``repr`` in one line, which may be cut.

    Example::

        >>> import torch
        >>> format_value(torch.ones(3, 2)), format_value(max), format_value("x" * 1000)[-10:]
        ('a tensor of shape (3, 2), torch.float32', 'the function max', 'x... (str)')
    """
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} module"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__qualname__', value)}"
    text = " ".join(repr(value).split())
    end = f"... ({type(value).__name__})"
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - len(end)] + end


def format_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and the number of all others.

    Example::

        >>> format_names(["a", "b", "c"], most=2)
        "'a', 'b' and 1 more"
    """
    return append_count(", ".join(map(repr, names[:most])), len(names) - most)


def closest_name(word: str, names: Sequence[str]) -> str | None:
    """Return the name that is closest to a misspelt or abbreviated word; None without names.

    Example::

        >>> names = ["betas", "eps", "lr", "weight_decay"]
        >>> [closest_name(word, names) for word in ("wd", "learning_rate", "beta")]
        ['weight_decay', 'lr', 'betas']
    """
    for name in names:
        if word == _initials(name) or name == _initials(word):
            return name
    return next(iter(get_close_matches(word, names, n=1, cutoff=0.0)), None)


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_"))


def append_count(text: str, count: int) -> str:
    """Append " and {count} more" to a text if the count is positive."""
    return f"{text} and {count} more" if count > 0 else text


def function_name(function: Any) -> str:
    """Return the ``__name__`` of a function, or :func:`format_value` of any other callable.

    Example::

        >>> from functools import partial
        >>> function_name(lambda step: 0.1), function_name(partial(max, 1))
        ('<lambda>', 'functools.partial(<built-in function max>, 1)')
    """
    return str(getattr(function, "__name__", None) or format_value(function))
