"""Which hyper-parameters hold for which leaf."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import optree

from functional_optim.links import Change, Links, apply
from functional_optim.tree import Path

Where = Path | Callable[[Path], bool]
"""Leaves meant: the beginning of their paths, or a predicate on paths."""

Override = tuple[Where, tuple[Change, ...]]


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


@lru_cache(maxsize=64)
def paths_of(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    """The paths of a tree's leaves."""
    return tuple(spec.paths())
