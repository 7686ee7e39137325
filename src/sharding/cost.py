"""Cost models: what a piece of a parameter weighs, which policies then level over the ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sharding.footprint import Stepper, Weight, state_weights
from sharding.spec import ParameterSpec


@dataclass(frozen=True, slots=True)
class Weights:
    """A :class:`Weight` for every parameter, as a cost model returns it; many share one.

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
    """For each parameter, the place of its weight in ``kinds``."""

    @classmethod
    def of_each(cls, weights: Sequence[Weight]) -> "Weights":
        """Gathered from one weight for each parameter."""
        places: dict[Weight, int] = {}
        kind = tuple(places.setdefault(weight, len(places)) for weight in weights)
        return cls(tuple(places), kind)

    def whole(self, numels: Sequence[int]) -> list[int]:
        """The cost of every parameter, whole."""
        return self.of(range(len(numels)), numels)

    def of(self, parameters: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """The cost of pieces, given the parameter and the number of elements of each."""
        if len(self.kinds) == 1:
            one = self.kinds[0]
            if one.per_block == 0:  # the usual case, without a call for each
                a, once = one.per_element, one.per_piece
                return [a * n + once for n in lengths]
        kinds, kind = self.kinds, self.kind
        return [kinds[kind[i]].of(n) for i, n in zip(parameters, lengths, strict=True)]


Cost = Callable[[Sequence[ParameterSpec]], Weights]
"""A cost model: weights for all parameters. Any function like this may be given to ``plan``."""


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
class ComputeCost:
    """Cost = floating-point operations of a step, for rules that multiply matrices.

    A per_matrix parameter of shape (m, ...), seen as a matrix of s rows and l >= s columns, costs
    ``iterations * (4 s^2 l + 2 s^3)``: the three products of a Newton-Schulz iteration, X X^T
    (2 s^2 l), its square (2 s^3) and its product with X (2 s^2 l). Pointwise parameters, and
    vectors, cost ``per_element`` for each element. Frozen ones cost nothing.

    Args:
        iterations: Newton-Schulz iterations of a step.
        per_element: operations for each element of a pointwise rule.

    Raises:
        ValueError: a number below 1.

    Example::

        >>> from sharding import ParameterSpec
        >>> specs = [ParameterSpec("w", (2, 3), kind="per_matrix"), ParameterSpec("b", (2,))]
        >>> ComputeCost()(specs).whole([6, 2])
        [320, 24]

    Reference:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    iterations: int = 5
    per_element: int = 12

    def __post_init__(self) -> None:
        """Refuse counts that are none."""
        for name, value in (("iterations", self.iterations), ("per_element", self.per_element)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")

    def __call__(self, specs: Sequence[ParameterSpec]) -> Weights:
        return Weights.of_each([self._weight(spec) for spec in specs])

    def _weight(self, spec: ParameterSpec) -> Weight:
        if not spec.requires_grad:
            return Weight(0)
        if spec.kind == "pointwise" or len(spec.shape) < 2 or spec.numel == 0:
            return Weight(self.per_element)
        rows = spec.shape[0]
        short, long = sorted((rows, spec.numel // rows))
        return Weight(0, per_piece=self.iterations * (4 * short**2 * long + 2 * short**3))
