"""What a step of a tree is given, flattened at once."""

from typing import Any, NamedTuple

import optree
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor
from functional_optim.core.state import State
from functional_optim.core.tree import flatten
from functional_optim.plan.guard import PLAIN

_NONE = type(None)


class FlatTree(NamedTuple):
    """Parameters, gradients and state of a step, each as a list."""

    spec: optree.PyTreeSpec
    state_spec: optree.PyTreeSpec
    tensors: list[Tensor]
    """All parameters, then all tensors of the state."""
    gradients: list[Tensor]
    """Those that there are."""
    missing: bytes
    """Which there are not; empty where none is missing."""
    nothing: tuple[int, ...]
    """The places of None among the leaves, then those of the state's."""

    def without_tensors(self) -> "FlatTree":
        """The same, to be compared with others."""
        return self._replace(tensors=[], gradients=[])

    @property
    def is_plain(self) -> bool:
        """Whether all tensors have memory of their own: none is torch.func's, or a compiler's."""
        return not any(map(is_functorch_wrapped_tensor, [*self.tensors, *self.gradients]))

    def gradient_of_each(self) -> list[Tensor | None] | None:
        """The gradient of each parameter; None where there is one of what is no parameter."""
        found = iter(self.gradients)
        every: list[Any] = self.gradients
        if self.missing:
            every = [None if is_missing else next(found) for is_missing in self.missing]
        without = {place for place in self.nothing if place < self.spec.num_leaves}
        if not without:
            return every
        if any(every[place] is not None for place in without):
            return None
        return [one for place, one in enumerate(every) if place not in without]

    def unflattened(self, tensors: list[Tensor]) -> tuple[Any, State]:
        """Parameters and state of other tensors."""
        every: list[Any] = tensors
        if self.nothing:
            every = list(tensors)
            for place in self.nothing:
                every.insert(place, None)
        count = self.spec.num_leaves
        state: Any = self.state_spec.unflatten(every[count:])
        return self.spec.unflatten(every[:count]), state


def flat_tree(namespace: str, params: Any, grads: Any, state: Any) -> FlatTree | None:
    """What is given; None where no plan is for it.

    Args:
        namespace: of optree.
        params: a tree of parameters.
        grads: the same tree with gradients.
        state: of an optimizer.
    """
    if not isinstance(state, State):
        return None
    leaves, spec = flatten(params, namespace)
    held, state_spec = flatten(state, namespace)
    try:
        found: list[Any] = spec.flatten_up_to(grads)
    except ValueError:  # other trees: whoever looks closer says so
        return None
    tensors: list[Any] = [*leaves, *held]
    nothing: tuple[int, ...] = ()
    if _NONE in map(type, tensors):
        nothing = tuple([place for place, one in enumerate(tensors) if one is None])
        tensors = [one for one in tensors if one is not None]
    missing = b""
    if _NONE in map(type, found):
        missing = bytes([one is None for one in found])
        found = [one for one in found if one is not None]
    if not found or not PLAIN.issuperset(map(type, (*tensors, *found))):
        return None
    return FlatTree(spec, state_spec, tensors, found, missing, nothing)
