"""What the hook and the optimizer of post-local SGD know of one another: by the parameters.

torch's keep two counts that only agree as long as nobody makes a mistake, and lose one of them in
checkpoints. Here the hook leaves a note at each parameter that it meets, and the optimizer that
steps these parameters finds it, and saves what the hook has to know.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hooks.averaging.reduced_buckets import ReducedBuckets

ITERATIONS, BUCKETS = "hook_iterations", "hook_buckets"
"""In a checkpoint: the hook's count; by their positions, the parameters of each bucket."""


class Counting(Protocol):
    """What is known of a hook."""

    iter: int
    """How many backward passes it has served."""
    start_localSGD_iter: int  # noqa: N815  torch's name
    """In how many of them gradients are averaged over all ranks."""
    buckets: ReducedBuckets[int]
    """In which gradients were averaged, by the ``id`` of parameters."""


class Loaded(NamedTuple):
    """What a hook goes on from."""

    iterations: int
    buckets: Sequence[Sequence[int]]

    def into(self, state: Counting, iterations: int) -> None:
        """Let a hook go on from the buckets, and from a number of iterations."""
        state.iter = iterations
        state.buckets.resume(self.buckets)


_HOOKS: Any = WeakIdKeyDictionary()
"""Weak references to the state of the hook that parameters have met."""
_LOADED: Any = WeakIdKeyDictionary()
"""What was loaded before a hook met its parameters."""


def met(state: Counting, params: Iterable[Tensor]) -> None:
    """A hook meets parameters: it is found by them, and goes on from what was loaded."""
    for param in params:
        _HOOKS[param] = ref(state)
        if param in _LOADED:
            loaded: Loaded = _LOADED.pop(param)
            loaded.into(state, max(state.iter, loaded.iterations))


def hooks_of(params: Iterable[Tensor]) -> list[Counting]:
    """The hooks that have met some of these parameters, each once."""
    found: dict[int, Counting] = {}
    for param in params:
        state = _HOOKS[param]() if param in _HOOKS else None
        if state is not None:
            found[id(state)] = state
    return list(found.values())


def saved(params: Sequence[Tensor]) -> dict[str, Any]:
    """What the hooks of these parameters are to go on from; empty where there is no hook.

    A bucket that has other parameters too is left out: nothing here says which they are.
    """
    hooks = hooks_of(params)
    if not hooks:
        return {}
    positions = {id(param): position for position, param in enumerate(params)}
    return {
        ITERATIONS: max(state.iter for state in hooks),
        BUCKETS: [
            [positions[key] for key in keys]
            for state in hooks
            for keys in state.buckets.buckets
            if positions.keys() >= set(keys)
        ],
    }


def load(params: Sequence[Tensor], found: Mapping[str, Any]) -> None:
    """Give a checkpoint to the hook that serves these parameters, now or later."""
    if ITERATIONS not in found:
        return
    buckets = [[id(params[position]) for position in one] for one in found.get(BUCKETS, ())]
    loaded = Loaded(int(found[ITERATIONS]), buckets)
    known = hooks_of(params)
    for state in known:
        loaded.into(state, loaded.iterations)
    if not known:
        for param in params:
            _LOADED[param] = loaded
