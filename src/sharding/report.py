"""Report of a plan: elements, bytes of each kind, and traffic of each rank in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from sharding.cost import ByteCost
from sharding.footprint import Stepper
from sharding.ownership import Ownership

Column = tuple[int, ...]
"""A number for each rank."""


@dataclass(frozen=True)
class Report:
    """A plan in numbers; a column has one number for each rank of the first replica.

    The ranks of other replicas have the same. Traffic is that of a step in which each rank sends
    every gradient to its owner, and each owner its parameters to every other rank: the bytes of
    an all-reduce, if all own the same. Frozen parameters are not sent.

    Example::

        >>> from functional_optim import adamw
        >>> from sharding import ParameterSpec, plan
        >>> shares = plan([ParameterSpec("w", (9, 10))], 3, "elements")
        >>> numbers = shares.report(adamw())
        >>> numbers.state_bytes
        (248, 248, 248)
        >>> numbers.imbalance("elements")
        1.0
    """

    parameters: Column
    """Parameters of which the rank owns something."""
    elements: Column
    """Elements owned."""
    parameter_bytes: Column
    """Of the parameters owned."""
    gradient_bytes: Column
    """Of their gradients; frozen ones have none."""
    state_bytes: Column
    """Of their state, step counts included."""
    sent_bytes: Column
    """Sent in a step, to ranks of the same replica."""
    received_bytes: Column
    """Received in a step, from ranks of the same replica."""
    between_bytes: Column
    """Sent in a step to ranks of other replicas, if their gradients are reduced in a ring."""

    @property
    def total_bytes(self) -> Column:
        """Parameters, gradients and state together."""
        kinds = (self.parameter_bytes, self.gradient_bytes, self.state_bytes)
        return tuple(map(sum, zip(*kinds, strict=True)))

    def imbalance(self, column: str = "total_bytes") -> float:
        """The largest rank over the mean; 1.0 is perfect, and also the value where all have 0.

        Args:
            column: the name of a column.

        Raises:
            ValueError: there is no such column.
        """
        if column not in (*self.__dataclass_fields__, "total_bytes"):
            raise ValueError(
                f"column must be one of {', '.join(self.__dataclass_fields__)}, total_bytes, "
                f"got {column!r}"
            )
        numbers: Column = getattr(self, column)
        total = sum(numbers)
        return max(numbers) * len(numbers) / total if total else 1.0


def report(plan: Ownership, optimizer: Stepper | None) -> Report:
    """The numbers of a plan; state is that of ``optimizer``."""
    pieces, ranks = plan.pieces, plan.shard_ranks
    lengths = [stop - start for start, stop in zip(pieces.start, pieces.stop, strict=True)]

    def summed(cost: ByteCost) -> Column:
        return by_rank(cost(plan.specs).of(pieces.parameter, lengths), pieces.rank, ranks)

    parameters = summed(ByteCost(gradients=False))
    gradients = summed(ByteCost(parameters=False))
    state = summed(ByteCost(optimizer, parameters=False, gradients=False))
    # A trained parameter has the bytes of its gradient, and only such parameters are sent.
    all_gradients, others = sum(gradients), ranks - 1
    moved = tuple(all_gradients - own + others * own for own in gradients)
    rounds = 2 * (plan.replicas - 1)
    return Report(
        parameters=by_rank([1] * len(lengths), pieces.rank, ranks),
        elements=by_rank(lengths, pieces.rank, ranks),
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        state_bytes=state,
        sent_bytes=moved,
        received_bytes=moved,
        between_bytes=tuple(rounds * own // plan.replicas for own in gradients),
    )


def by_rank(numbers: Sequence[int], owners: Sequence[int], ranks: int) -> Column:
    """Sums of numbers over the pieces of each rank."""
    sums = [0] * ranks
    for number, owner in zip(numbers, owners, strict=True):
        sums[owner] += number
    return tuple(sums)
