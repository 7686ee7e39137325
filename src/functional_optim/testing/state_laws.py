"""Laws of state: memory of its own, names, and the hyper-parameters that its fields depend on."""

from typing import Any

from torch import Tensor

from functional_optim.core.aliasing import storage_of
from functional_optim.core.initial import fields_depend_on, fields_of_any
from functional_optim.core.stage import Stage
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


def declared_fields(subject: Subject, run: Run) -> None:
    """``init`` makes the same fields for any value of what ``state_depends_on`` leaves out."""
    shapes = {tuple(one.shape): one for one in run.params().values()}
    for stage, hyper in {link.stage: link.hyper for link in subject.build(run).links}.items():
        declared = fields_depend_on(stage)
        for name in (one for one in hyper._fields if one not in declared and stage.stateful):
            for value in _others(getattr(hyper, name)):
                other = hyper._replace(**{name: value})
                for shape, param in shapes.items():
                    made = [_fields_or_none(stage, one, shape, param) for one in (hyper, other)]
                    assert None in made or made[0] == made[1], (
                        f"{stage.name}: the state has other fields for {name}={value!r}, and "
                        f"state_depends_on does not name {name}"
                    )


def _others(value: Any) -> list[Any]:
    """Return values of the kind of a hyper-parameter, those that often switch something off."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [0.0, 0.5, 1.0]
    if isinstance(value, int):
        return [1, 2, 100]
    if isinstance(value, tuple) and all(isinstance(one, float) for one in value):
        return [tuple(0.0 for _ in value), tuple(0.5 for _ in value)]
    return []


def _fields_or_none(stage: Stage, hyper: Any, shape: tuple[int, ...], param: Tensor) -> Any:
    """Return the fields of a stage's state; None where ``init`` refuses the hyper-parameters."""
    try:
        return fields_of_any((stage,), (hyper,), shape, param.dtype)
    except (TypeError, ValueError, ZeroDivisionError):
        return None
