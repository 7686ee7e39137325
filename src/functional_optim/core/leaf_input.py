"""Declaration of an input beside the gradient that is one tensor for each leaf."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class LeafInput(NamedTuple):
    """A tensor beside the gradient that a stage takes for each leaf, such as a Hessian's diagonal.

    It has the shape, dtype and device of the parameter, and stands in the field of its name in the
    stage's state, which is annotated ``list[Tensor]``: ``[tensor]`` in a step that is given it, and
    ``[]`` in one that is not, and between steps. So it is in no checkpoint, and whether it is given
    is a choice that a rule may branch on. A rule reads it, and hands it back.

    Args:
        name: of the field, and in ``update(..., extra={name: tree like params})``.
        required: whether each step in which the stage runs needs it; a front-end that plans its
            steps then has a place in memory for it. Otherwise all leaves that the stage acts on
            have it, or none, and no memory is held between steps.

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
    """Make sure that each input has a field in the state: a list, which is empty between steps.

    Raises:
        ValueError: names the input that has none.
    """
    for one in inputs:
        kind = getattr(state, "__annotations__", {}).get(one.name, "no field")
        if kind != list[Tensor]:
            what = kind if isinstance(kind, str) else getattr(kind, "__name__", repr(kind))
            raise ValueError(
                f"{stage}: the input {one.name!r} of each leaf stands in a field of the state of "
                f"that name, annotated list[Tensor], and that is {what}: add it, and let init "
                "leave it []"
            )
