"""Links as calls of the public constructors that build them: parts of an optimizer's ``repr``."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from functional_optim.core.constructor import CONSTRUCTORS, name_constructor
from functional_optim.core.hyper import INHERITED, frozen, shown

LR = "lr"
"""The hyper-parameter that stages share in a chain."""


_Parameters = Mapping[str, inspect.Parameter]


def spell_optimizer(links: Sequence[Any]) -> str | None:
    """Return the call of a constructor that builds these links, or None if there is none.

    Args:
        links: all links of the optimizer, in the order in which they run.
    """
    values = _values(links)
    for function, names in _signatures(optimizers=True, having=values):
        text = _text_of(
            function, names, values, lambda built: _all_alike(built.links, links), flags=False
        )
        if text is not None:
            return text
    for function, names in _signatures(optimizers=True, having=values):
        text = _text_of(function, names, values, lambda built: _all_alike(built.links, links))
        if text is not None:
            return text
    return None


def name_constructor_of(links: Sequence[Any], error: Exception) -> None:
    """Let an error about a hyper-parameter begin with the constructor that builds these links.

    The stages inside have names of their own, such as the ``adam`` of ``adamw``. The error is left
    as it is while torch.compile traces, which cannot read the signatures of the constructors.
    """
    text = None if torch.compiler.is_compiling() else spell_optimizer(links)
    if text is not None:
        name_constructor(text.partition("(")[0], error)


def spell_link(link: Any, lr: Any = INHERITED) -> str:
    """Return an expression of one link.

    Args:
        link: a stage with its hyper-parameters, whichever parameters it acts on.
        lr: the ``lr`` that the chain gives to a link without one.
    """
    every = _values([link])
    inherits = frozen(every.get(LR, INHERITED)) in (frozen(lr), INHERITED)
    values = {name: value for name, value in every.items() if value is not INHERITED}
    without = {name: value for name, value in values.items() if name != LR}
    text = None
    for function, names in _signatures(optimizers=False, having=without):
        if LR in names or inherits:
            own = values if LR in names else without
            text = text or _text_of(function, names, own, lambda built: _alike(built, link, lr))
    if values.keys() == every.keys():
        for function, names in _signatures(optimizers=True, having=values):
            text = text or _member_of(function, names, values, link)
    given = without if inherits else values
    return text or f"{link.stage.name}({', '.join(keywords(given))})"


def _text_of(
    function: Callable[..., Any],
    names: _Parameters,
    values: dict[str, Any],
    is_right: Callable[[Any], bool],
    *,
    flags: bool = True,
) -> str | None:
    """The call whose result is right, if there is one.

    Args:
        function: the constructor.
        names: its parameters.
        values: its arguments.
        is_right: judges what it builds.
        flags: also try flags that are no hyper-parameters, since they choose a stage.
    """
    for given in _calls(names, values, flags=flags):
        built = _built(function, given)
        if built is not None and is_right(built):
            return _text(function, names, given)
    return None


def _member_of(
    function: Callable[..., Any], names: _Parameters, values: dict[str, Any], link: Any
) -> str | None:
    """A link as one of the links of an optimizer."""
    built = _built(function, values)
    for place, one in enumerate(() if built is None else built.links):
        if _alike(one, link):
            number = -1 if place == len(built.links) - 1 else place
            return f"{_text(function, names, values)}.links[{number}]"
    return None


def format_stage(link: Any) -> str:
    """Return the name of a link's stage, and its values: not always a call that builds the link."""
    return f"{link.stage.name}({', '.join(keywords(link.hyper._asdict()))})"


def keywords(values: Mapping[str, Any]) -> list[str]:
    """Return values by name, as in a call. A name with a dot is no keyword."""
    return [
        f"{name}={shown(value)}" if name.isidentifier() else f"**{{{name!r}: {shown(value)}}}"
        for name, value in values.items()
    ]


def _values(links: Sequence[Any]) -> dict[str, Any]:
    """The hyper-parameters of links by name; the last link that has a name gives the value."""
    return {name: value for link in links for name, value in link.hyper._asdict().items()}


def _all_alike(built: Sequence[Any], links: Sequence[Any]) -> bool:
    return len(built) == len(links) and all(map(_alike, built, links))


def _alike(built: Any, link: Any, lr: Any = None) -> bool:
    """Return True if two links are equal; ``lr`` stands for one that is inherited."""
    pairs = zip(built.hyper, link.hyper, strict=False)
    return built.stage == link.stage and all(
        frozen(lr if one is INHERITED and lr is not None else one) == frozen(other)
        for one, other in pairs
    )


def _signatures(
    *, optimizers: bool, having: Mapping[str, Any]
) -> Iterator[tuple[Callable[..., Any], _Parameters]]:
    """The constructors of one kind that take these hyper-parameters, and their signatures."""
    for function in CONSTRUCTORS:
        if hasattr(function, "__wrapped__") == optimizers:
            names = _parameters(function)
            if having.keys() <= names.keys():
                yield function, names


@lru_cache(256)
def _parameters(function: Callable[..., Any]) -> _Parameters:
    return inspect.signature(function).parameters


def _calls(names: _Parameters, values: dict[str, Any], *, flags: bool) -> Iterator[dict[str, Any]]:
    """The call with these values, and those that turn flags which are not among the values."""
    free = [
        name for name, one in names.items() if isinstance(one.default, bool) and name not in values
    ]
    for chosen in itertools.product((False, True), repeat=len(free) if flags else 0):
        turned = itertools.compress(free, chosen)
        yield {**values, **{name: not names[name].default for name in turned}}


def _built(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    try:
        return function(**given)
    except (TypeError, ValueError):
        return None


def _text(function: Callable[..., Any], names: _Parameters, given: Mapping[str, Any]) -> str:
    ordered = {name: given[name] for name in names if name in given}
    return f"{function.__name__}({', '.join(keywords(ordered))})"
