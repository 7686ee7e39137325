"""Report of a plan: elements, bytes of each kind, and traffic of each rank; also as a picture."""

from dataclasses import dataclass
from pathlib import Path

from sharding.cost import ByteCost, FlopCost
from sharding.optimizer_costs import OptimizerOrFactory
from sharding.ownership import Ownership
from sharding.problem import mixed_lower_bound
from sharding.units import pieces_of_units, units_of
from sharding.weights import Weight, Weights

KINDS = (
    ("parameter_bytes", "parameters", "#1f4e79"),
    ("gradient_bytes", "gradients", "#f4b183"),
    ("state_bytes", "state", "#70ad47"),
)
MIB = 2**20

Column = tuple[int, ...]
"""One number for each rank."""


@dataclass(frozen=True)
class Report:
    """Numbers of a plan. A column has one number for each rank of the first replica.

    The ranks of other replicas have the same numbers. In a step, each rank sends every gradient to
    its owner, and each owner sends its parameters to all other ranks. If all ranks own equally
    much, these are the bytes of an all-reduce. Frozen parameters are not sent.

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
    """Parameters of which the rank owns at least a part."""
    elements: Column
    """Elements that the rank owns."""
    parameter_bytes: Column
    """Bytes of these elements."""
    gradient_bytes: Column
    """Bytes of their gradients; frozen parameters have none."""
    state_bytes: Column
    """Bytes of their state, with step counts."""
    sent_bytes: Column
    """Bytes sent in a step to ranks of the same replica."""
    received_bytes: Column
    """Bytes received in a step from ranks of the same replica."""
    between_bytes: Column
    """Bytes sent in a step to ranks of other replicas, if their gradients are reduced in a ring."""
    flops: Column
    """Floating-point operations of a step of the elements that the rank owns."""
    flops_bound: int
    """Lower bound of the largest number of operations, for plans that leave matrices whole."""
    bytes_bound: int
    """Lower bound of the largest number of bytes of parameters, gradients and state."""

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
        """Return the largest number over the mean. 1.0 is the best value, also if all are 0.

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


def report(plan: Ownership, optimizer: OptimizerOrFactory | None) -> Report:
    """Return the report of a plan, with state and operations of ``optimizer``."""
    units = units_of(plan.specs)
    pieces, ranks = pieces_of_units(plan.pieces, units), plan.shard_ranks
    lengths, numels = pieces.lengths, [spec.numel for spec in units.specs]

    def summed(weights: Weights) -> Column:
        return pieces.sum_by_rank(weights.of(pieces.parameter, lengths), ranks)

    parameters = summed(ByteCost(gradients=False)(units.specs))
    gradients = summed(ByteCost(parameters=False)(units.specs))
    sizes = ByteCost(optimizer)(units.specs)
    state = tuple(
        total - one - other
        for total, one, other in zip(summed(sizes), parameters, gradients, strict=True)
    )
    nothing = Weights((Weight(0),), (0,) * len(units.specs))
    times = nothing if optimizer is None else FlopCost(optimizer)(units.specs)
    # Only trained parameters are sent, and these have as many bytes as their gradients.
    all_gradients, others = sum(gradients), ranks - 1
    moved = tuple(all_gradients - own + others * own for own in gradients)
    rounds = 2 * (plan.replicas - 1)
    return Report(
        parameters=plan.pieces.sum_by_rank([1] * len(plan.pieces), ranks),
        elements=pieces.sum_by_rank(lengths, ranks),
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        state_bytes=state,
        sent_bytes=moved,
        received_bytes=moved,
        between_bytes=tuple(rounds * own // plan.replicas for own in gradients),
        flops=summed(times),
        flops_bound=mixed_lower_bound(units.specs, times.whole(numels), (0,) * ranks),
        bytes_bound=mixed_lower_bound(units.specs, sizes.whole(numels), (0,) * ranks),
    )


def draw(plan: Ownership, optimizer: OptimizerOrFactory | None, path: Path) -> None:
    """Draw a bar for each rank, with stacked kinds of bytes, and write the picture."""
    from matplotlib.figure import Figure  # noqa: PLC0415  only pictures need matplotlib

    numbers = report(plan, optimizer)
    ranks = range(len(numbers.elements))
    # All bars are one patch with gaps between them, because there may be thousands of ranks.
    edges = [rank + side for rank in ranks for side in (-0.4, 0.4)]
    bottom = [0.0] * len(numbers.elements)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, label, color in KINDS:
        heights = [count / MIB for count in getattr(numbers, name)]
        top = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.stairs(
            _with_gaps(top), edges, baseline=_with_gaps(bottom), fill=True, label=label, color=color
        )
        bottom = top
    mean = sum(bottom) / len(bottom)
    axes.axhline(mean, color="black", linewidth=1, linestyle="--", label=f"mean, {mean:,.2f} MiB")
    axes.set(
        xlabel="rank" if plan.replicas == 1 else "rank within a replica",
        ylabel="MiB owned",
        title=f"{plan.policy}, {plan.world_size:,} ranks: max/mean {numbers.imbalance():.4f}",
    )
    figure.legend(loc="outside lower center", ncols=len(KINDS) + 1)
    figure.savefig(path, dpi=150)


def _with_gaps(heights: list[float]) -> list[float]:
    """Return the heights of bars, with a gap of height 0 after each bar but the last."""
    return [value for height in heights for value in (height, 0.0)][:-1]
