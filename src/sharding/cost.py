"""Cost models: the time and the memory of a piece of a parameter, which policies balance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from functional_optim.engine.messages import format_value
from sharding.optimizer_costs import OptimizerOrFactory, flop_weight, state_weight, weigh
from sharding.spec import ParameterSpec
from sharding.weights import Costs, Weight, Weights

Cost = Callable[[Sequence[ParameterSpec]], Weights | Costs]
"""Cost model: returns one or two weights for each parameter.

For a parameter with blocks, the argument has one spec for each block.
"""


def costs_of(model: Cost, specs: Sequence[ParameterSpec]) -> Costs:
    """Call a cost model. If it returns one weight, use it for both resources."""
    found: Any = model(specs)
    if isinstance(found, Weights):
        return Costs(found, found)
    if isinstance(found, Costs):
        return found
    raise TypeError(f"a cost model returns Weights or Costs, got {format_value(found)}")


@dataclass(frozen=True)
class ElementCost:
    """Cost = number of elements, as in torch's ZeroRedundancyOptimizer.

    Example::

        >>> from sharding import ParameterSpec
        >>> specs = [ParameterSpec("w", (4, 5)), ParameterSpec("b", (5,))]
        >>> ElementCost()(specs).whole([spec.numel for spec in specs])
        [20, 5]
    """

    def __call__(self, specs: Sequence[ParameterSpec]) -> Weights:
        return Weights((Weight(1),), (0,) * len(specs))


@dataclass(frozen=True)
class ByteCost:
    """Cost = bytes that the owner stores: of the parameter, its gradient and its state.

    The state is that of ``optimizer.init``, of any rule, with the overrides of each parameter and
    the step counts. It is measured on the meta device. A frozen parameter has neither gradient nor
    state.

    Args:
        optimizer: of the state, or a function from a :class:`~sharding.ParameterSpec` to its
            optimizer. None: no state.
        parameters: True to count parameters.
        gradients: True to count gradients.

    Raises:
        TypeError: when called, if ``optimizer`` is not an optimizer.
        ValueError: when called, if the state of a pointwise rule is not linear in the elements.

    Example::

        >>> from functional_optim import adamw
        >>> from sharding import ParameterSpec
        >>> specs = [ParameterSpec("w", (4, 5))]
        >>> ByteCost(adamw(), parameters=False, gradients=False)(specs).whole([20])
        [168]
    """

    optimizer: OptimizerOrFactory | None = None
    parameters: bool = True
    gradients: bool = True

    def __call__(self, specs: Sequence[ParameterSpec]) -> Weights:
        nothing = Weight(0)
        if self.optimizer is None:
            states: Sequence[Weight] = [nothing] * len(specs)
        else:
            states = weigh(specs, self.optimizer, state_weight)
        sums: dict[tuple[Weight, int], Weight] = {}
        weights = []
        for spec, own in zip(specs, states, strict=True):
            state = own if spec.requires_grad else nothing
            tensors = self.parameters + (self.gradients and spec.requires_grad)
            key = (state, tensors * spec.dtype.itemsize)
            if key not in sums:
                # The state of a whole matrix is counted per piece, its own bytes per element.
                sums[key] = state._replace(per_element=state.per_element + key[1])
            weights.append(sums[key])
        return Weights.of_each(weights)


@dataclass(frozen=True)
class FlopCost:
    """Cost = floating-point operations of a step.

    Rules of matrices declare their operations by shape: Muon's five Newton-Schulz iterations on a
    matrix with sides ``s <= l`` take ``5 (4 s^2 l + 2 s^3)``. For other rules, the operations per
    element are counted. Frozen parameters cost nothing.

    Args:
        optimizer: of the step, or a function from a :class:`~sharding.ParameterSpec` to its
            optimizer.

    Raises:
        TypeError: when called, if ``optimizer`` is not an optimizer.
        ValueError: when called, if a rule multiplies matrices and declares no FLOPs.

    Example::

        >>> from functional_optim import muon
        >>> from sharding import ParameterSpec
        >>> FlopCost(muon())([ParameterSpec("w", (2, 3), kind="per_matrix")]).whole([6])
        [320]
    """

    optimizer: OptimizerOrFactory

    def __call__(self, specs: Sequence[ParameterSpec]) -> Weights:
        nothing = Weight(0)
        pairs = zip(specs, weigh(specs, self.optimizer, flop_weight), strict=True)
        return Weights.of_each([one if spec.requires_grad else nothing for spec, one in pairs])


@dataclass(frozen=True)
class StepCost:
    """Cost = time of a step and memory, as a pair: :class:`FlopCost` and :class:`ByteCost`.

    Args:
        optimizer: as for both cost models.

    Raises:
        TypeError, ValueError: as for both cost models.

    Example::

        >>> from functional_optim import muon
        >>> from sharding import ParameterSpec
        >>> specs = [ParameterSpec(name, (4, 4), kind="per_matrix") for name in "ab"]
        >>> StepCost(muon())(specs).time.whole([16, 16])
        [1920, 1920]
    """

    optimizer: OptimizerOrFactory

    def __call__(self, specs: Sequence[ParameterSpec]) -> Costs:
        return Costs(FlopCost(self.optimizer)(specs), ByteCost(self.optimizer)(specs))
