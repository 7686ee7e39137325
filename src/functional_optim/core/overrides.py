"""Chains of leaves: the stages that act on each, and their hyper-parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from functional_optim.core.compiling import remembered
from functional_optim.core.links import FREEZE, Change, Links, apply, reads_gradient
from functional_optim.core.selectors import Shape, Where, applies
from functional_optim.core.stage import Stage
from functional_optim.core.tree import Path, path_name

Override = tuple[Where, tuple[Change, ...]]


class LeafChain(NamedTuple):
    """The stages that act on a leaf. Leaves with the same stages and numbers share one object."""

    places: tuple[int, ...]
    """Of these stages among the links of the optimizer."""
    stages: tuple[Stage, ...]
    hypers: tuple[Any, ...]


def shape_of(leaf: Any) -> Shape:
    """The shape of a parameter; of None, which is never stepped, that of no element."""
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else (0,)


def chain_at(
    links: Links, overrides: Sequence[Override], path: Path, shape: Shape | None = None
) -> LeafChain:
    """The stages that act on the leaf at ``path``; none on one that is frozen.

    Raises:
        ValueError: no rule does, and nothing says that it is frozen.
    """
    for where, changes in overrides:
        if applies(where, path, shape):
            links = apply(links, changes)
    places = [
        place
        for place, link in enumerate(links)
        if link.where is None or applies(link.where, path, shape)
    ]
    if any(links[place].stage.name == FREEZE for place in places):
        places = []
    elif not any(reads_gradient(links[place].stage) for place in places):
        raise ValueError(
            f"no rule acts on the gradient of the parameter at {path_name(path)!r}: every one that "
            "does is for other parameters; give it one, or freeze() it"
        )
    own = [links[place] for place in places]
    return LeafChain(
        tuple(places), tuple(link.stage for link in own), tuple(link.hyper for link in own)
    )


def chains_of(
    links: Links,
    overrides: Sequence[Override],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
) -> list[LeafChain]:
    """Return the chain of every leaf of a tree; leaves with equal chains share one object."""
    wheres = [where for where, _ in overrides]
    wheres += [link.where for link in links if link.where is not None]
    if not wheres:
        one = LeafChain(
            tuple(range(len(links))),
            tuple(link.stage for link in links),
            tuple(link.hyper for link in links),
        )
        return [one] * spec.num_leaves
    shared: dict[tuple[bool, ...], LeafChain] = {}
    found = []
    for path, leaf in zip(paths_of(spec), leaves, strict=True):
        if leaf is None:
            found.append(NO_CHAIN)
            continue
        shape = shape_of(leaf)
        key = tuple(applies(where, path, shape) for where in wheres)
        if key not in shared:
            shared[key] = chain_at(links, overrides, path, shape)
        found.append(shared[key])
    return found


NO_CHAIN = LeafChain((), (), ())
"""Of None in the place of a parameter."""


def hypers_of(
    links: Links, overrides: Sequence[Override], spec: optree.PyTreeSpec, leaves: Sequence[Any]
) -> list[tuple[Any, ...]]:
    """The hyper-parameters for every leaf of a tree; leaves that share them share one tuple."""
    return [one.hypers for one in chains_of(links, overrides, spec, leaves)]


@remembered(64)
def paths_of(spec: optree.PyTreeSpec) -> tuple[Path, ...]:
    """The paths of a tree's leaves."""
    return tuple(spec.paths())
