"""StepLeaves: the leaves of a step, with their gradients, chains and outline."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.aliasing import clone_aliased
from functional_optim.core.chain import Chain
from functional_optim.core.dtensors import is_dtensor
from functional_optim.core.leaf import PLAIN
from functional_optim.core.links import Links
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.kernels import Executor, executor_for
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.points import Cohort, Outline

GateNumbers = tuple[tuple[int, int], ...]
"""The counts of a leaf at each of its gates: runs, and held runs."""


class StepLeaf(NamedTuple):
    """Parameter in one step, with its state and chain."""

    position: int
    """Index among the leaves of the tree."""
    param: Tensor
    state: LeafState
    chain: LeafChain
    name: str


class ListedLeaves(Sequence[StepLeaf]):
    """Leaves whose tensors are in the list of a step. A StepLeaf is created on access.

    Args:
        rows: for each leaf, the positions of its tensors.
        positions: for each leaf, its index among the leaves of the tree.
        numbers: for each leaf, the number of its chain.
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
    """The parameter of each leaf."""
    grads: Sequence[Tensor | None]
    """The gradient of each leaf, or None."""
    groups: Sequence[int]
    """For each leaf, the number of its chain. Leaves of a group share hyper-parameters."""
    chains: Sequence[LeafChain]
    """By number, with the hyper-parameters of this step."""
    outline: Outline

    @classmethod
    def of(
        cls,
        links: Links,
        leaves: Sequence[StepLeaf],
        grads: Sequence[Tensor | None],
        *,
        shares: bool,
        groups: Sequence[int] | None = None,
        chains: Sequence[LeafChain] = (),
    ) -> "StepLeaves":
        """Return leaves with the outline of their step.

        ``groups`` has the number of the chain of each leaf; by default, chains are numbered in the
        order of the leaves. ``chains`` are all chains by number, also those of leaves on other
        ranks.
        """
        if groups is None:
            own = {id(leaf.chain): leaf.chain for leaf in leaves}
            numbers = {key: number for number, key in enumerate(own)}
            groups = [numbers[id(leaf.chain)] for leaf in leaves]
            chains = list(own.values())
        found: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for place, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            if leaf.chain.stages:
                found.setdefault((leaf.chain.places, grad is not None), []).append(place)
        cohorts = [
            Cohort(places, leaves[members[0]].chain.stages, tuple(members), there)
            for (places, there), members in found.items()
        ]
        everywhere = [chain.places for chain in chains if chain.stages]
        params = [leaf.param for leaf in leaves]
        sharded = not PLAIN.issuperset(map(type, params)) and any(map(is_dtensor, params))
        outline = Outline(links, cohorts, everywhere, shares=shares, sharded=sharded)
        return cls(leaves, params, grads, groups, chains, outline)

    @property
    def stepped(self) -> list[StepLeaf]:
        """The leaves that a step may write to: in a plain step, the leaves with a gradient."""
        plain = self.outline.plain
        if plain is None:
            return list(self.leaves)
        return [self.leaves[k] for own in plain.members for k in own]

    def executor(self, optimizer: Chain) -> Executor:
        """Return the executor of the leaves. It does not depend on missing gradients."""
        return executor_for(optimizer.executor, self.params, optimizer.stages)

    def copy_aliased_gradients(self) -> "StepLeaves":
        """Return the same leaves, with copies of the gradients that an in-place step writes to."""
        plain = self.outline.plain
        if plain is not None and len(plain.runs) < 2:
            return self  # a single run checks its leaves itself
        leaves = self.stepped
        params = [leaf.param for leaf in leaves]
        states = [leaf.state.stages for leaf in leaves]
        written = [*params, *(one for own in states for one in state_tensors(own))]
        grads = clone_aliased(self.grads, written)
        return self if grads is self.grads else self._replace(grads=grads)
