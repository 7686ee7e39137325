"""The leaves of a step."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.aliasing import apart_from
from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.plan.composed.outline import Cohort, Outline
from functional_optim.plan.leaf_positions import LeafPositions

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


class ListedLeaves(Sequence[StepLeaf]):
    """Leaves whose tensors are in the list of a step. Each is made when it is asked for.

    Args:
        rows: for each, the positions of its tensors.
        positions: for each, its place among the leaves of the tree.
        numbers: for each, the number of its chain.
        chains: by their numbers.
        tensors: the list of this step.
    """

    def __init__(
        self,
        rows: Sequence[LeafPositions],
        positions: Sequence[int],
        numbers: Sequence[int],
        chains: Sequence[LeafChain],
        tensors: Sequence[Tensor],
    ) -> None:
        self._rows, self._positions, self._tensors = rows, positions, tensors
        self._numbers, self._chains = numbers, chains

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, k: Any) -> Any:
        row, chain = self._rows[k], self._chains[self._numbers[k]]
        param, state = self._tensors[row.param], row.state(self._tensors)
        return StepLeaf(self._positions[k], param, state, chain, row.name)


class StepLeaves(NamedTuple):
    """All leaves of a step."""

    leaves: Sequence[StepLeaf]
    params: Sequence[Tensor]
    """Of the leaves."""
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
        outline = Outline(links, cohorts, [*places, *everywhere])
        return cls(leaves, [leaf.param for leaf in leaves], grads, chains, outline)

    def with_gradients_apart(self) -> "StepLeaves":
        """Return the same leaves, with gradients that no step of them in place changes."""
        states = [leaf.state.stages for leaf in self.leaves]
        written = [*self.params, *(one for own in states for one in state_tensors(own))]
        grads = apart_from(self.grads, written)
        return self if grads is self.grads else self._replace(grads=grads)
