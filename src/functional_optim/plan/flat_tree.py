"""Arguments of a step of a tree, flattened at once."""

from contextlib import suppress
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

import optree
from torch import Tensor

from functional_optim._torch import is_functorch_wrapped_tensor
from functional_optim.core.leaf import PLAIN
from functional_optim.core.state import LeafState, Shared, State
from functional_optim.core.tree import flatten

_NONE = type(None)
_LEAVES = PLAIN | {_NONE}
_STEP, _STAGES, _GATES = attrgetter("step"), attrgetter("stages"), attrgetter("gates")

_SPECS: dict[tuple[int, str], optree.PyTreeSpec] = {}
"""The structure that a tree of parameters had last, by its identity: it is compared each time."""

_TREES = 64
"""Of how many trees that is kept."""


class FlatTree(NamedTuple):
    """Parameters, gradients and state of a step, each as a list."""

    spec: optree.PyTreeSpec
    state_form: Any
    """All that is in the state but its tensors; to be compared with others'."""
    tensors: list[Tensor]
    """All parameters, then all tensors of the state."""
    gradients: list[Tensor]
    """Those that there are."""
    missing: bytes
    """Which there are not; empty where none is missing."""
    nothing: tuple[int, ...]
    """The places of None among the leaves."""

    def without_tensors(self) -> "FlatTree":
        """Return the structure without tensors, to be compared with others."""
        return self._replace(tensors=[], gradients=[])

    @property
    def is_plain(self) -> bool:
        """Return True if all tensors have memory of their own, unlike those of torch.func."""
        return not any(map(is_functorch_wrapped_tensor, [*self.tensors, *self.gradients]))

    def gradient_of_each(self) -> list[Tensor | None] | None:
        """The gradient of each parameter; None where there is one of what is no parameter."""
        found = iter(self.gradients)
        every: list[Any] = self.gradients
        if self.missing:
            every = [None if is_missing else next(found) for is_missing in self.missing]
        if not self.nothing:
            return every
        if any(every[place] is not None for place in self.nothing):
            return None
        return [one for place, one in enumerate(every) if place not in self.nothing]


def flat_tree(
    namespace: str, params: Any, grads: Any, state: Any, *, in_place: bool = False
) -> FlatTree | None:
    """Flatten a step's arguments; None if no plan is for them.

    Args:
        namespace: of optree.
        in_place: whether nothing is made of the structure, so that one dict may be said to be
            another with the same keys, as it was last time.
        params: a tree of parameters.
        grads: the same tree with gradients.
        state: of an optimizer.
    """
    if not isinstance(state, State):
        return None
    leaves, spec = (_flattened if in_place else flatten)(params, namespace)
    try:
        found: list[Any] = spec.flatten_up_to(grads)
        held = _flat_state(spec.flatten_up_to(state.leaves), state.shared)
    except (TypeError, ValueError):  # other trees: whoever looks closer says so
        return None
    if held is None:
        return None
    nothing: tuple[int, ...] = ()
    if _NONE in map(type, leaves):
        nothing = tuple([place for place, one in enumerate(leaves) if one is None])
        leaves = [one for one in leaves if one is not None]
    missing = b""
    if _NONE in map(type, found):
        missing = bytes([one is None for one in found])
        found = [one for one in found if one is not None]
    if not found or not PLAIN.issuperset(map(type, (*leaves, *found))):
        return None
    tensors, form = held
    return FlatTree(spec, form, [*leaves, *tensors], found, missing, nothing)


def _flattened(params: Any, namespace: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """Parameters and their structure, which is tried first as it was last time."""
    key = id(params), namespace
    known = _SPECS.get(key)
    if known is not None:
        with suppress(ValueError):
            leaves: list[Any] = known.flatten_up_to(params)
            if _LEAVES.issuperset(map(type, leaves)):
                return leaves, known
    if len(_SPECS) >= _TREES:
        _SPECS.clear()
    leaves, spec = flatten(params, namespace)
    _SPECS[key] = spec
    return leaves, spec


def _flat_state(states: list[Any], shared: Any) -> tuple[list[Tensor], Any] | None:
    """The tensors of leaf states, and all else that is in these; None where that is not known.

    Without Python for each leaf: optree, which knows of any tree, takes three times as long.
    """
    present = states
    if _NONE in map(type, states):
        present = [one for one in states if one is not None]
    if not {LeafState}.issuperset(map(type, present)):
        return None
    stages, gates = list(map(_STAGES, present)), list(map(_GATES, present))
    records = [*chain.from_iterable(stages), *chain.from_iterable(gates)]
    if isinstance(shared, Shared):
        records += [(shared.step,), *shared.stages, shared.opened]
    form: list[Any] = [list(map(type, states)), list(map(len, stages)), list(map(len, gates))]
    form += [type(shared), list(map(type, records))]
    tensors: list[Any] = list(map(_STEP, present))
    values: list[Any] = list(chain.from_iterable(records))
    while values:  # fields may be lists of tensors, or records of their own
        kinds = list(map(type, values))
        plain = list(map(PLAIN.__contains__, kinds))
        tensors += compress(values, plain)
        form.append(kinds)
        if all(plain):
            break
        if not all(issubclass(one, (tuple, list)) for one in {*kinds} - PLAIN):
            return None
        within = list(compress(values, map(not_, plain)))
        form.append(list(map(len, within)))
        values = list(chain.from_iterable(within))
    return tensors, form
