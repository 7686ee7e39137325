"""The leaves of a step, and the parts of their chains that run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.overrides import LeafChain
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState

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


class Cohort(NamedTuple):
    """Leaves that have one chain, of which each has a gradient, or none has."""

    chain: LeafChain
    members: tuple[int, ...]
    """Their places among the leaves of the step, in order."""
    has_gradients: bool


class StepLeaves(NamedTuple):
    """All leaves of a step."""

    leaves: Sequence[StepLeaf]
    grads: Sequence[Tensor | None]
    """One for each; None where it is missing."""
    cohorts: Sequence[Cohort]
    """Of all leaves that have a stage, with the hyper-parameters of this step."""

    @classmethod
    def of(cls, leaves: Sequence[StepLeaf], grads: Sequence[Tensor | None]) -> "StepLeaves":
        """Leaves whose cohorts are found out."""
        found: dict[Any, tuple[LeafChain, list[int]]] = {}
        for place, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            if leaf.chain.stages:
                key = (id(leaf.chain), grad is not None)
                found.setdefault(key, (leaf.chain, []))[1].append(place)
        cohorts = [Cohort(own, tuple(k), there) for (_, there), (own, k) in found.items()]
        return cls(leaves, grads, cohorts)


class Part(NamedTuple):
    """Leaves at stages ``[start, stop)`` of the chain that they have in common."""

    chain: LeafChain
    start: int
    stop: int
    members: tuple[int, ...]
    """Their places among the leaves of the step, in order."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """These stages."""
        return self.chain.stages[self.start : self.stop]


class Run(NamedTuple):
    """Leaves whose stages ``[start, stop)`` run at this step, by one call of an executor."""

    part: Part
    measured: tuple[Tensor, ...]
    """The totals of the measured stages among them."""
    is_late: bool
    """Whether it is what the leaves kept at a gate that goes on, or is put back."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those that run."""
        return self.part.stages

    @property
    def is_step(self) -> bool:
        """Whether every stage runs, so that the step counts."""
        return self.part.stop == len(self.part.chain.stages)

    def gates(self) -> list[tuple[int, bool]]:
        """The gates that are reached, and whether each lets the leaves through."""
        chain, start, stop, _ = self.part
        passed = self.is_late or self.is_step
        return [
            (k, passed or place < stop - 1)
            for k, place in enumerate(gate_places(chain.stages))
            if start <= place < stop
        ]


def gate_places(stages: Sequence[Stage]) -> list[int]:
    """Where the gates stand in a chain."""
    return [place for place, stage in enumerate(stages) if stage.gate is not None]
