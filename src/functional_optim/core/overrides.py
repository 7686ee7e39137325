"""Chains of leaves: the stages that act on each leaf, and their hyper-parameters."""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim.core.format import format_names
from functional_optim.core.links import FREEZE, Change, Links, apply_changes, is_gradient_rule
from functional_optim.core.selectors import HasLabel, Shape, Where, is_selected, layers_of
from functional_optim.core.stage import Stage
from functional_optim.core.tree import Path, path_name

Override = tuple[Where, tuple[Change, ...]]


HYPERS = attrgetter("hypers")
"""Return the hyper-parameters of a chain or a group, without a Python frame."""


class LeafChain(NamedTuple):
    """Stages and hyper-parameters of a leaf. Leaves with equal chains share one object."""

    places: tuple[int, ...]
    """The indices of the stages among the links of the optimizer."""
    stages: tuple[Stage, ...]
    hypers: tuple[Any, ...]


def shape_of(leaf: Any) -> Shape:
    """Return the shape of a parameter, or (0,) for None, which is never stepped."""
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else (0,)


def chain_at(
    links: Links, overrides: Sequence[Override], path: Path, shape: Shape | None = None
) -> LeafChain:
    """Return the chain of the leaf at ``path``, which is empty for a frozen leaf."""
    for where, changes in overrides:
        if is_selected(where, path, shape):
            links = apply_changes(links, changes)
    places = [
        k
        for k, link in enumerate(links)
        if link.where is None or is_selected(link.where, path, shape)
    ]
    if any(links[k].stage.name == FREEZE for k in places):
        places = []
    elif not any(is_gradient_rule(links[k].stage) for k in places):
        why = _unknown_label(links, path, shape) or (
            "every one that does is for other parameters; give it one, or freeze() it"
        )
        raise ValueError(
            f"no rule acts on the gradient of the parameter at {path_name(path)!r}: {why}"
        )
    return _chain_of(links, places)


def _unknown_label(links: Links, path: Path, shape: Shape | None) -> str | None:
    """Return an error text if a partition has no part with the label of a leaf, else None."""
    known: dict[int, tuple[Any, list[str]]] = {}
    asked = dict[int, None]()
    for link in links:
        labels = [one for one in layers_of(link.where) if isinstance(one, HasLabel)]
        for one in labels:
            known.setdefault(id(one.label_of), (one.label_of, []))[1].append(one.label)
        outside = [id(one.label_of) for one in labels if not one.selects(path, shape)]
        asked.update(dict.fromkeys(outside[:1]))  # the outermost part that the leaf is not in
    for key in asked:
        label_of, parts = known[key]
        label = label_of(path, shape)
        if label not in parts:
            return (
                f"its label is {label!r}, and the partition has parts for "
                f"{format_names(list(dict.fromkeys(parts)))}; correct the label, or add a part "
                "with it: an optimizer or freeze()"
            )
    return None


def _chain_of(links: Links, places: Sequence[int]) -> LeafChain:
    own = [links[k] for k in places]
    return LeafChain(
        tuple(places), tuple(one.stage for one in own), tuple(one.hyper for one in own)
    )


def chains_of(
    links: Links,
    overrides: Sequence[Override],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
) -> list[LeafChain]:
    """Return the chain of every leaf of a tree; leaves with equal chains share one object."""
    if not overrides and all([link.where is None for link in links]):  # noqa: C419  is traced
        return [_chain_of(links, range(len(links)))] * spec.num_leaves
    return chains_at(links, overrides, paths_of(spec), leaves)


def chains_at(
    links: Links, overrides: Sequence[Override], paths: Sequence[Path], leaves: Sequence[Any]
) -> list[LeafChain]:
    """Return the chains of leaves: one object for leaves that the same selectors select."""
    every = [where for where, _ in overrides] + [link.where for link in links]
    wheres = list({id(where): where for where in every if where is not None}.values())
    shared: dict[tuple[bool, ...], LeafChain] = {}
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf is None:
            found.append(NO_CHAIN)
            continue
        shape = shape_of(leaf)
        key = tuple([is_selected(where, path, shape) for where in wheres])
        if key not in shared:
            shared[key] = chain_at(links, overrides, path, shape)
        found.append(shared[key])
    return found


NO_CHAIN = LeafChain((), (), ())
"""The chain of a leaf that is None."""


def paths_of(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    """Return the paths of a tree's leaves. Traced code cannot call a cache."""
    return tuple(spec.paths()) if torch.compiler.is_compiling() else _cached_paths(spec)


@lru_cache(64)
def _cached_paths(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    return tuple(spec.paths())
