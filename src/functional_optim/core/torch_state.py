"""Conversions between leaf states and the state dicts of torch.optim, without copying tensors."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.checks import check_leaf_state, check_step_count
from functional_optim.core.format import format_value
from functional_optim.core.hyper import is_plain, resolve
from functional_optim.core.links import gate_names, state_names
from functional_optim.core.stage import Stage
from functional_optim.core.state import GateCounts, LeafState, state_tensors
from functional_optim.core.state_init import (
    cache_plain,
    compute_fields,
    field_hypers,
    init_leaf,
)
from functional_optim.core.state_reinit import starts_as_param


class _FieldKeys(NamedTuple):
    """Keys of a field of a stage's state in a state dict."""

    name: str
    keys: tuple[str, ...]
    """One key for each tensor: the name, or ``name[index]`` in a list of several tensors."""
    optional: bool
    """True if the field is a list, which may be empty."""
    dtype: torch.dtype | None
    """The dtype; None if there is no tensor."""

    def is_unused(self, key: str) -> bool:
        """Return True for a key of this field from another option, if the field is empty now."""
        return not self.keys and key.partition("[")[0] == self.name


class EntryLayout(NamedTuple):
    """Keys of a parameter's state in a state dict."""

    classes: tuple[Any, ...]
    """The class of the state of each stage; None for a stage without state."""
    fields: tuple[tuple[_FieldKeys, ...], ...]
    """The fields of each stage."""
    every: tuple[_FieldKeys, ...]
    """The fields of all stages."""
    gates: tuple[tuple[str, str], ...]
    """The keys of the counts of each gate."""
    counts: frozenset[str]
    """The keys of the counts of all gates."""
    every_key: tuple[str, ...]
    """All keys in order: the step count, the counts of gates, the fields."""
    dtypes: Mapping[str, torch.dtype]
    """The dtypes of all fields, by key."""

    def entries(self, state: LeafState) -> dict[str, Tensor]:
        """Return the tensors of a state by key, the step count first."""
        counts = chain.from_iterable(state.gates)
        tensors = [state.step, *counts, *state_tensors(state.stages)]
        return dict(zip(self.every_key, tensors, strict=True))

    def check_counts(self, entries: Mapping[str, Any], name: str) -> None:
        """Raise ValueError if a step count in a state dict is no whole number >= 0."""
        for key in ("step", *self.counts):
            check_step_count(entries.get(key), key, name)

    def check_complete(self, entries: Mapping[str, Any], name: str) -> None:
        """Raise ValueError if a loaded parameter was stepped, and has only a step count.

        Step counts must be whole numbers.
        """
        self.check_counts(entries, name)
        if self.dtypes and has_begun(entries) and entries.keys() <= {"step", *self.counts}:
            raise ValueError(
                f"the state of {name} was stepped {int(entries.get('step', 0))} times, and "
                f"this checkpoint has no {', '.join(self.dtypes)} for it; if it comes from "
                "torch.distributed.checkpoint, pass get_optimizer_state_dict(model, optimizer) to "
                "dcp.load, since dcp.load reads only entries that the given state dict has"
            )

    def state(self, tensors: Iterable[Tensor]) -> LeafState:
        """Return the state with these tensors, in the order of the keys."""
        left, stages, gates = iter(tensors), list[Any](), list[GateCounts]()
        step = next(left)
        for _ in self.gates:  # comprehensions are calls
            gates.append(GateCounts(next(left), next(left)))
        for kind, fields in zip(self.classes, self.fields, strict=True):
            values: list[Any] = []
            for field in fields:
                own = list(islice(left, len(field.keys))) if field.optional else next(left)
                values.append(own)
            stages.append(() if kind is None else kind(*values))
        return LeafState(step, tuple(stages), tuple(gates))


