"""Objects that a command line names as ``package.module:name``."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import functional_optim
from functional_optim import Optimizer, algorithms, as_functional_optim
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.format import format_value
from functional_optim.frontends.torch_arguments import is_optimizer_class

FORM = "package.module:name"


def load_object(source: str) -> Any:
    """Return the object with the name ``package.module:name``.

    The module is imported as ``python -m`` would import it: the current folder comes first in the
    search path while this function runs.

    Args:
        source: the name; the part after the colon may have dots.

    Raises:
        ValueError: the text has another form, or the module has no such name.
        ImportError: the module cannot be imported.
    """
    module_name, _, name = source.partition(":")
    if not module_name or not name:
        raise ValueError(f"must have the form {FORM}, got {source!r}")
    with current_folder_first():
        found: Any = import_module(module_name)
        for part in name.split("."):
            if not hasattr(found, part):
                raise ValueError(f"{module_name!r} has no {name!r}")
            found = getattr(found, part)
    return found


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Import modules of the current folder while the ``with`` block runs, and not after it."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def optimizer_factory(source: str) -> Callable[..., Optimizer]:
    """Return a function that builds the optimizer with this name.

    Args:
        source: the name of an algorithm (``adamw``), or ``package.module:name`` of an Optimizer, of
            a
            function that returns an Optimizer, or of a registered ``torch.optim.Optimizer`` class.

    Returns:
        A function of keyword arguments. For an Optimizer, it takes no arguments.

    Raises:
        ValueError: the name is unknown, or the object is not one of these.
        ImportError: the module cannot be imported.
    """
    if source in algorithms.__all__:
        found: Any = getattr(functional_optim, source)
    elif ":" in source:
        found = load_object(source)
    else:
        raise ValueError(
            f"must be {FORM} or one of {', '.join(algorithms.__all__)}, got {source!r}"
        )
    refuse_closure(found, "a command of functional-optim")
    if isinstance(found, type) and not is_optimizer_class(found):
        kind = format_value(found)
        raise ValueError(f"{source!r} must be a function or an Optimizer, it is {kind}")
    if not isinstance(found, Optimizer) and not callable(found):
        raise ValueError(f"{source!r} must be callable, it is {format_value(found)}")

    def build(**options: Any) -> Optimizer:
        if isinstance(found, Optimizer):
            if options:
                raise TypeError(
                    f"{source!r} is an Optimizer and takes no options, got {', '.join(options)}; "
                    "name a function that returns it"
                )
            return found
        made = (
            as_functional_optim(found, **options) if is_optimizer_class(found) else found(**options)
        )
        refuse_closure(made, "a command of functional-optim")
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"{source!r} must return a functional_optim.Optimizer, such as adamw(lr=1e-3), got "
                f"{format_value(made)}"
            )
        return made

    return build


def parse_options(texts: Iterable[str]) -> Mapping[str, list[Any]]:
    """Return the values of each keyword argument, from texts of the form ``key=value``.

    A value is a Python literal (``0.1``, ``(0.9, 0.99)``, ``None``); anything else is a string. A
    repeated key has several values.

    Raises:
        ValueError: a text without a key.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.isidentifier():
            raise ValueError(f"must have the form key=value, such as lr=0.1, got {text!r}")
        found.setdefault(key, []).append(_literal(value))
    return found


def single_values(options: Iterable[str]) -> dict[str, Any]:
    """Return keyword arguments from texts of the form ``key=value``.

    Raises:
        ValueError: a repeated key, or a text of another form.
    """
    values = parse_options(options)
    for key, several in values.items():
        if len(several) > 1:
            raise ValueError(f"{key} is given {len(several)} times; give it once")
    return {key: one for key, (one,) in values.items()}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
