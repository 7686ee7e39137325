"""LeafPositions: the positions of a leaf's tensors in the list of a step."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.named_tuples import from_fields
from functional_optim.core.state import GateCounts, LeafState, map_state, state_tensors
from functional_optim.kernels import Leaf
from functional_optim.plan.item import Item, StepScalars


class LeafPositions(NamedTuple):
    """Positions of a leaf's tensors in the list of a step."""

    param: int
    grad: int
    states: tuple[Any, ...]
    """One State per stage, with positions instead of tensors."""
    step: int
    """The step count: an integer tensor with one element, or with several equal elements."""
    name: str
    """The leaf's name, for errors."""
    gates: tuple[Any, ...] = ()
    """The counts at each gate, with positions instead of tensors."""

    @property
    def written(self) -> list[int]:
        """Positions of the tensors that a kernel writes to: the parameter and its state."""
        positions: Any = state_tensors(self.states)
        return [self.param, *positions]

    @property
    def all(self) -> list[int]:
        """Positions of parameter, gradient and state."""
        positions: Any = state_tensors(self.states)
        return [self.param, self.grad, *positions]

    @property
    def counts(self) -> list[int]:
        """Positions of the step count, and of the counts at gates."""
        return [self.step, *(k for gate in self.gates for k in gate)]

    @property
    def kept(self) -> list[int]:
        """Positions of the parameter, its state and its counts."""
        return [*self.written, *self.counts]

    def state(self, tensors: Sequence[Tensor]) -> LeafState:
        """Return the state of a leaf."""
        states = tuple([map_state(tensors.__getitem__, one) if one else one for one in self.states])
        gates = tuple([GateCounts(tensors[one.runs], tensors[one.held]) for one in self.gates])
        return LeafState(tensors[self.step], states, gates)

    def leaf(self, tensors: Sequence[Tensor], made: StepScalars) -> Leaf:
        """Return the leaf of a step, as stages see it."""
        states = tuple([map_state(tensors.__getitem__, one) for one in self.states])
        param, grad = tensors[self.param], tensors[self.grad]
        numbers = made.coefficients, self.name, made.hypers, made.step
        return Leaf(param, grad, states, *numbers, None, made.scalars)

    def item(self, tensors: Sequence[Tensor], hypers: tuple[Any, ...]) -> Item:
        """Return the leaf of a step, as the engine takes it."""
        state = self.state(tensors)
        return Item(tensors[self.param], tensors[self.grad], state, hypers, self.name)


_gate, _positions = from_fields(GateCounts), from_fields(LeafPositions)


def rows_of(
    items: Sequence[Any], tensors: Sequence[Any], grads: Iterable[int]
) -> list[LeafPositions] | None:
    """Return the positions of leaves' tensors in a list.

    Return None if the list lacks a tensor, or contains a tensor twice: in the next step, these may
    be two tensors. Positions of gradients are given, not searched: two leaves with the same
    gradient now may have different gradients in the next step.
    """
    grads = list(grads)
    of_grads = set(grads)  # a gradient may be the parameter itself
    held = [k for k, one in enumerate(tensors) if k not in of_grads and isinstance(one, Tensor)]
    places = {id(tensors[k]): k for k in held}
    if len(places) < len(held):
        return None

    rows = []
    try:
        for item, grad in zip(items, grads, strict=True):
            own = item.state
            states: list[Any] = []
            for state in own.stages:  # calls take most of the time of a first step
                values: list[Any] = []
                for one in state:
                    many = isinstance(one, list)
                    values.append([places[id(k)] for k in one] if many else places[id(one)])
                states.append(type(state)(*values) if state else state)
            counts = own.gates and [
                (places[id(one.runs)], places[id(one.held)]) for one in own.gates
            ]
            param, step, gates = places[id(item.param)], places[id(own.step)], map(_gate, counts)
            row = param, grad, tuple(states), step, item.name, tuple(gates)
            rows.append(_positions(row))
    except KeyError:
        return None
    return rows