def _compute_layout(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> EntryLayout:
    """Return the keys of the state of parameters of a shape and a dtype."""
    fields_of_stages = compute_fields(stages, hypers, shape, dtype)
    found = tuple(
        tuple(
            _FieldKeys(name, _keys(name, field.tensors), field.tensors is not None, field.dtype)
            for name, field in zip(names, fields, strict=True)
        )
        for names, fields in zip(state_names(stages), fields_of_stages, strict=True)
    )
    every, gates = tuple(chain.from_iterable(found)), tuple(gate_names(stages))
    classes = tuple(stage.state if stage.stateful else None for stage in stages)
    dtypes = {key: one.dtype for one in every if one.dtype is not None for key in one.keys}
    counts, keys = tuple(chain.from_iterable(gates)), [key for one in every for key in one.keys]
    return EntryLayout(
        classes, found, every, gates, frozenset(counts), ("step", *counts, *keys), dtypes
    )


entry_layout = cache_plain(_compute_layout)
"""Cached :func:`_compute_layout`."""


def entry_layouts(
    stages: Sequence[Stage], hypers: Sequence[Any], params: Sequence[Tensor]
) -> list[EntryLayout]:
    """Return :func:`entry_layout` for each parameter: one object for one shape and dtype."""
    kinds = [(param.shape, param.dtype) for param in params]
    found = {kind: entry_layout(stages, hypers, *kind) for kind in dict.fromkeys(kinds)}
    return [found[kind] for kind in kinds]


def _keys(name: str, tensors: int | None) -> tuple[str, ...]:
    if tensors is None or tensors == 1:
        return (name,)
    return tuple(f"{name}[{index}]" for index in range(tensors))


def to_entries(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor, state: LeafState
) -> dict[str, Tensor]:
    """Return the state of one parameter as a state dict of torch.optim, ``step`` first.

    Tensors are not copied. An empty list has no entry.
    """
    return entry_layout(stages, hypers, param.shape, param.dtype).entries(state)


def from_entries(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
    *,
    group_step: Any = None,
    reinit: bool = False,
    counted: bool = False,
    layout: EntryLayout | None = None,
) -> LeafState:
    """Return a leaf state with the tensors of ``entries``: the inverse of :func:`to_entries`.

    A parameter without entries has the state of ``init``. If no coefficient depends on the step,
    and the count is 0 or missing (SGD, Muon), a parameter with a buffer counts as stepped once.

    Args:
        group_step: the step count of the parameter group, in classes that have one. It is used for
            parameters without a count.
        reinit: True if state with the count 0 is initialized again in the first step. Then values
            that start as the parameter or a hyper-parameter may differ from it.
        counted: True if the count in ``entries`` is known to be right, for any values.
        layout: the result of :func:`entry_layout` for the parameter, if the caller has it.
    """
    if layout is None:
        layout = entry_layout(stages, hypers, param.shape, param.dtype)
    counts, wanted = layout.counts, layout.dtypes.keys()
    check_step_count(group_step, "step", name)
    layout.check_counts(entries, name)
    # As in torch, entries of an option that is off now are ignored.
    odd = entries.keys() - layout.every_key
    unused = {key for key in odd if any(field.is_unused(key) for field in layout.every)}
    given = {
        key: value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value
        for key, value in entries.items()
        if key != "step" and key not in unused and key not in counts and value is not None
    }
    if given and given.keys() != wanted:
        other = given.keys() - wanted
        raise ValueError(
            f"the state of {name!r} does not fit this optimizer: it has {sorted(given)}, wanted is "
            f"{sorted(wanted)} (differing: {', '.join(sorted(given.keys() ^ wanted))}); "
            + (
                "load the state dict of the equivalent optimizer"
                if other
                else "if an option needs more state now, set it when the optimizer is constructed, "
                "or load a state dict that has this state"
            )
        )
    for key, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the state of {name!r} has {format_value(value)} as {key!r}, but must have a "
                "tensor: load the state dict of the equivalent optimizer"
            )
    if wanted and not given:
        return _state_without_tensors(stages, hypers, param, entries, group_step, layout)
    step = entries.get("step", group_step)
    is_counted = counted and step is not None
    if given and not is_counted and (step is None or int(step) == 0) and not has_begun(entries):
        step = _steps_of_uncounted(stages, hypers, param, given, name, step, reinit)
    numbers = [0 if step is None else step]
    numbers += [entries.get(key, 0) for names in layout.gates for key in names]
    # torch.optim casts a 0-d state to the dtype of the parameter when it loads the state.
    values = [
        given[key].to(dtype) if dtype != param.dtype and given[key].dim() == 0 else given[key]
        for key, dtype in layout.dtypes.items()
    ]
    state = layout.state([*map(_as_step, numbers), *values])
    check_leaf_state(stages, hypers, param, state, name)
    return state


def add_new_stages(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
) -> Mapping[str, Any]:
    """Return entries with the initial state of stages that have state since an option was changed.

    Entries of a parameter that was not stepped, or that has no state of other stages, are returned
    unchanged: :func:`from_entries` creates all of their state. Arguments are its arguments.
    """
    layout = entry_layout(stages, hypers, param.shape, param.dtype)
    missing = layout.dtypes.keys() - entries.keys()
    if not missing or len(missing) == len(layout.dtypes) or not has_begun(entries):
        return entries
    found = dict(entries)
    for stage, hyper, fields in zip(stages, hypers, layout.fields, strict=True):
        keys = [key for field in fields for key in field.keys]
        if not keys or not missing.issuperset(keys) or not all(one.optional for one in fields):
            continue
        if _depends_on_step([stage], [resolve(stage.name, stage.bounds, stage.check, hyper, 1.0)]):
            raise ValueError(
                f"the state of {name!r} has no {', '.join(keys)}, which {stage.name} needs since "
                f"{' or '.join(field_hypers(stage))} was changed. The first step of {stage.name} "
                "differs from its other steps, and a step count is kept for the whole chain only: "
                "change this option before the first step, or set dampening=0"
            )
        with torch.no_grad():
            found |= zip(
                keys, state_tensors(init_leaf([stage], [hyper], param).stages), strict=True
            )
    return found


