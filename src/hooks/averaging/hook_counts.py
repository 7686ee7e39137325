"""What the hook and the optimizer of post-local SGD know of one another: by the parameters.

torch's keep two counts that only agree as long as nobody makes a mistake, and lose one of them in
checkpoints. Here the hook leaves a note at each parameter that it meets, and the optimizer that
steps these parameters finds it.
"""

from collections.abc import Iterable
from typing import Any, Protocol
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Counting(Protocol):
    """What is known of a hook."""

    iter: int
    """How many backward passes it has served."""
    start_localSGD_iter: int  # noqa: N815  torch's name
    """In how many of them gradients are averaged over all ranks."""


_HOOKS: Any = WeakIdKeyDictionary()
"""Weak references to the state of the hook that parameters have met."""
_LOADED: Any = WeakIdKeyDictionary()
"""Counts that were loaded before a hook met its parameters."""


def met(state: Counting, params: Iterable[Tensor]) -> None:
    """A hook meets parameters: it is found by them, and goes on from a count that was loaded."""
    for param in params:
        _HOOKS[param] = ref(state)
        if param in _LOADED:
            state.iter = max(state.iter, _LOADED.pop(param))


def hooks_of(params: Iterable[Tensor]) -> list[Counting]:
    """The hooks that have met some of these parameters, each once."""
    found: dict[int, Counting] = {}
    for param in params:
        state = _HOOKS[param]() if param in _HOOKS else None
        if state is not None:
            found[id(state)] = state
    return list(found.values())


def load_count(params: Iterable[Tensor], count: int) -> None:
    """A count from a checkpoint, for the hook that serves these parameters, now or later."""
    params = list(params)
    known = hooks_of(params)
    for state in known:
        state.iter = count
    if not known:
        for param in params:
            _LOADED[param] = count
