"""Report of a plan: elements, bytes of each kind, and traffic of each rank in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from sharding.cost import ByteCost, FlopCost
from sharding.makespan import lower_bound
from sharding.ownership import Ownership
from sharding.steppers import Stepper
from sharding.units import Units, pieces_of_units, units_of
from sharding.weights import Weight, Weights

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
    flops: Column
    """Floating-point operations of a step of what the rank owns."""
    flops_bound: int
    """Operations that some rank does in every plan that leaves matrices whole."""
    bytes_bound: int
    """Bytes of parameters, gradients and state that some rank has in every such plan."""

    @property
    def total_bytes(self) -> Column:
        """Parameters, gradients and state together."""
        kinds = (self.parameter_bytes, self.gradient_bytes, self.state_bytes)
        return tuple(map(sum, zip(*kinds, strict=True)))

    @property
    def columns(self) -> dict[str, Column]:
        """Every column by its name, in the order of the fields."""
        return {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if not name.endswith("_bound")
        }

    @property
    def makespan(self) -> int:
        """The operations of the rank that steps longest."""
        return max(self.flops)

    @property
    def memory(self) -> int:
        """The bytes of the fullest rank."""
        return max(self.total_bytes)

    @property
    def makespan_over_bound(self) -> float:
        """The makespan over its lower bound; 1.0 is the best possible."""
        return self.makespan / self.flops_bound if self.flops_bound else 1.0

    @property
    def memory_over_bound(self) -> float:
        """The memory over its lower bound; 1.0 is the best possible."""
        return self.memory / self.bytes_bound if self.bytes_bound else 1.0

    def imbalance(self, column: str = "total_bytes") -> float:
        """The largest rank over the mean; 1.0 is perfect, and also the value where all have 0.

        Args:
            column: the name of a column.

        Raises:
            ValueError: there is no such column.
        """
        known = {**self.columns, "total_bytes": self.total_bytes}
        if column not in known:
            raise ValueError(f"column must be one of {', '.join(known)}, got {column!r}")
        numbers = known[column]
        total = sum(numbers)
        return max(numbers) * len(numbers) / total if total else 1.0


def report(plan: Ownership, optimizer: Stepper | None) -> Report:
    """The numbers of a plan; state and operations are those of ``optimizer``."""
    units = units_of(plan.specs)
    pieces, ranks = pieces_of_units(plan.pieces, units), plan.shard_ranks
    lengths = [stop - start for start, stop in zip(pieces.start, pieces.stop, strict=True)]

    def summed(weights: Weights) -> Column:
        return by_rank(weights.of(pieces.parameter, lengths), pieces.rank, ranks)

    parameters = summed(ByteCost(gradients=False)(units.specs))
    gradients = summed(ByteCost(parameters=False)(units.specs))
    sizes = ByteCost(optimizer)(units.specs)
    state = tuple(
        total - one - other
        for total, one, other in zip(summed(sizes), parameters, gradients, strict=True)
    )
    nothing = Weights((Weight(0),), (0,) * len(units.specs))
    times = nothing if optimizer is None else FlopCost(optimizer)(units.specs)
    # A trained parameter has the bytes of its gradient, and only such parameters are sent.
    all_gradients, others = sum(gradients), ranks - 1
    moved = tuple(all_gradients - own + others * own for own in gradients)
    rounds = 2 * (plan.replicas - 1)
    return Report(
        parameters=by_rank([1] * len(plan.pieces), plan.pieces.rank, ranks),
        elements=by_rank(lengths, pieces.rank, ranks),
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        state_bytes=state,
        sent_bytes=moved,
        received_bytes=moved,
        between_bytes=tuple(rounds * own // plan.replicas for own in gradients),
        flops=summed(times),
        flops_bound=_bound(times, units, ranks),
        bytes_bound=_bound(sizes, units, ranks),
    )


def _bound(weights: Weights, units: Units, ranks: int) -> int:
    costs = weights.whole([spec.numel for spec in units.specs])
    pairs = list(zip(units.specs, costs, strict=True))
    matrices = [cost for spec, cost in pairs if spec.kind == "per_matrix"]
    return lower_bound(matrices, (0,) * ranks, sum(costs) - sum(matrices))


def by_rank(numbers: Sequence[int], owners: Sequence[int], ranks: int) -> Column:
    """Sums of numbers over the pieces of each rank."""
    sums = [0] * ranks
    for number, owner in zip(numbers, owners, strict=True):
        sums[owner] += number
    return tuple(sums)
