"""Declaration of an input that is one tensor for each leaf, in addition to the gradient."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class LeafInput(NamedTuple):
    """Tensor that a stage takes for each leaf, such as the diagonal of the Hessian.

    The tensor has the shape, dtype and device of the parameter. The stage's state has a field of
    this name, annotated ``list[Tensor]``. The field is ``[tensor]`` in a step with the input, and
    ``[]`` in other steps and between steps, so checkpoints do not contain it. A rule may branch on
    the length, reads the tensor, and returns the field unchanged.

    Args:
        name: of the field, and in ``update(..., extra={name: tree like params})``.
        required: True if each step in which the stage runs needs the input. Planned steps then keep
            memory for it. Otherwise all leaves of the stage have it, or none; no memory is kept.

    Example::

        >>> import torch
        >>> from typing import NamedTuple
        >>> from functional_optim import LeafInput, Rule, chain
        >>> class WeightedHyper(NamedTuple):
        ...     lr: float
        >>> class WeightedState(NamedTuple):
        ...     weight: list[Tensor]
        >>> def weighted(param: Tensor, grad: Tensor, state: WeightedState, c: WeightedHyper):
        ...     return param - c.lr * state.weight[0] * grad, state
        >>> rule = Rule(
        ...     name="weighted", hyper=WeightedHyper, state=WeightedState, rule=weighted,
        ...     init=lambda param, hyper: WeightedState([]), inputs=(LeafInput("weight"),))
        >>> optimizer, params = chain(rule(lr=1.0)), torch.zeros(2)
        >>> extra = {"weight": torch.tensor([1.0, 3.0])}
        >>> optimizer.update(params, torch.ones(2), optimizer.init(params), extra=extra)[0]
        tensor([-1., -3.])
    """

    name: str
    required: bool = True


def require_fields(stage: str, state: Any, inputs: Iterable[LeafInput]) -> None:
    """Raise ValueError if the state lacks a field ``list[Tensor]`` for an input."""
    for one in inputs:
        kind = getattr(state, "__annotations__", {}).get(one.name, "no field")
        if kind != list[Tensor]:
            what = kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
            raise ValueError(
                f"{stage}: the input {one.name!r} of each leaf needs a field {one.name!r} of the "
                f"state, annotated list[Tensor], got {what}: add the field, and let init set it "
                "to []"
            )
