"""Leaf states and torch.optim's dicts of state: the same tensors under the same names."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.checks import check_leaf_state
from functional_optim.core.first_state import starts_as_param
from functional_optim.core.hyper import is_plain
from functional_optim.core.initial import (
    fields_depend_on,
    fields_of_any,
    init_leaf,
    kept_for_plain,
)
from functional_optim.core.links import gate_names, state_names
from functional_optim.core.stage import Stage
from functional_optim.core.state import GateCounts, LeafState, state_tensors


class _Keyed(NamedTuple):
    """The keys under which torch-like dicts hold a field of a stage's state."""

    name: str
    keys: tuple[str, ...]
    """One for each tensor: the name, or of several in a list the name and their place."""
    optional: bool
    """Whether it is a list: there for some options, or some shapes, only."""
    dtype: torch.dtype | None
    """The dtype; None where there is no tensor."""

    def left_behind(self, key: str) -> bool:
        """Return True if a key is of this field when an option was on that is off now."""
        return not self.keys and key.partition("[")[0] == self.name


class StateLayout(NamedTuple):
    """The keys under which torch-like dicts hold the state of a parameter."""

    kinds: tuple[Any, ...]
    """For each stage, the class of its state; None for a stage without state."""

    fields: tuple[tuple[_Keyed, ...], ...]
    """For each stage, its fields."""
    every: tuple[_Keyed, ...]
    """The fields of all stages."""
    wanted: frozenset[str]
    """The keys of all fields."""
    gates: tuple[tuple[str, str], ...]
    """For each gate, the keys of its counts."""
    counts: frozenset[str]
    """The keys of all gates."""
    every_key: tuple[str, ...]
    """All keys, in the order of a dict: the step count, the counts at gates, the fields."""
    dtypes: Mapping[str, torch.dtype]
    """The dtypes of all fields, by key."""

    def entries(self, state: LeafState) -> dict[str, Tensor]:
        """Return the tensors of a state by key, the step count first."""
        counts = chain.from_iterable(state.gates)
        tensors = [state.step, *counts, *state_tensors(state.stages)]
        return dict(zip(self.every_key, tensors, strict=True))


