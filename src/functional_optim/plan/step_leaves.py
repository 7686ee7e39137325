"""The leaves of a step."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.aliasing import apart_from
from functional_optim.core.chain import Chain
from functional_optim.core.dtensors import is_sharded
from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.kernels import Executor, executor_for
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.points import Cohort, Outline

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
    groups: Sequence[int]
    """For each leaf the number of its chain: leaves of a group have their hyper-parameters in
    common, too."""
    chains: Sequence[LeafChain]
    """By number, with the hyper-parameters of this step."""
    outline: Outline

    @classmethod
    def of(
        cls,
        links: Links,
        leaves: Sequence[StepLeaf],
        grads: Sequence[Tensor | None],
        everywhere: Iterable[tuple[int, ...]] = (),
        *,
        shares: bool,
    ) -> "StepLeaves":
        """Return leaves with the outline of their step.

        Args:
            links: of the optimizer.
            leaves: of the step.
            grads: one for each.
            everywhere: the places of the chains of leaves that are elsewhere, on other ranks.
            shares: whether the optimizer keeps anything that belongs to no leaf.
        """
        numbers: dict[int, int] = {}
        chains: list[LeafChain] = []
        groups: list[int] = []
        found: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for place, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            number = numbers.setdefault(id(leaf.chain), len(chains))
            if number == len(chains):
                chains.append(leaf.chain)
            groups.append(number)
            if leaf.chain.stages:
                found.setdefault((leaf.chain.places, grad is not None), []).append(place)
        cohorts = [
            Cohort(places, leaves[members[0]].chain.stages, tuple(members), there)
            for (places, there), members in found.items()
        ]
        places = [chain.places for chain in chains if chain.stages]
        sharded = any(is_sharded(leaf.param) for leaf in leaves)
        everywhere = [*places, *everywhere]
        outline = Outline(links, cohorts, everywhere, shares=shares, sharded=sharded)
        return cls(leaves, [leaf.param for leaf in leaves], grads, groups, chains, outline)

    @property
    def stepped(self) -> list[StepLeaf]:
        """The leaves that a step may write to: of a plain one, those with a gradient."""
        plain = self.outline.plain
        if plain is None:
            return list(self.leaves)
        return [self.leaves[k] for own in plain.members for k in own]

    def executor(self, optimizer: Chain) -> Executor:
        """Return the executor that steps the leaves, whichever of them have gradients."""
        return executor_for(optimizer.executor, self.params, optimizer.stages)

    def with_gradients_apart(self) -> "StepLeaves":
        """Return the same leaves, with gradients that no step of them in place changes."""
        plain = self.outline.plain
        if plain is not None and len(plain.runs) < 2:
            return self  # a run sees to its own leaves
        leaves = self.stepped
        params = [leaf.param for leaf in leaves]
        states = [leaf.state.stages for leaf in leaves]
        written = [*params, *(one for own in states for one in state_tensors(own))]
        grads = apart_from(self.grads, written)
        return self if grads is self.grads else self._replace(grads=grads)
