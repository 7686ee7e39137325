"""Optimizer that evaluates the loss several times in a step, as a function of a flat vector.

A chain steps each parameter by its gradient. An algorithm such as L-BFGS searches along a line, so
its step takes a function of all parameters. Its optimizer has the methods of a chain's optimizer.
Front-ends that only have gradients refuse it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.constructor_calls import keywords
from functional_optim.core.derivatives import refuse_derivative
from functional_optim.core.dynamo import disable_compile
from functional_optim.core.flat_vector import (
    FlatVector,
    add_direction,
    flatten_grads,
    flatten_params,
)
from functional_optim.core.format import format_value
from functional_optim.core.hyper import build, hash_key
from functional_optim.core.stage_defaults import no_check
from functional_optim.core.tree import tensors_in

Point = Sequence[Tensor]
"""Values of all parameters."""

ValueAndGrad = Callable[[Any], tuple[Any, Any]]
"""Function from a tree of parameters to the loss and the tree of gradients."""


class ClosureProblem(NamedTuple):
    """Function that an algorithm minimizes. Gradients and directions are flat vectors."""

    evaluate: Callable[[Point], tuple[float, Tensor]]
    """Return the loss at a point, and its gradient as a flat vector."""
    move: Callable[[Point, Any, Tensor], Point]
    """Return ``point + t * direction`` for a number ``t`` and a flat vector ``direction``."""
    read: Callable[[Point], Point]
    """Return the point after its evaluation: a closure may project parameters in place."""


@dataclass(frozen=True, eq=False)
class ClosureRule:
    """Algorithm that evaluates the loss in its step.

    Args:
        name: of the constructor.
        hyper: NamedTuple of hyper-parameters.
        state: NamedTuple of the state. Its defaults are the state before the first step. The field
            ``checksum`` identifies the tree.
        step: pure function ``(problem, point, loss, grad, state, hyper) -> (point, state)``.
        vector: returns a flat vector of a state, or None before the first step.
        bounds: of hyper-parameters.
        check: raises an error for values that contradict each other.
    """

    name: str
    hyper: type
    state: type
    step: Callable[..., tuple[Point, Any]]
    vector: Callable[[Any], Tensor | None]
    bounds: tuple[tuple[str, Interval], ...] = ()
    check: Callable[[Any], None] = no_check

    def __call__(self, **values: Any) -> "ClosureOptimizer":
        """Return the optimizer with these hyper-parameters."""
        return ClosureOptimizer(self, _build_hyper(self, values))


def _build_hyper(rule: ClosureRule, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        if callable(value) and not isinstance(value, Tensor):
            raise TypeError(
                f"{rule.name}: {name} must be a number, got {format_value(value)}; a step has many "
                f"iterations and no step count: give update(..., {name}=...) its value, or use a "
                "scheduler of torch with TorchOptimizer"
            )
    return build(rule.name, rule.hyper, rule.bounds, rule.check, values)


@dataclass(frozen=True, eq=False, repr=False)
class ClosureOptimizer:
    """Optimizer whose step evaluates the loss several times, such as :func:`lbfgs`.

    It holds no parameter and no state, like :class:`~functional_optim.Optimizer`. Its state is one
    tuple for the flat vector of all parameters. The vector has the keys of dicts in order of
    insertion, as in ``dict(model.named_parameters())``.

    Chains, ``bind``, ``script``, ``stored``, ``export_step``, hooks, ZeRO and workers refuse it,
    since they only have gradients. A step is not differentiable, so torch.func is refused.

    Example::

        >>> import torch
        >>> from functional_optim import lbfgs
        >>> def value_and_grad(params):
        ...     return (params["w"] - 3.0).square().sum(), {"w": 2 * (params["w"] - 3.0)}
        >>> optimizer = lbfgs(line_search_fn="strong_wolfe")
        >>> params = {"w": torch.zeros(2)}
        >>> params, state = optimizer.update(
        ...     params, None, optimizer.init(params), value_and_grad=value_and_grad)
        >>> params["w"]
        tensor([3., 3.])
    """

    rule: ClosureRule
    values: Any
    namespace: str = ""

    @property
    def hyper(self) -> dict[str, Any]:
        """All hyper-parameters by the names that ``replace`` and ``update`` take."""
        return dict(self.values._asdict())

    def using(self, *, namespace: str) -> Self:
        """Return the optimizer for pytrees of another optree namespace."""
        return replace(self, namespace=namespace)

    def replace(self, **hyper: Any) -> Self:
        """Return a new optimizer with other hyper-parameters; this one does not change.

        Raises:
            TypeError: the optimizer does not have the name, or the value is a schedule.
            ValueError: a value is out of bounds.
        """
        return replace(self, values=_build_hyper(self.rule, {**self.hyper, **hyper}))

    def init(self, params: Any) -> Any:
        """Return the state before the first step.

        Args:
            params: a pytree of dense floating or complex tensors, or None, on one device.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: no tensor; the same tensor twice; an integer or sparse parameter; a DTensor;
                several devices.
        """
        return self.rule.state(checksum=flatten_params(params, self.namespace).checksum)

    @disable_compile
    def update(
        self,
        params: Any,
        grads: Any,
        state: Any,
        *,
        value_and_grad: ValueAndGrad | None = None,
        loss: Any = None,
        **hyper: Any,
    ) -> tuple[Any, Any]:
        """Return parameters and state after one step. The arguments do not change.

        Args:
            params: a pytree of parameters.
            grads: a tree like ``params`` with the gradients at ``params``; a missing gradient
                (None) counts as zeros. If ``grads`` is None, ``value_and_grad`` computes it.
            state: returned by ``init`` or the last ``update``.
            value_and_grad: function from a tree of parameters to ``(loss, grads)``. It is called
                with autograd enabled, and must not change its argument.
            loss: at ``params``. If it is None, ``value_and_grad`` computes it.
            hyper: hyper-parameters for this step only.

        Returns:
            ``(params, state)``.

        Raises:
            TypeError: no ``value_and_grad``; its result is not a pair; an unknown hyper-parameter.
            ValueError: different trees; a gradient of another shape, dtype or device; a state of
                another optimizer or tree; a value out of bounds.
        """
        if not callable(value_and_grad):
            raise TypeError(
                f"{self.rule.name} evaluates the loss several times in a step: give update(params, "
                "grads, state, value_and_grad=f) a function f(params) -> (loss, grads), got "
                f"{format_value(value_and_grad)}"
            )
        tree = flatten_params(params, self.namespace)
        own = self.replace(**hyper) if hyper else self
        given = [] if grads is None else [one for one in tree.gradients(grads) if one is not None]
        every = [*tree.params, *given, *tensors_in((state, loss))]
        numbers = [tuple(hyper.values()), tuple(own.values)]
        refuse_derivative(f"a step of {self.rule.name}", every, (), numbers)
        self.require_state(state, tree.checksum, tree.numel)
        problem = _problem(tree, params, value_and_grad, self.namespace)
        with torch.no_grad():
            point = [param.detach() for param in tree.params]
            grad = None if grads is None else flatten_grads(point, tree.gradients(grads))
            if grad is None or loss is None:
                value, found = problem.evaluate(point)
                loss, grad = value if loss is None else loss, found if grad is None else grad
            after, state = own.rule.step(problem, point, float(loss), grad, state, own.values)
        return tree.unflatten(after, params, self.namespace), state

    def require_state(self, state: Any, checksum: int, numel: int) -> None:
        """Raise ValueError if a state is from another algorithm or tree."""
        if not isinstance(state, self.rule.state):
            raise ValueError(
                f"state must be a {self.rule.state.__name__}, as init(params) and update return "
                f"it, got {format_value(state)}"
            )
        vector = self.rule.vector(state)
        kept: Any = state
        if kept.checksum != checksum or (vector is not None and vector.numel() != numel):
            raise ValueError(
                "the state is of another tree: it was made for parameters with other names, "
                "shapes or order of keys; use init(params)"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClosureOptimizer) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.rule.name, hash_key(tuple(self.values)), self.namespace

    def __repr__(self) -> str:
        text = f"{self.rule.name}({', '.join(keywords(self.hyper))})"
        return f"{text}.using(namespace={self.namespace!r})" if self.namespace else text

    if not TYPE_CHECKING:  # with __getattr__, type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or "rule" not in vars(self):  # copied or unpickled just now
                raise AttributeError(name)
            text = f"there is no .{name} of {_format_usage(self)}"
            raise AttributeError(text, name=name, obj=self)


def _problem(tree: FlatVector, like: Any, function: ValueAndGrad, namespace: str) -> ClosureProblem:
    """Return the problem of minimizing a function of a tree."""
    is_grad_enabled = torch.is_grad_enabled()

    def evaluate(point: Point) -> tuple[float, Tensor]:
        with torch.enable_grad():
            result: Any = function(tree.unflatten([one.detach() for one in point], like, namespace))
            if is_grad_enabled:
                refuse_derivative("a step by value_and_grad", tensors_in(result), (), ())
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(f"value_and_grad must return (loss, grads), got {format_value(result)}")
        loss, grads = result
        return float(loss), flatten_grads(point, tree.gradients(grads))

    return ClosureProblem(evaluate, add_direction, lambda point: point)


def refuse_closure(given: Any, what: str) -> None:
    """Raise TypeError for a :class:`ClosureOptimizer`; ``what`` names the caller."""
    if isinstance(given, ClosureOptimizer):
        raise TypeError(f"{what} cannot run {_format_usage(given)}")


def _format_usage(optimizer: ClosureOptimizer) -> str:
    name = optimizer.rule.name
    return (
        f"{name}, which evaluates the loss of all parameters several times in a step, and needs "
        "more than gradients; use update(params, grads, state, value_and_grad=f), or "
        f"TorchOptimizer(params, {name}(...)).step(closure)"
    )
