"""Leaves that have one chain, known by one of them; and whether the chains of a step are alike."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.initial import StateFields
from functional_optim.core.overrides import LeafChain
from functional_optim.core.tree import Path
from functional_optim.core.where import Shape

_MEANT_FOR = itemgetter(0)


class LeafGroup(NamedTuple):
    """Leaves that have one chain with the same hyper-parameters, by one of them."""

    path: Path
    shape: Shape
    kinds: frozenset[tuple[Shape, torch.dtype]]
    """The shapes and dtypes of all of them."""

    @classmethod
    def of(cls, path: Path, params: Sequence[Tensor]) -> "LeafGroup":
        """The group of some parameters, of which the first is at ``path``."""
        kinds = frozenset((tuple(one.shape), one.dtype) for one in params)
        return cls(path, tuple(params[0].shape), kinds)

    def chain(self, optimizer: Chain) -> LeafChain:
        """The chain of these leaves."""
        if optimizer.overrides or optimizer.is_composed:
            return optimizer.chain_at(self.path, self.shape)
        links = optimizer.links
        places = tuple(range(len(links)))
        return LeafChain(places, optimizer.stages, tuple([link.hyper for link in links]))


def groups_of(
    marks: Sequence[Any], paths: Sequence[Path], params: Sequence[Tensor]
) -> tuple[list[LeafGroup], list[int]]:
    """The groups of leaves, and of each leaf the number of its own.

    Args:
        marks: of each leaf, what the leaves of a group have in common.
        paths: of the leaves.
        params: likewise.
    """
    members: dict[Any, list[int]] = {}
    for place, mark in enumerate(marks):
        members.setdefault(mark, []).append(place)
    groups, numbers = [], [0] * len(marks)
    for number, places in enumerate(members.values()):
        groups.append(LeafGroup.of(paths[places[0]], [params[k] for k in places]))
        for k in places:
            numbers[k] = number
    return groups, numbers


class ChainGuard:
    """Guard: an optimizer steps leaves as the one that the plan was made for.

    Hyper-parameters may be others, as long as they ask for the state that there is.

    Args:
        optimizer: for which it was planned.
        groups: of the leaves.
    """

    def __init__(self, optimizer: Chain, groups: Sequence[LeafGroup]) -> None:
        self._executor = optimizer.executor
        self._links, self._overrides = optimizer.links, optimizer.overrides
        self._groups = groups
        self.chains = [group.chain(optimizer) for group in groups]
        """Of each group, with the hyper-parameters of the last step for which it held."""
        self._forms = [
            StateFields(own.stages, own.hypers, group.kinds)
            for group, own in zip(groups, self.chains, strict=True)
        ]

    def holds(self, optimizer: Chain) -> bool:
        """Return True if it does."""
        if self._executor != optimizer.executor:
            return False
        links, overrides = optimizer.links, optimizer.overrides
        if self._links is links and self._overrides is overrides:
            return True
        if not self._are_alike(optimizer):
            return False
        chains = [group.chain(optimizer) for group in self._groups]
        for forms, before, now in zip(self._forms, self.chains, chains, strict=True):
            if before.hypers is not now.hypers and not forms.hold(now.hypers):
                return False
        self._links, self._overrides, self.chains = links, overrides, chains
        return True

    def _are_alike(self, optimizer: Chain) -> bool:
        """Return True if stages act on the same leaves, and numbers are meant for the same."""
        if len(self._links) != len(optimizer.links):
            return False
        return all(
            one is other or (one.stage == other.stage and one.where == other.where)
            for one, other in zip(self._links, optimizer.links, strict=True)
        ) and list(map(_MEANT_FOR, self._overrides)) == list(map(_MEANT_FOR, optimizer.overrides))
