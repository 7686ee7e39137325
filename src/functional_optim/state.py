"""State, leaf-major: the state tree mirrors the tree of parameters.

A bucket, a shard or a checkpoint entry is then a slice of that tree, and a leaf can join, leave
or move to another rank without touching the others.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LeafState(NamedTuple):
    """What one parameter carries from step to step."""

    step: Tensor
    """0-d int64 tensor: how many steps this leaf has made. A missing gradient is no step."""
    stages: tuple[Any, ...]
    """One State per stage of the chain, in order; ``()`` for a stage that keeps none."""


class State(NamedTuple):
    """The state of an optimizer: a pytree, to be saved, sliced, vmapped or moved like one."""

    leaves: Any
    """The tree of params, with a :class:`LeafState` in place of each parameter."""
    shared: tuple[Any, ...] = ()
    """What belongs to no leaf. No stage of today keeps such a thing; the place is reserved."""


def field_tensors(value: Any) -> list[Tensor]:
    """The tensors of one field of a stage's State: one, or those that an option puts there."""
    return value if isinstance(value, list) else [value]


def state_tensors(states: Iterable[Any]) -> list[Tensor]:
    """The tensors of stages' States, in order."""
    return [tensor for state in states for value in state for tensor in field_tensors(value)]


# A saved State is read by torch.load's safe defaults: it is tuples of tensors.
torch.serialization.add_safe_globals([LeafState, State])
