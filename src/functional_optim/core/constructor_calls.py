"""Calls of public constructors that build given links, for the ``repr`` of optimizers."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from functional_optim.core.constructor import CONSTRUCTORS, prefix_error
from functional_optim.core.hyper import INHERITED, format_hyper, hash_key

LR = "lr"
"""The hyper-parameter that links of a chain can inherit."""

_Parameters = Mapping[str, inspect.Parameter]


def format_optimizer(links: Sequence[Any]) -> str | None:
    """Return the constructor call that builds these links of an optimizer, or None."""
    values = _values(links)
    for flags in (False, True):
        for function, names in _signatures(optimizers=True, having=values):
            text = _find_call(
                function, names, values, lambda built: _are_equal(built.links, links), flags=flags
            )
            if text is not None:
                return text
    return None


def prefix_links_error(links: Sequence[Any], error: Exception) -> None:
    """Start an error about a hyper-parameter with the name of the constructor of these links.

    While torch.compile traces, signatures cannot be read, and errors are not changed.
    """
    text = None if torch.compiler.is_compiling() else format_optimizer(links)
    if text is not None:
        prefix_error(text.partition("(")[0], error)


def format_link(link: Any, lr: Any = INHERITED) -> str:
    """Return an expression that builds a link, without its ``where`` and label.

    The chain gives ``lr`` to a link that inherits its learning rate.
    """
    every = _values([link])
    inherits = hash_key(every.get(LR, INHERITED)) in (hash_key(lr), INHERITED)
    values = {name: value for name, value in every.items() if value is not INHERITED}
    without = {name: value for name, value in values.items() if name != LR}
    text = None
    for function, names in _signatures(optimizers=False, having=without):
        if LR in names or inherits:
            own = values if LR in names else without
            text = text or _find_call(function, names, own, lambda made: _is_equal(made, link, lr))
    if values.keys() == every.keys():
        for function, names in _signatures(optimizers=True, having=values):
            text = text or _find_member(function, names, values, link)
    given = without if inherits else values
    return text or f"{link.stage.name}({', '.join(keywords(given))})"


def _find_call(
    function: Callable[..., Any],
    names: _Parameters,
    values: dict[str, Any],
    is_right: Callable[[Any], bool],
    *,
    flags: bool = True,
) -> str | None:
    """Return a call whose result satisfies ``is_right``, or None.

    With ``flags``, other values of flags that are not in ``values`` are also tried.
    """
    for arguments in _argument_sets(names, values, flags=flags):
        built = _try_call(function, arguments)
        if built is not None and is_right(built):
            return _format_call(function, names, arguments)
    return None


def _find_member(
    function: Callable[..., Any], names: _Parameters, values: dict[str, Any], link: Any
) -> str | None:
    """Return an expression of a link as an element of an optimizer's links, or None."""
    built = _try_call(function, values)
    for index, one in enumerate(() if built is None else built.links):
        if _is_equal(one, link):
            number = -1 if index == len(built.links) - 1 else index
            return f"{_format_call(function, names, values)}.links[{number}]"
    return None


def format_stage(link: Any) -> str:
    """Return the name of a link's stage with its values, which is not always a valid call."""
    return f"{link.stage.name}({', '.join(keywords(link.hyper._asdict()))})"


def keywords(values: Mapping[str, Any]) -> list[str]:
    """Format values as keyword arguments; names with dots as ``**{name: value}``."""
    return [
        f"{name}={format_hyper(value)}"
        if name.isidentifier()
        else f"**{{{name!r}: {format_hyper(value)}}}"
        for name, value in values.items()
    ]


def _values(links: Sequence[Any]) -> dict[str, Any]:
    """Return the hyper-parameters of links by name; the last value of each name wins."""
    return {name: value for link in links for name, value in link.hyper._asdict().items()}


def _are_equal(built: Sequence[Any], links: Sequence[Any]) -> bool:
    return len(built) == len(links) and all(map(_is_equal, built, links))


def _is_equal(built: Any, link: Any, lr: Any = None) -> bool:
    """Return True if two links are equal, with ``lr`` in place of an inherited one."""
    pairs = zip(built.hyper, link.hyper, strict=False)
    return built.stage == link.stage and all(
        hash_key(lr if one is INHERITED and lr is not None else one) == hash_key(other)
        for one, other in pairs
    )


def _signatures(
    *, optimizers: bool, having: Mapping[str, Any]
) -> Iterator[tuple[Callable[..., Any], _Parameters]]:
    """Yield constructors of optimizers or links with these parameters, and their signatures."""
    for function in CONSTRUCTORS:
        if hasattr(function, "__wrapped__") == optimizers:
            names = _parameters(function)
            if having.keys() <= names.keys():
                yield function, names


@lru_cache(256)
def _parameters(function: Callable[..., Any]) -> _Parameters:
    return inspect.signature(function).parameters


def _argument_sets(
    names: _Parameters, values: dict[str, Any], *, flags: bool
) -> Iterator[dict[str, Any]]:
    """Yield the values, and if ``flags``, also the values with inverted defaults of other flags."""
    free = [
        name for name, one in names.items() if isinstance(one.default, bool) and name not in values
    ]
    for chosen in itertools.product((False, True), repeat=len(free) if flags else 0):
        inverted = itertools.compress(free, chosen)
        yield {**values, **{name: not names[name].default for name in inverted}}


def _try_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except (TypeError, ValueError):
        return None


def _format_call(
    function: Callable[..., Any], names: _Parameters, arguments: Mapping[str, Any]
) -> str:
    ordered = {name: arguments[name] for name in names if name in arguments}
    return f"{function.__name__}({', '.join(keywords(ordered))})"
