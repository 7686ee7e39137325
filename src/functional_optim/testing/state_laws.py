"""Laws of state: separate memory, names, and the hyper-parameters that determine its fields."""

from typing import Any

from torch import Tensor

from functional_optim.core.aliasing import storage_key
from functional_optim.core.stage import Stage
from functional_optim.core.state_init import compute_fields, field_hypers
from functional_optim.core.torch_state import from_entries
from functional_optim.testing.compare import require_same, tensors_in
from functional_optim.testing.runs import Run
from functional_optim.testing.subject import Subject, named_state


def named(subject: Subject, run: Run) -> None:
    """A state that is written to named entries, as in checkpoints, is read back unchanged."""
    optimizer, params = subject.build(run), run.params()
    state = optimizer.init(params)
    for grads in run.grads():
        params, state = optimizer.update(params, grads, state)
        for name, leaf in state.leaves.items():
            if int(leaf.step) == 0:
                continue  # the first step creates this state again
            entries = named_state(optimizer, name, params[name], leaf)
            chain = optimizer.chain_at((name,), tuple(params[name].shape))
            again = from_entries(chain.stages, chain.hypers, params[name], entries, name)
            require_same(f"the state of {name!r} and that of its names", again, leaf)


def own_memory(subject: Subject, run: Run) -> None:
    """Results of ``init`` and ``update`` share no memory with arguments, or with each other.

    The exception is a leaf without a gradient, which ``update`` returns unchanged. Two calls of
    ``init`` share no memory either.
    """
    built = subject.build(run)
    # The reference executor returns the tensors of the rule. A compiled loop may copy them.
    for executor in dict.fromkeys(("reference", built.executor)):
        optimizer = built.using(executor=executor)
        params = run.params()
        state = optimizer.init(params)
        _require_separate("init", state, (params, optimizer.init(params)))
        for grads in run.grads():
            new_params, new_state = optimizer.update(params, grads, state)
            stepped = [
                (new_params[name], new_state.leaves[name])
                for name, grad in grads.items()
                if grad is not None
            ]
            _require_separate("update", stepped, (params, grads, state))
            params, state = new_params, new_state


def _require_separate(what: str, result: Any, arguments: Any) -> None:
    """Check that no tensor of a result shares memory with an argument or another tensor."""
    storages = {storage_key(one) for one in tensors_in(arguments) if isinstance(one, Tensor)}
    addresses: set[tuple[int, int]] = set()
    for one in tensors_in(result):
        address = storage_key(one), one.storage_offset()
        shares = "an argument" if address[0] in storages else "another result"
        is_separate = address[0] not in storages and address not in addresses
        assert is_separate, (
            f"{what} returns a tensor of shape {tuple(one.shape)} that shares memory with "
            f"{shares}: what is written to the one changes the other"
        )
        addresses.add(address)


def declared_fields(subject: Subject, run: Run) -> None:
    """Fields of the state depend only on hyper-parameters that ``state_depends_on`` names."""
    shapes = {tuple(one.shape): one for one in run.params().values()}
    for stage, hyper in {link.stage: link.hyper for link in subject.build(run).links}.items():
        declared = field_hypers(stage)
        free = [one for one in hyper._fields if one not in declared] if stage.stateful else []
        of_shapes = {shape: _fields_or_none(stage, hyper, shape, shapes[shape]) for shape in shapes}
        known = {shape: fields for shape, fields in of_shapes.items() if fields is not None}
        for name in free if known else ():
            for value in _other_values(getattr(hyper, name)):
                other = hyper._replace(**{name: value})
                for shape, fields in known.items():
                    found = _fields_or_none(stage, other, shape, shapes[shape])
                    assert found is None or found == fields, (
                        f"{stage.name}: the state has other fields for {name}={value!r}, and "
                        f"state_depends_on does not name {name}"
                    )


def _other_values(value: Any) -> list[Any]:
    """Return values of the type of a hyper-parameter that often turn a feature on or off."""
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
    """Return the fields of the state of a stage; None if ``init`` refuses the hyper-parameters."""
    try:
        return compute_fields((stage,), (hyper,), shape, param.dtype)
    except (TypeError, ValueError, ZeroDivisionError):
        return None
