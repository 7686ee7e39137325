"""Short texts of values and names for error messages."""

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

MAX_LENGTH = 160
"""Maximum number of characters of a formatted value."""


def format_value(value: Any) -> str:
    """Return a text of at most :data:`MAX_LENGTH` characters."""
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
    """Return the first names, and the number of all others."""
    return append_count(", ".join(map(repr, names[:most])), len(names) - most)


def closest_name(word: str, names: Sequence[str]) -> str | None:
    """Return the name that is closest to a misspelt or abbreviated word; None without names."""
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
    """Return the ``__name__`` of a function, or :func:`format_value` of any other callable."""
    return str(getattr(function, "__name__", None) or format_value(function))