def _layout_of_any(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> StateLayout:
    """Return the keys of the state of parameters of a shape and a dtype."""
    layout = fields_of_any(stages, hypers, shape, dtype)
    found = tuple(
        tuple(
            _Keyed(name, _keys(name, field.tensors), field.tensors is not None, field.dtype)
            for name, field in zip(names, fields, strict=True)
        )
        for names, fields in zip(state_names(stages), layout, strict=True)
    )
    every, gates = tuple(chain.from_iterable(found)), tuple(gate_names(stages))
    dtypes = {key: one.dtype for one in every if one.dtype is not None for key in one.keys}
    counts, keys = tuple(chain.from_iterable(gates)), [key for one in every for key in one.keys]
    wanted, every_key = frozenset(keys), ("step", *counts, *keys)
    kinds = tuple(stage.state if stage.stateful else None for stage in stages)
    return StateLayout(kinds, found, every, wanted, gates, frozenset(counts), every_key, dtypes)


state_layout = kept_for_plain(_layout_of_any)
"""The same, from a cache where it may be kept."""


def _keys(name: str, tensors: int | None) -> tuple[str, ...]:
    if tensors is None or tensors == 1:
        return (name,)
    return tuple(f"{name}[{place}]" for place in range(tensors))


def kept_dtypes(
    stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> Mapping[str, torch.dtype]:
    """By key, the dtype of every tensor that the state of a parameter of this shape has."""
    return state_layout(stages, hypers, shape, dtype).dtypes


def to_entries(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor, state: LeafState
) -> dict[str, Tensor]:
    """The state of one parameter as torch.optim keeps it, ``step`` first.

    The tensors are those of ``state``, not copies; a field that an option leaves out has no entry.
    """
    return state_layout(stages, hypers, param.shape, param.dtype).entries(state)


def from_entries(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
    *,
    group_step: Any = None,
    begins_anew: bool = False,
    counted: bool = False,
    layout: StateLayout | None = None,
) -> LeafState:
    """The inverse of :func:`to_entries`: a leaf state that holds the tensors of ``entries``.

    A parameter without entries has not been stepped: its state is that of ``init``. Where nothing
    depends on the number of steps, and none is kept (SGD), a parameter with a buffer counts as
    stepped once.

    Args:
        stages: of the chain.
        hypers: its hyper-parameters.
        param: the parameter.
        entries: its state.
        name: of the parameter, for errors.
        group_step: the step count of classes that keep one for a whole parameter group, which
            counts for those of its parameters that have none of their own.
        begins_anew: whether state whose count is 0 is made anew in the first step, so that what
            starts as the parameter was, or as a hyper-parameter, may differ from it by now.
        counted: whether the count in ``entries`` is known to be right, whatever the values are.
        layout: the result of :func:`state_layout` for the parameter, if the caller has it.

    Raises:
        TypeError: an entry that is no tensor.
        ValueError: some entries are missing, unknown, or of another shape; or they are those of a
            parameter that was stepped, and nothing says how often.
    """
    if layout is None:
        layout = state_layout(stages, hypers, param.shape, param.dtype)
    counts, wanted = layout.counts, layout.wanted
    # What an option that is off has left behind is not used, as in torch.
    odd = entries.keys() - layout.every_key
    unused = {key for key in odd if any(field.left_behind(key) for field in layout.every)}
    given = {
        key: value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value
        for key, value in entries.items()
        if key != "step" and key not in unused and key not in counts and value is not None
    }
    if given and given.keys() != wanted:
        raise ValueError(
            f"the state of {name!r} does not fit this optimizer: it has {sorted(given)}, wanted is "
            f"{sorted(wanted)} (differing: {', '.join(sorted(given.keys() ^ wanted))})"
        )
    for key, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the state of {name!r} has {brief(value)} as {key!r}, and a tensor is kept there"
            )
    if wanted and not given:
        with torch.no_grad():
            start = init_leaf(stages, hypers, param)
        late = not entries and not starts_in_first_step(stages, hypers, param)
        # In a class that counts for a group, one that comes late is at the step of the others.
        return start._replace(step=_as_step(group_step)) if late and group_step else start
    step = entries.get("step", group_step)
    is_counted = counted and step is not None
    if given and not is_counted and (step is None or int(step) == 0) and not has_begun(entries):
        made = _steps_of_uncounted(stages, hypers, param, given, name, step, begins_anew)
        step = made if step is None or int(step) != made else step  # plans know a count by itself
    states: list[Any] = []
    for kind, fields in zip(layout.kinds, layout.fields, strict=True):
        values: list[Any] = []
        for field in fields:  # a comprehension is a call
            values.append(_value(field, given, param.dtype))  # noqa: PERF401
        states.append(() if kind is None else kind(*values))
    gates = tuple(
        [GateCounts(*(_as_step(entries.get(key, 0)) for key in names)) for names in layout.gates]
    )
    state = LeafState(_as_step(0 if step is None else step), tuple(states), gates)
    check_leaf_state(stages, hypers, param, state, name)
    return state


def has_begun(entries: Mapping[str, Any]) -> bool:
    """Return True if a parameter with this state was stepped, or has come as far as a gate."""
    return any(
        int(value) > 0
        for key, value in entries.items()
        if key == "step" or (key.endswith(".runs") and value is not None)
    )


def _steps_of_uncounted(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    given: Mapping[str, Tensor],
    name: str,
    count: Any,
    begins_anew: bool,
) -> int:
    """The steps of a parameter that has a state, and a count of 0 or none.

    Raises:
        ValueError: it was stepped, and how often decides what comes next.
    """
    if starts_in_first_step(stages, hypers, param):
        # torch counts no steps where it makes the state in the first one
        return int(any(bool(value.any()) for value in given.values()))
    start = _start(stages, hypers, param)
    filled = {key for key, value in given.items() if not _same_values(value, start[key])}
    if filled and begins_anew and count is not None:
        starts = chain.from_iterable(starts_as_param(stages, hypers, param.shape, param.dtype))
        keys = (
            key
            for field in state_layout(stages, hypers, param.shape, param.dtype).every
            for key in field.keys
        )
        of_values = {key for key, is_one in zip(keys, starts, strict=True) if is_one}
        filled = {
            key
            for key in filled - of_values
            if not (_is_one_number(start[key]) and _is_one_number(given[key]))
        }
    if not filled:
        return 0
    if count is None and not _depends_on_step(stages, hypers):
        return 1
    raise ValueError(
        f"the state of {name!r} was stepped ({', '.join(sorted(filled))} is not what it starts "
        f"as), but {'it has no step count' if count is None else 'its step count is 0'}, on which "
        "the next step depends: put the count under 'step' into the state of each parameter, or "
        "into its parameter group"
    )


def _start(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> dict[str, Tensor]:
    """The state before the first step, as entries."""
    with torch.no_grad():
        return to_entries(stages, hypers, param, init_leaf(stages, hypers, param))


def _is_one_number(tensor: Tensor) -> bool:
    """Return True if it is filled with one number, as by a hyper-parameter that it starts as."""
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all()) and bool(tensor.any())


def _same_values(value: Tensor, start: Tensor) -> bool:
    """Return True if a tensor has the value of its field before the first step, of any shape."""
    if value.shape != start.shape:
        return True
    return torch.equal(value.to(start.device, start.dtype), start)


_PROBED_STEPS = (1.0, 2.0, 3.0, 10.0, 1e3, 1e6)


def _depends_on_step(stages: Sequence[Stage], hypers: Sequence[Any]) -> bool:
    """Return True if the coefficients of a chain are others at other steps."""
    if not all(map(is_plain, hypers)) or any(stage.combine is not None for stage in stages):
        return True
    pairs = list(zip(stages, hypers, strict=True))
    made = [[stage.coefficients(step, hyper) for stage, hyper in pairs] for step in _PROBED_STEPS]
    return any(one != made[0] for one in made[1:])


def _value(
    field: _Keyed, given: Mapping[str, Tensor], param_dtype: torch.dtype
) -> Tensor | list[Tensor]:
    if field.dtype == param_dtype and not field.optional:
        return given[field.name]
    found = [given[key] for key in field.keys]
    if field.dtype != param_dtype:
        # Where torch loads a number that has a dtype of its own, it gives it the parameter's.
        found = [one.to(field.dtype) if one.dim() == 0 else one for one in found]
    return found if field.optional else found[0]


def _as_step(count: Any) -> Tensor:
    """A 0-d int64 tensor on the CPU; the same one if it is that already."""
    if isinstance(count, Tensor) and count.dtype == torch.int64 and count.device.type == "cpu":
        return count.reshape(()) if count.dim() else count
    return torch.tensor(int(count), dtype=torch.int64, device="cpu")


def starts_in_first_step(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> bool:
    """Return True if all state is there for an option only, as SGD's momentum buffer is.

    torch makes such state in the first step and takes what it finds for a later one's.
    """
    fields = state_layout(stages, hypers, param.shape, param.dtype).every
    if not all(field.optional for field in fields):
        return False
    # Fields that no hyper-parameter decides are there in any case, for parameters of some shapes.
    return not fields or any(fields_depend_on(stage) for stage in stages if stage.stateful)
