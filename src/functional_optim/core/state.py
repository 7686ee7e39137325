"""State of an optimizer: a tree like the parameters, with one state for each leaf.

So a bucket, a shard or an entry of a checkpoint is a slice of the state. Leaves can be added,
removed or moved to another rank independently.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GateCounts(NamedTuple):
    """Counts of a leaf at a gate: 0-d int64 tensors.

    Example::

        >>> import torch
        >>> from functional_optim import accumulate, chain, sgd
        >>> optimizer = chain(accumulate(2), sgd(lr=0.1))
        >>> params = torch.zeros(1)
        >>> params, state = optimizer.update(params, torch.ones(1), optimizer.init(params))
        >>> state.leaves.gates
        (GateCounts(runs=tensor(1), held=tensor(1)),)
    """

    runs: Tensor
    """The number of runs of the stages up to the gate."""
    held: Tensor
    """The number of these runs since the gate last let the leaf through."""


class LeafState(NamedTuple):
    """State of one parameter from step to step.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> sgd(momentum=0.9).init({"w": torch.zeros(1)}).leaves["w"].step
        tensor(0)
    """

    step: Tensor
    """0-d int64 tensor: the number of steps of this leaf. Calls without a gradient, or that a gate
    does not let through, are not counted."""
    stages: tuple[Any, ...]
    """One State per stage that acts on the leaf, in order; ``()`` for a stateless stage."""
    gates: tuple[GateCounts, ...] = ()
    """One for each gate among these stages, in order."""


class Shared(NamedTuple):
    """State that belongs to no leaf. :meth:`Optimizer.shared` returns its scalars by name.

    Example::

        >>> import torch
        >>> from functional_optim import accumulate, chain, sgd
        >>> chain(accumulate(2), sgd()).init(torch.zeros(1)).shared.step
        tensor(0)
    """

    step: Tensor
    """0-d int64 tensor: the number of calls of the optimizer."""
    stages: tuple[Any, ...]
    """For each link of the optimizer, its shared scalars as 0-d float64 tensors; () for none."""
    opened: tuple[Any, ...] = ()
    """For each link that is a gate, a 0-d int64 tensor: the number of its openings, which is the
    step count of the stages after it. () for other links, and in states of earlier versions."""


class State(NamedTuple):
    """State of an optimizer: a pytree, which can be saved, sliced, vmapped and moved.

    Example::

        >>> import torch
        >>> from functional_optim import adam
        >>> state = adam().init({"w": torch.zeros(1), "b": torch.zeros(1)})
        >>> sorted(state.leaves), state.shared
        (['b', 'w'], ())
    """

    leaves: Any
    """The tree of params, with a :class:`LeafState` in place of each parameter."""
    shared: Any = ()
    """A :class:`Shared` if the optimizer has state that belongs to no leaf; else ()."""


def field_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of one field of a stage's State, which is a tensor or a list."""
    return value if isinstance(value, list) else [value]


def state_tensors(states: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of stages' States, in order."""
    found: list[Tensor] = []
    for state in states:
        for value in state:
            if isinstance(value, list):
                found += value
            else:
                found.append(value)
    return found


# torch.load reads a saved State with its safe defaults, since a State is tuples of tensors. Early
# versions saved it under the name of another module.
_SAVED = (GateCounts, LeafState, Shared, State)
_BEFORE = [(kind, f"functional_optim.state.{kind.__name__}") for kind in _SAVED]
torch.serialization.add_safe_globals([*_SAVED, *_BEFORE])


def map_state(function: Callable[..., Tensor], *states: Any) -> Any:
    """Return a State of ``function(*tensors)``, for the tensors of each field of equal States."""
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
