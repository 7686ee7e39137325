"""State, leaf-major: the state tree mirrors the tree of parameters.

A bucket, a shard or a checkpoint entry is then a slice of that tree, and a leaf can join, leave
or move to another rank without touching the others.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GateCounts(NamedTuple):
    """Counts of a leaf at a gate: 0-d int64 tensors."""

    runs: Tensor
    """How often the stages up to the gate have run."""
    held: Tensor
    """How often they have since the gate let the leaf through."""


class LeafState(NamedTuple):
    """State of one parameter from step to step."""

    step: Tensor
    """0-d int64 tensor: how many steps this leaf has made. A missing gradient is no step, nor is
    one that a gate has not let through."""
    stages: tuple[Any, ...]
    """One State per stage that acts on the leaf, in order; ``()`` for a stage that keeps none."""
    gates: tuple[GateCounts, ...] = ()
    """One for each gate among these stages, in order."""


class Shared(NamedTuple):
    """State that belongs to no leaf."""

    step: Tensor
    """0-d int64 tensor: how many times the optimizer was called."""
    stages: tuple[Any, ...]
    """For each link of the optimizer, its shared numbers as 0-d float64 tensors; () for none."""
    opened: tuple[Any, ...] = ()
    """For each link that is a gate, a 0-d int64 tensor: how often it has opened, which is the step
    of all that stands behind it. () for any other link, and in states of earlier versions."""


class State(NamedTuple):
    """The state of an optimizer: a pytree, to be saved, sliced, vmapped or moved like one."""

    leaves: Any
    """The tree of params, with a :class:`LeafState` in place of each parameter."""
    shared: Any = ()
    """A :class:`Shared` where the optimizer keeps anything that belongs to no leaf; else ()."""


def field_tensors(value: Any) -> list[Tensor]:
    """The tensors of one field of a stage's State: one, or those that an option puts there."""
    return value if isinstance(value, list) else [value]


def state_tensors(states: Iterable[Any]) -> list[Tensor]:
    """The tensors of stages' States, in order."""
    found: list[Tensor] = []
    for state in states:
        for value in state:
            if isinstance(value, list):
                found += value
            else:
                found.append(value)
    return found


# A saved State is read by torch.load's safe defaults: it is tuples of tensors. The first versions
# saved it under the name of a module that has moved.
_SAVED = (GateCounts, LeafState, Shared, State)
_BEFORE = [(kind, f"functional_optim.state.{kind.__name__}") for kind in _SAVED]
torch.serialization.add_safe_globals([*_SAVED, *_BEFORE])


def map_state(function: Callable[..., Tensor], *states: Any) -> Any:
    """Apply to every tensor of one stage's State (and of more States of the same kind)."""
    first = states[0]
    if first == ():
        return first
    fields: list[Any] = []
    for values in zip(*states, strict=True):
        if isinstance(values[0], list):
            fields.append([function(*items) for items in zip(*values, strict=True)])
        else:
            fields.append(function(*values))
    return type(first)(*fields)
