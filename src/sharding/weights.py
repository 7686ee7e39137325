"""Weights: the cost of pieces of parameters, in integers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Weight(NamedTuple):
    """Cost of a piece of a parameter: ``a * elements + b * blocks + c``, in integers.

    Example::

        >>> Weight(per_element=1, per_block=4, per_piece=8, block=256).of(300)
        316
    """

    per_element: int
    per_block: int = 0
    """Cost per block of elements, such as the scales of 8-bit state."""
    per_piece: int = 0
    """Cost per piece of any size, such as the step count."""
    block: int = 1
    """Elements per block; the last block can be shorter."""

    def of(self, elements: int) -> int:
        """Return the cost of a piece of ``elements`` elements."""
        blocks = -(-elements // self.block)
        return self.per_element * elements + self.per_block * blocks + self.per_piece


@dataclass(frozen=True, slots=True)
class Weights:
    """A :class:`Weight` for every parameter, as a cost model returns it.

    Example::

        >>> from sharding import ParameterSpec, Weight, plan
        >>> def embeddings_are_cheap(specs) -> Weights:
        ...     return Weights.of_each([Weight(1 if "emb" in spec.path else 8) for spec in specs])
        >>> specs = [ParameterSpec(name, (8,)) for name in ("emb", "up", "down")]
        >>> found = plan(specs, 2, cost=embeddings_are_cheap)
        >>> [one.path for one in found.owned(0)]
        ['emb', 'up']
    """

    kinds: tuple[Weight, ...]
    """The different weights."""
    kind: tuple[int, ...]
    """For each parameter, the index of its weight in ``kinds``."""

    @classmethod
    def of_each(cls, weights: Sequence[Weight]) -> "Weights":
        """Return Weights from one weight for each parameter."""
        places: dict[Weight, int] = {}
        kind = tuple(places.setdefault(weight, len(places)) for weight in weights)
        return cls(tuple(places), kind)

    def after(self, count: int) -> "Weights":
        """Return the weights of the parameters after the first ``count``."""
        return Weights(self.kinds, self.kind[count:])

    def whole(self, numels: Sequence[int]) -> list[int]:
        """Return the cost of each whole parameter."""
        return self.of(range(len(numels)), numels)

    def of(self, parameters: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return the cost of pieces, given the parameter and the number of elements of each."""
        kinds, kind = self.kinds, self.kind
        return [kinds[kind[i]].of(n) for i, n in zip(parameters, lengths, strict=True)]


class Costs(NamedTuple):
    """Cost of every parameter in two resources, which the policy ``two_resource`` balances.

    Other policies balance the bytes only.

    Example::

        >>> from sharding import ParameterSpec, StepCost
        >>> from functional_optim import sgd
        >>> time, size = StepCost(sgd(0.1))([ParameterSpec("w", (10,))])
        >>> time.whole([10]), size.whole([10])
        ([20], [88])
    """

    time: Weights
    """Floating-point operations of a step, or any other measure of its time."""
    bytes: Weights
    """Bytes that the owner stores."""