def _state_without_tensors(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    group_step: Any,
    layout: EntryLayout,
) -> LeafState:
    """Return the state for entries that have no tensors, except counts."""
    with torch.no_grad():
        start = init_leaf(stages, hypers, param)
    late = not entries and not starts_in_first_step(stages, hypers, param)
    if late and group_step:  # a late parameter has the step count of its group
        return start._replace(step=_as_step(group_step))
    # An option that needs state was switched on. As in torch, the next step is then a first step,
    # unless the step count has another use, such as in a schedule.
    if has_begun(entries) and _depends_on_step(stages, hypers, after=1):
        gates = _gate_counts(layout, entries)
        return LeafState(_as_step(entries.get("step", 0)), start.stages, gates)
    return start


def _gate_counts(layout: EntryLayout, entries: Mapping[str, Any]) -> tuple[GateCounts, ...]:
    """Return the counts of each gate."""
    return tuple(
        [GateCounts(*(_as_step(entries.get(key, 0)) for key in names)) for names in layout.gates]
    )


def has_begun(entries: Mapping[str, Any]) -> bool:
    """Return True if the parameter of this state was stepped, or its stages up to a gate ran."""
    return any(
        int(value) > 0
        for key, value in entries.items()
        if (key == "step" or key.endswith(".runs")) and value is not None
    )


def _steps_of_uncounted(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    given: Mapping[str, Tensor],
    name: str,
    count: Any,
    reinit: bool,
) -> int:
    """Return the step count, 0 or 1, of a parameter with state whose count is 0 or missing.

    If the next step depends on a count that is not known, raise ValueError.
    """
    with torch.no_grad():
        start = to_entries(stages, hypers, param, init_leaf(stages, hypers, param))
    alike = [
        (key, value, start[key]) for key, value in given.items() if value.shape == start[key].shape
    ]
    filled = {k for k, one, own in alike if not torch.equal(one.to(own.device, own.dtype), own)}
    if starts_in_first_step(stages, hypers, param):
        # torch does not count steps of optimizers that create their state in the first step
        return int(bool(filled))
    if filled and reinit and count is not None:
        starts = chain.from_iterable(starts_as_param(stages, hypers, param.shape, param.dtype))
        keys = (
            key
            for field in entry_layout(stages, hypers, param.shape, param.dtype).every
            for key in field.keys
        )
        of_values = {key for key, is_one in zip(keys, starts, strict=True) if is_one}
        filled = {
            key
            for key in filled - of_values
            if not (_is_constant(start[key]) and _is_constant(given[key]))
        }
    if not filled:
        return 0
    # A class that does not count steps keeps the count 0 of a state dict that it has loaded.
    if not _depends_on_step(stages, hypers):
        return 1
    raise ValueError(
        f"the state of {name!r} was stepped ({', '.join(sorted(filled))} is not what it starts "
        f"as), but {'it has no step count' if count is None else 'its step count is 0'}, on which "
        "the next step depends: put the count under 'step' into the state of each parameter, or "
        "into its parameter group"
    )


def _is_constant(tensor: Tensor) -> bool:
    """Return True if all elements are one nonzero number, such as a hyper-parameter."""
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all()) and bool(tensor.any())


_PROBED_STEPS = (1.0, 2.0, 3.0, 10.0, 1e3, 1e6)


def _depends_on_step(stages: Sequence[Stage], hypers: Sequence[Any], *, after: int = 0) -> bool:
    """Return True if the coefficients of a chain differ between steps, or may differ.

    The first ``after`` steps are not compared.
    """
    if not all(map(is_plain, hypers)) or any(stage.combine is not None for stage in stages):
        return True
    pairs = list(zip(stages, hypers, strict=True))
    probed = _PROBED_STEPS[after:]
    made = [[stage.coefficients(step, hyper) for stage, hyper in pairs] for step in probed]
    return any(one != made[0] for one in made[1:])


def _as_step(count: Any) -> Tensor:
    """Return a count as a 0-d int64 tensor on the CPU; such a tensor is not copied."""
    if isinstance(count, Tensor) and count.dtype == torch.int64 and count.device.type == "cpu":
        return count.reshape(()) if count.dim() else count
    return torch.tensor(int(count), dtype=torch.int64, device="cpu")


def starts_in_first_step(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> bool:
    """Return True if torch creates all of the state in the first step, as SGD's momentum buffer.

    In torch, existing state then means that a step was made. This holds if all fields are optional.
    """
    fields = entry_layout(stages, hypers, param.shape, param.dtype).every
    if not all(field.optional for field in fields):
        return False
    # Optional fields that depend on no hyper-parameter depend on the shape of the parameter.
    return not fields or any(field_hypers(stage) for stage in stages if stage.stateful)
