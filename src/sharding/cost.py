"""Cost models: the time and the memory of a piece of a parameter, which policies level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from functional_optim.core.brief import brief
from sharding.spec import ParameterSpec
from sharding.steppers import Stepper, flop_weights, state_weights
from sharding.weights import Costs, Weight, Weights

Cost = Callable[[Sequence[ParameterSpec]], Weights | Costs]
"""A cost model: one or two weights for each parameter. ``plan`` takes any function like this.

A parameter with blocks is given as one spec for each block.
"""


def costs_of(model: Cost, specs: Sequence[ParameterSpec]) -> Costs:
    """Return what a cost model says, as a pair; one weight counts for both resources.

    Raises:
        TypeError: the model returned something else.
    """
    found: Any = model(specs)
    if isinstance(found, Weights):
        return Costs(found, found)
    if isinstance(found, Costs):
        return found
    raise TypeError(f"a cost model returns Weights or Costs, got {brief(found)}")


@dataclass(frozen=True)
class ElementCost:
    """Cost = number of elements. What torch's ZeroRedundancyOptimizer levels.

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
    """Cost = bytes that the owner holds: of the parameter, its gradient and its state.

    State is what ``optimizer.init`` makes, of any rule and with the overrides of each parameter,
    step counts included; it is measured on the meta device. A frozen parameter has neither
    gradient nor state.

    Args:
        optimizer: whose state it is, or a function from a :class:`~sharding.ParameterSpec` to its
            optimizer. None: no state.
        parameters: whether to count parameters.
        gradients: whether to count gradients.

    Raises:
        TypeError: when called, for an optimizer that is none.
        ValueError: when called, for a pointwise rule whose state does not grow evenly.

    Example::

        >>> from functional_optim import adamw
        >>> from sharding import ParameterSpec
        >>> specs = [ParameterSpec("w", (4, 5))]
        >>> ByteCost(adamw(), parameters=False, gradients=False)(specs).whole([20])
        [168]
    """

    optimizer: Stepper | None = None
    parameters: bool = True
    gradients: bool = True

    def __call__(self, specs: Sequence[ParameterSpec]) -> Weights:
        nothing = Weight(0)
        if self.optimizer is None:
            states: Sequence[Weight] = [nothing] * len(specs)
        else:
            states = state_weights(specs, self.optimizer)
        sums: dict[tuple[Weight, int], Weight] = {}
        weights = []
        for spec, kept in zip(specs, states, strict=True):
            state = kept if spec.requires_grad else nothing
            tensors = self.parameters + (self.gradients and spec.requires_grad)
            key = (state, tensors * spec.dtype.itemsize)
            weight = sums.get(key)
            if weight is None:
                # A whole parameter's state may be one sum; its own bytes still go by element.
                per_element = state.per_element + key[1]
                weight = sums[key] = state._replace(per_element=per_element)
            weights.append(weight)
        return Weights.of_each(weights)


@dataclass(frozen=True)
class FlopCost:
    """Cost = floating-point operations of a step.

    Rules of matrices declare their operations by shape: of Muon, five Newton-Schulz iterations on a
    matrix with sides ``s <= l`` take ``5 (4 s^2 l + 2 s^3)``. Of all other rules, the operations on
    each element are counted. Frozen parameters cost nothing.

    Args:
        optimizer: whose step it is, or a function from a :class:`~sharding.ParameterSpec` to its
            optimizer.

    Raises:
        TypeError: when called, for an optimizer that is none.
        ValueError: when called, for a rule that multiplies matrices and declares no FLOPs.

    Example::

        >>> from functional_optim import muon
        >>> from sharding import ParameterSpec
        >>> FlopCost(muon())([ParameterSpec("w", (2, 3), kind="per_matrix")]).whole([6])
        [320]
    """

    optimizer: Stepper

    def __call__(self, specs: Sequence[ParameterSpec]) -> Weights:
        nothing = Weight(0)
        pairs = zip(specs, flop_weights(specs, self.optimizer), strict=True)
        return Weights.of_each([one if spec.requires_grad else nothing for spec, one in pairs])


@dataclass(frozen=True)
class StepCost:
    """Cost = the pair of the time of a step and the memory: :class:`FlopCost`, :class:`ByteCost`.

    Args:
        optimizer: as for both.

    Raises:
        TypeError, ValueError: as for both.

    Example::

        >>> from functional_optim import muon
        >>> from sharding import ParameterSpec
        >>> specs = [ParameterSpec(name, (4, 4), kind="per_matrix") for name in "ab"]
        >>> StepCost(muon())(specs).time.whole([16, 16])
        [1920, 1920]
    """

    optimizer: Stepper

    def __call__(self, specs: Sequence[ParameterSpec]) -> Costs:
        return Costs(FlopCost(self.optimizer)(specs), ByteCost(self.optimizer)(specs))
