"""Short texts about a caller's values, for errors, which must not print a whole model."""

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

MOST = 160
"""Characters."""


def brief(value: Any) -> str:
    """A value as an error shows it, in at most :data:`MOST` characters.

    Args:
        value: anything. A function is named, a tensor or a module is described, and everything
            else is its ``repr`` in one line, cut where it is too long.

    Example::

        >>> import torch
        >>> brief(torch.ones(3, 2)), brief(max), brief("x" * 1000)[-10:]
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
    return text if len(text) <= MOST else text[: MOST - len(end)] + end


def some(names: Sequence[str], most: int = 5) -> str:
    """Names as an error shows them, the first ones and how many more.

    Example::

        >>> some(["a", "b", "c"], most=2)
        "'a', 'b' and 1 more"
    """
    return and_more(", ".join(map(repr, names[:most])), len(names) - most)


def nearest(word: str, names: Sequence[str]) -> str | None:
    """Return the name that a misspelt or abbreviated word stands for, or None without names.

    Example::

        >>> there = ["betas", "eps", "lr", "weight_decay"]
        >>> [nearest(word, there) for word in ("wd", "learning_rate", "beta")]
        ['weight_decay', 'lr', 'betas']
    """
    for name in names:
        if word == _initials(name) or name == _initials(word):
            return name
    return next(iter(get_close_matches(word, names, n=1, cutoff=0.0)), None)


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_"))


def and_more(text: str, count: int) -> str:
    """A text, and how many more there are; nothing of them where there are none."""
    return f"{text} and {count} more" if count > 0 else text


def named(function: Any) -> str:
    """A function by its name; anything else that can be called as :func:`brief` shows it.

    Example::

        >>> from functools import partial
        >>> named(lambda made: 0.1), named(partial(max, 1))
        ('<lambda>', 'functools.partial(<built-in function max>, 1)')
    """
    return str(getattr(function, "__name__", None) or brief(function))
