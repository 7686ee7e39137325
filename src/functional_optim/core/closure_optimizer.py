"""Optimizer that evaluates the loss itself, several times in a step: one function on a flat vector.

A chain steps each parameter by its gradient. An algorithm such as L-BFGS searches along a line, so
a step takes a function of all parameters. That is another kind of optimizer, with the same outward
methods, and every front-end that has gradients only refuses it in one sentence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import optree
import torch
from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.brief import brief
from functional_optim.core.compiling import uncompiled
from functional_optim.core.derivatives import refuse_derivative
from functional_optim.core.flat_vector import FlatVector, flat_gradient, flat_tree, moved
from functional_optim.core.hyper import build, frozen
from functional_optim.core.spelling import keywords

Point = Sequence[Tensor]
"""Values of all parameters."""

ValueAndGrad = Callable[[Any], tuple[Any, Any]]
"""Function from a tree of parameters to the loss and the tree of gradients."""


class ClosureProblem(NamedTuple):
    """Function that an algorithm minimizes; the algorithm sees its argument as a flat vector."""

    evaluate: Callable[[Point], tuple[float, Tensor]]
    """Return the loss at a point, and its gradient as a flat vector."""
    move: Callable[[Point, Any, Tensor], Point]
    """Return ``point + t * direction`` for a number ``t`` and a flat vector ``direction``."""
    read: Callable[[Point], Point]
    """Return the point as its evaluation has left it: a closure may project parameters in place."""


def _accept(hyper: Any) -> None:
    """Accept any combination of values."""


@dataclass(frozen=True, eq=False)
class ClosureRule:
    """Algorithm that evaluates the loss itself.

    Args:
        name: of its constructor.
        hyper: NamedTuple of its hyper-parameters.
        state: NamedTuple of its state; its defaults are the state before the first step. It has a
            field ``checksum``, which tells trees apart.
        step: pure function ``(problem, point, loss, grad, state, hyper) -> (point, state)``.
        vector: returns a flat vector of a state, or None before the first step.
        bounds: of hyper-parameters.
        check: refuses values that contradict each other.
    """

    name: str
    hyper: type
    state: type
    step: Callable[..., tuple[Point, Any]]
    vector: Callable[[Any], Tensor | None]
    bounds: tuple[tuple[str, Interval], ...] = ()
    check: Callable[[Any], None] = _accept

    def __call__(self, **values: Any) -> "ClosureOptimizer":
        """Return the optimizer with these hyper-parameters."""
        return ClosureOptimizer(self, _built(self, values))


def _built(rule: ClosureRule, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        if callable(value) and not isinstance(value, Tensor):
            raise TypeError(
                f"{rule.name}: {name} must be a number, got {brief(value)}; a step has many "
                f"iterations and no step count: give update(..., {name}=...) its value, or use a "
                "scheduler of torch with TorchOptimizer"
            )
    return build(rule.name, rule.hyper, rule.bounds, rule.check, values)


@dataclass(frozen=True, eq=False, repr=False)
class ClosureOptimizer:
    """Optimizer whose step evaluates the loss several times, such as :func:`lbfgs`.

    It holds no parameter and no state, as :class:`~functional_optim.Optimizer`. Its state belongs
    to no parameter: it is one tuple over the flat vector of all parameters. Keys of dicts are in
    order of insertion there, as in ``dict(model.named_parameters())``.

    What has gradients alone cannot run it: chains, ``bind``, ``script``, ``stored``,
    ``export_step``, hooks, ZeRO and workers refuse it. A step is not differentiable: torch.func is
    refused.

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
        """Every hyper-parameter by the name under which ``replace`` and ``update`` take it."""
        return dict(self.values._asdict())

    def using(self, *, namespace: str) -> Self:
        """Return the optimizer over nodes of another optree namespace."""
        return replace(self, namespace=namespace)

    def replace(self, **hyper: Any) -> Self:
        """Return a new optimizer with other hyper-parameters; this one does not change.

        Raises:
            TypeError: a name that the optimizer does not have, or a schedule.
            ValueError: a value out of bounds.
        """
        return replace(self, values=_built(self.rule, {**self.hyper, **hyper}))

    def init(self, params: Any) -> Any:
        """Return the state before the first step.

        Args:
            params: a pytree of dense floating or complex tensors, or None, on one device.

        Raises:
            TypeError: a leaf that is no tensor.
            ValueError: no tensor; one at two places; an integer or sparse parameter; a DTensor;
                several devices.
        """
        return self.rule.state(checksum=flat_tree(params, self.namespace).checksum)

    @uncompiled
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
        """Return parameters and state after one step; nothing that is handed in changes.

        Args:
            params: a pytree of parameters.
            grads: the same tree with the gradient at ``params``, or None, in place of each
                parameter; a missing gradient counts as zeros. Or None for all of it: then
                ``value_and_grad`` is called at ``params`` first.
            state: returned by ``init`` or the last ``update``.
            value_and_grad: function from such a tree to ``(loss, grads)``. It is called with
                autograd on, and must not change its argument.
            loss: at ``params``, if it is known; otherwise ``value_and_grad`` computes it.
            hyper: hyper-parameters for this step only.

        Returns:
            ``(params, state)``.

        Raises:
            TypeError: no ``value_and_grad``; a result that is no pair; an unknown
                hyper-parameter.
            ValueError: trees that differ; a gradient of another shape, dtype or device; a state of
                another optimizer or tree; a value out of bounds.
        """
        if not callable(value_and_grad):
            raise TypeError(
                f"{self.rule.name} evaluates the loss several times in a step: give update(params, "
                "grads, state, value_and_grad=f) a function f(params) -> (loss, grads), got "
                f"{brief(value_and_grad)}"
            )
        tree = flat_tree(params, self.namespace)
        own = self.replace(**hyper) if hyper else self
        given = [] if grads is None else [one for one in tree.gradients(grads) if one is not None]
        every = [*tree.params, *given, *_tensors_in((state, loss))]
        numbers = [tuple(hyper.values()), tuple(own.values)]
        refuse_derivative(f"a step of {self.rule.name}", every, (), numbers)
        self.require_state(state, tree.checksum, tree.numel)
        problem = _problem(tree, params, value_and_grad, self.namespace)
        with torch.no_grad():
            point = [param.detach() for param in tree.params]
            grad = None if grads is None else flat_gradient(point, tree.gradients(grads))
            if grad is None or loss is None:
                value, found = problem.evaluate(point)
                loss, grad = value if loss is None else loss, found if grad is None else grad
            after, state = own.rule.step(problem, point, float(loss), grad, state, own.values)
        return tree.tree_of(after, params, self.namespace), state

    def require_state(self, state: Any, checksum: int, numel: int) -> None:
        """Make sure that a state is of this algorithm, and of a tree.

        Raises:
            ValueError: a state of another optimizer or tree.
        """
        if not isinstance(state, self.rule.state):
            raise ValueError(
                f"state must be a {self.rule.state.__name__}, as init(params) and update return "
                f"it, got {brief(state)}"
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
        return self.rule.name, frozen(tuple(self.values)), self.namespace

    def __repr__(self) -> str:
        text = f"{self.rule.name}({', '.join(keywords(self.hyper))})"
        return f"{text}.using(namespace={self.namespace!r})" if self.namespace else text

    if not TYPE_CHECKING:  # a type checker refuses any attribute that the class lacks

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or "rule" not in vars(self):  # copied or unpickled just now
                raise AttributeError(name)
            text = f"there is no .{name} of {_way_to_step(self)}"
            raise AttributeError(text, name=name, obj=self)


def _problem(tree: FlatVector, like: Any, function: ValueAndGrad, namespace: str) -> ClosureProblem:
    """Return a function of a tree as a function of the values of its parameters."""
    is_followed = torch.is_grad_enabled()

    def evaluate(point: Point) -> tuple[float, Tensor]:
        with torch.enable_grad():
            made = function(tree.tree_of([one.detach() for one in point], like, namespace))
            if is_followed:
                refuse_derivative("a step by value_and_grad", _tensors_in(made), (), ())
        return _checked_pair(tree, point, made)

    return ClosureProblem(evaluate, moved, _unchanged)


def _unchanged(point: Point) -> Point:
    return point


def _checked_pair(tree: FlatVector, point: Point, made: Any) -> tuple[float, Tensor]:
    """Return loss and flat gradient of what ``value_and_grad`` returned."""
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise TypeError(f"value_and_grad must return (loss, grads), got {brief(made)}")
    loss, grads = made
    return float(loss), flat_gradient(point, tree.gradients(grads))


def _tensors_in(value: Any) -> list[Tensor]:
    return [one for one in optree.tree_leaves(value) if isinstance(one, Tensor)]


def refuse_closure(given: Any, what: str) -> None:
    """Refuse an optimizer that evaluates the loss itself.

    Args:
        given: what the caller gave as an optimizer.
        what: name of the caller, which cannot run it.

    Raises:
        TypeError: it is a :class:`ClosureOptimizer`; the error says what to use instead.
    """
    if isinstance(given, ClosureOptimizer):
        raise TypeError(f"{what} cannot run {_way_to_step(given)}")


def _way_to_step(optimizer: ClosureOptimizer) -> str:
    name = optimizer.rule.name
    return (
        f"{name}, which evaluates the loss of all parameters several times in a step, and needs "
        "more than gradients; use update(params, grads, state, value_and_grad=f), or "
        f"TorchOptimizer(params, {name}(...)).step(closure)"
    )
