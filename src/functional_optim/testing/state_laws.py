"""The laws of state: it lies in memory of its own, and under its names it is the same."""

from typing import Any

from torch import Tensor

from functional_optim.core.aliasing import storage_of
from functional_optim.core.torch_state import from_entries
from functional_optim.testing.compare import require_same, tensors_in
from functional_optim.testing.runs import Run
from functional_optim.testing.subject import Subject, named_state


def named(subject: Subject, run: Run) -> None:
    """By the names that dicts and checkpoints have for its tensors, a state is found again."""
    optimizer, params = subject.build(run), run.params()
    state = optimizer.init(params)
    for grads in run.grads():
        params, state = optimizer.update(params, grads, state)
        for name, leaf in state.leaves.items():
            if int(leaf.step) == 0:
                continue  # it is made anew, for the options of then
            entries = named_state(optimizer, name, params[name], leaf)
            chain = optimizer.chain_at((name,), tuple(params[name].shape))
            again = from_entries(chain.stages, chain.hypers, params[name], entries, name)
            require_same(f"the state of {name!r} and that of its names", again, leaf)


def own_memory(subject: Subject, run: Run) -> None:
    """Nothing that ``init`` or ``update`` returns shares memory with an argument, or with the rest.

    But a leaf that has no gradient, which is handed on as it is. Two calls of ``init`` share none
    either.
    """
    built = subject.build(run)
    # The reference hands on what the rule returns; a compiled loop may copy it.
    for optimizer in (built.using(executor="reference"), built):
        params = run.params()
        state = optimizer.init(params)
        _require_apart("init", state, (params, optimizer.init(params)))
        for grads in run.grads():
            new_params, new_state = optimizer.update(params, grads, state)
            made = [
                (new_params[name], new_state.leaves[name])
                for name, grad in grads.items()
                if grad is not None
            ]
            _require_apart("update", made, (params, grads, state))
            params, state = new_params, new_state


def _require_apart(what: str, made: Any, given: Any) -> None:
    """Results in memory of their own.

    Raises:
        AssertionError: names a tensor that is not.
    """
    arguments = {storage_of(one) for one in tensors_in(given) if isinstance(one, Tensor)}
    results: set[tuple[int, int]] = set()
    for one in tensors_in(made):
        place = storage_of(one), one.storage_offset()
        shares = "an argument" if place[0] in arguments else "another result"
        is_apart = place[0] not in arguments and place not in results
        assert is_apart, (
            f"{what} returns a tensor of shape {tuple(one.shape)} that shares memory with "
            f"{shares}: what is written to the one changes the other"
        )
        results.add(place)
