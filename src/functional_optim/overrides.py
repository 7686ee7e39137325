"""Which hyper-parameters hold for which leaf."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import optree

from functional_optim.brief import brief
from functional_optim.compiling import remembered
from functional_optim.hyper import shown
from functional_optim.links import Change, Links, apply
from functional_optim.tree import Path, path_name

if TYPE_CHECKING:
    from functional_optim.optimizer import Optimizer

Where = Path | Callable[[Path], bool]
"""Leaves meant: the beginning of their paths, or a predicate on paths."""

Override = tuple[Where, tuple[Change, ...]]

_SHOWN = 8
"""How many paths an error names."""


@dataclass(frozen=True)
class IfAny:
    """Leaves meant, of which there may be none. Made by :func:`if_any`."""

    where: Where

    def __call__(self, path: Path) -> bool:
        return applies(self.where, path)


def if_any(where: Where) -> IfAny:
    """The same leaves for ``override``, where it is no mistake that there are none.

    Without it, an override that is meant for no leaf of a tree is refused, since its name may be
    misspelt. With it, one optimizer serves trees of which some have such leaves and some have not:
    the parts of a model, say, or the parameters that each rank owns.

    Args:
        where: as for :meth:`~functional_optim.Optimizer.override`.

    Returns:
        A predicate on paths.

    Raises:
        TypeError: ``where`` is neither a tuple nor a function.

    Example::

        >>> import torch
        >>> from functional_optim import if_any, sgd
        >>> optimizer = sgd(0.1).override(if_any(("head",)), lr=0.2)
        >>> states = [optimizer.init({name: torch.ones(2)}) for name in ("body", "head")]
        >>> optimizer.hypers_at(("head",))[-1].lr
        0.2
    """
    check_where(where)
    return where if isinstance(where, IfAny) else IfAny(where)


def tolerant(optimizer: "Optimizer") -> "Optimizer":
    """The same optimizer, for trees in which its overrides may be meant for no leaf."""
    overrides = tuple((if_any(where), changes) for where, changes in optimizer.overrides)
    return replace(optimizer, overrides=overrides) if overrides else optimizer


def check_where(where: Any) -> None:
    """Make sure that it can be meant for leaves: a list, or a name, would equal no path.

    Raises:
        TypeError: it is neither a tuple nor a function.
    """
    if not (isinstance(where, tuple) or callable(where)):
        raise TypeError(
            "where must be a tuple of keys, such as ('layer', 0), or a function of a path, "
            f"got {brief(where)}"
        )


def check_used(overrides: Sequence[Override], paths: Sequence[Path]) -> None:
    """Make sure that each override is meant for some leaf: a name that is misspelt is not silent.

    Args:
        overrides: of an optimizer; those of :func:`if_any` may be meant for none.
        paths: of all leaves of a tree.

    Raises:
        ValueError: names the override, and paths that there are.
    """
    for where, changes in overrides:
        if isinstance(where, IfAny) or any(applies(where, path) for path in paths):
            continue
        values = ", ".join(f"{name}={shown(value)}" for _, name, value in changes)
        there = ", ".join(repr(path_name(path)) for path in paths[:_SHOWN]) or "none"
        if len(paths) > _SHOWN:
            there += f" and {len(paths) - _SHOWN} more"
        raise ValueError(
            f"override({_written(where)}, {values}) is meant for no parameter; there are {there}: "
            "correct it; or, where there may be none (such as in a part of the parameters), write "
            "override(functional_optim.if_any(where), ...)"
        )


def _written(where: Where) -> str:
    """A tuple of keys, or a predicate by its name and where it was written."""
    if isinstance(where, tuple):
        return repr(where)
    code = getattr(where, "__code__", None)
    name = getattr(where, "__qualname__", None) or repr(where)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def applies(where: Where, path: Path) -> bool:
    """Whether an override is meant for the leaf at ``path``."""
    return where(path) if callable(where) else path[: len(where)] == where


def hypers_at(links: Links, overrides: Sequence[Override], path: Path) -> tuple[Any, ...]:
    """The Hyper of each stage that holds for the leaf at ``path``; later overrides win."""
    for where, changes in overrides:
        if applies(where, path):
            links = apply(links, changes)
    return tuple(link.hyper for link in links)


def hypers_of(
    links: Links, overrides: Sequence[Override], spec: optree.PyTreeSpec
) -> list[tuple[Any, ...]]:
    """The same for every leaf of a tree; leaves that share hyper-parameters share one tuple."""
    if not overrides:
        return [tuple(link.hyper for link in links)] * spec.num_leaves
    shared: dict[tuple[bool, ...], tuple[Any, ...]] = {}
    hypers = []
    for path in paths_of(spec):
        key = tuple(applies(where, path) for where, _ in overrides)
        if key not in shared:
            shared[key] = hypers_at(links, overrides, path)
        hypers.append(shared[key])
    return hypers


@remembered(64)
def paths_of(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    """The paths of a tree's leaves."""
    return tuple(spec.paths())
