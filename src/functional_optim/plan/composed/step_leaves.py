"""The leaves of a step."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from torch import Tensor

from functional_optim.core.aliasing import Storage, apart_from_storages, storages_of
from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.plan.composed.outline import Cohort, Outline

GateNumbers = tuple[tuple[int, int], ...]
"""What a leaf has counted at each of its gates: runs, and how many of them were held."""


class StepLeaf(NamedTuple):
    """A parameter at a step."""

    position: int
    """Among the leaves of the tree."""
    param: Tensor
    state: LeafState
    chain: LeafChain
    name: str


class StepLeaves(NamedTuple):
    """All leaves of a step."""

    leaves: Sequence[StepLeaf]
    grads: Sequence[Tensor | None]
    """One for each; None where it is missing."""
    chains: Sequence[LeafChain]
    """With the hyper-parameters of this step, by the numbers that the outline has for them."""
    outline: Outline

    @classmethod
    def of(
        cls,
        links: Links,
        leaves: Sequence[StepLeaf],
        grads: Sequence[Tensor | None],
        everywhere: Iterable[tuple[int, ...]] = (),
    ) -> "StepLeaves":
        """Leaves whose ways are found out.

        Args:
            links: of the optimizer.
            leaves: of the step.
            grads: one for each.
            everywhere: the places of the chains of leaves that are elsewhere, on other ranks.
        """
        numbers: dict[int, int] = {}
        chains: list[LeafChain] = []
        found: dict[tuple[int, bool], list[int]] = {}
        for place, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            if not leaf.chain.stages:
                continue
            number = numbers.setdefault(id(leaf.chain), len(chains))
            if number == len(chains):
                chains.append(leaf.chain)
            found.setdefault((number, grad is not None), []).append(place)
        cohorts = [
            Cohort(number, chains[number].places, chains[number].stages, tuple(members), there)
            for (number, there), members in found.items()
        ]
        places = [chain.places for chain in chains]
        return cls(leaves, grads, chains, Outline(links, cohorts, [*places, *everywhere]))

    def with_gradients_apart(self, written: AbstractSet[Storage] | None = None) -> "StepLeaves":
        """Return the same leaves, with gradients that no step of them in place changes.

        Args:
            written: what :func:`storages_written` gives for these leaves, where it is known.
        """
        storages = storages_written(self.leaves) if written is None else written
        grads = apart_from_storages(self.grads, storages)
        return self if grads is self.grads else self._replace(grads=grads)


def storages_written(leaves: Sequence[StepLeaf]) -> set[Storage]:
    """Return the storages that a step in place writes: of parameters and states."""
    every = [(leaf.param, *state_tensors(leaf.state.stages)) for leaf in leaves]
    return storages_of(one for own in every for one in own)
