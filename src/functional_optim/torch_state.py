"""Leaf states and torch.optim's dicts of state: the same tensors under the same names."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.checks import check_leaf_state
from functional_optim.engine import init_leaf
from functional_optim.stage import Stage
from functional_optim.state import LeafState


class _Field(NamedTuple):
    """A field of a stage's state, and the key under which torch-like dicts hold it."""

    name: str
    key: str
    optional: bool
    """Whether it is a list: there for some options only."""
    present: bool
    """Whether it is there with the hyper-parameters at hand."""


@lru_cache(maxsize=256)
def _fields(
    stages: tuple[Stage, ...], hypers: tuple[Any, ...], dims: int
) -> tuple[tuple[_Field, ...], ...]:
    """For each stage its fields.

    A key is the field's name, or ``stage.field`` where two stages have one of that name.
    """
    names = [field for stage in stages if stage.stateful for field in stage.state._fields]
    probe = init_leaf(stages, hypers, torch.empty((0,) * dims))
    return tuple(
        tuple(
            _Field(
                field,
                field if names.count(field) == 1 else f"{stage.name}.{field}",
                isinstance(value, list),
                not isinstance(value, list) or len(value) > 0,
            )
            for field, value in zip(getattr(one, "_fields", ()), one, strict=True)
        )
        for stage, one in zip(stages, probe.stages, strict=True)
    )


def to_entries(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor, state: LeafState
) -> dict[str, Tensor]:
    """The state of one parameter as torch.optim keeps it, ``step`` first.

    The tensors are those of ``state``, not copies; a field that an option leaves out has no entry.
    """
    entries = {"step": state.step}
    layout = _fields(tuple(stages), tuple(hypers), param.dim())
    for fields, one in zip(layout, state.stages, strict=True):
        for field, value in zip(fields, one, strict=True):
            if field.present:
                entries[field.key] = value[0] if field.optional else value
    return entries


def from_entries(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
) -> LeafState:
    """The inverse of :func:`to_entries`: a leaf state that holds the tensors of ``entries``.

    A parameter without entries has not been stepped: its state is that of ``init``. Where torch
    keeps no step count (SGD), a parameter with a buffer counts as stepped once.

    Raises:
        ValueError: some entries are missing, unknown, or of another shape.
    """
    given = {key: value for key, value in entries.items() if value is not None and key != "step"}
    layout = _fields(tuple(stages), tuple(hypers), param.dim())
    wanted = {field.key for fields in layout for field in fields if field.present}
    if given and given.keys() != wanted:
        odd = sorted(given.keys() ^ wanted)
        raise ValueError(
            f"the state of {name!r} does not fit this optimizer: it has {sorted(given)}, wanted is "
            f"{sorted(wanted)} (differing: {', '.join(odd)})"
        )
    if wanted and not given:
        return init_leaf(stages, hypers, param)
    step = entries.get("step", 1 if given else 0)
    states = tuple(
        stage.state(*(_value(field, given) for field in fields)) if stage.stateful else ()
        for stage, fields in zip(stages, layout, strict=True)
    )
    state = LeafState(_as_step(step), states)
    check_leaf_state(stages, hypers, param, state, name)
    return state


def _value(field: _Field, given: Mapping[str, Tensor]) -> Tensor | list[Tensor]:
    if not field.optional:
        return given[field.key]
    return [given[field.key]] if field.present else []


def _as_step(count: Any) -> Tensor:
    """A 0-d int64 tensor on the CPU; the same one if it is that already."""
    if isinstance(count, Tensor) and count.dtype == torch.int64 and count.device.type == "cpu":
        return count.reshape(()) if count.dim() else count
    return torch.tensor(int(count), dtype=torch.int64)
