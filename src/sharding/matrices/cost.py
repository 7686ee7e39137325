"""Cost of owning a matrix: its share of the time of a step, and its share of the memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from sharding.cost import ByteCost, ComputeCost, Weights
from sharding.footprint import Stepper, Weight
from sharding.spec import ParameterSpec

WHOLE = 1 << 40
"""The cost of all matrices together, by time alone or by memory alone."""


@dataclass(frozen=True)
class StepCost:
    """Cost = share of the time of a step + share of the memory, each 1 for all matrices together.

    With t_i the floating-point operations of parameter i by :class:`~sharding.ComputeCost`, and b_i
    the bytes of parameter, gradient and state by :class:`~sharding.ByteCost`:

        c_i = t_i / sum_j t_j + b_i / sum_j b_j

    Costs are whole numbers, in units of 2^-40.

    Args:
        optimizer: whose state it is, or a function from a :class:`~sharding.ParameterSpec` to its
            optimizer.

    Raises:
        TypeError, ValueError: when called, as for :class:`~sharding.ByteCost`.

    Example::

        >>> from functional_optim import muon
        >>> from sharding import ParameterSpec
        >>> specs = [ParameterSpec(name, (4, 4), kind="per_matrix") for name in "ab"]
        >>> StepCost(muon())(specs).whole([16, 16]) == [WHOLE, WHOLE]
        True
    """

    optimizer: Stepper

    def __call__(self, specs: Sequence[ParameterSpec]) -> Weights:
        numels = [spec.numel for spec in specs]
        times = ComputeCost()(specs).whole(numels)
        sizes = ByteCost(self.optimizer)(specs).whole(numels)
        time, size = max(sum(times), 1), max(sum(sizes), 1)
        return Weights.of_each(
            [
                Weight(0, per_piece=a * WHOLE // time + b * WHOLE // size)
                for a, b in zip(times, sizes, strict=True)
            ]
        )
