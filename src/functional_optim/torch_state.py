"""Leaf states and torch.optim's dicts of state: the same tensors under the same names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.checks import check_leaf_state
from functional_optim.engine import init_leaf
from functional_optim.stage import Stage
from functional_optim.state import LeafState


def field_keys(stages: Sequence[Stage]) -> list[dict[str, str]]:
    """For each stage, its state's fields and the keys under which torch-like dicts hold them.

    A key is the field's name, or ``stage.field`` where two stages have one of that name.
    """
    names = [field for stage in stages if stage.stateful for field in stage.state._fields]
    return [
        {
            field: field if names.count(field) == 1 else f"{stage.name}.{field}"
            for field in stage.state._fields
        }
        if stage.stateful
        else {}
        for stage in stages
    ]


def to_entries(stages: Sequence[Stage], state: LeafState) -> dict[str, Tensor]:
    """The state of one parameter as torch.optim keeps it, ``step`` first.

    The tensors are those of ``state``, not copies; a field that an option leaves out has no entry.
    """
    entries = {"step": state.step}
    for keys, one in zip(field_keys(stages), state.stages, strict=True):
        for field, key in keys.items():
            value = getattr(one, field)
            if not isinstance(value, list):
                entries[key] = value
            elif value:
                entries[key] = value[0]
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
    fresh = init_leaf(stages, hypers, param)
    wanted = to_entries(stages, fresh)
    del wanted["step"]
    if given.keys() != wanted.keys() and given:
        odd = sorted(given.keys() ^ wanted.keys())
        raise ValueError(
            f"the state of {name!r} does not fit this optimizer: it has {sorted(given)}, wanted is "
            f"{sorted(wanted)} (differing: {', '.join(odd)})"
        )
    if not given and wanted:
        return fresh
    step = entries.get("step")
    count = (1 if given else 0) if step is None else step
    state = LeafState(_as_step(count), _filled(stages, fresh, given))
    check_leaf_state(stages, hypers, param, state, name)
    return state


def _as_step(count: Any) -> Tensor:
    """A 0-d int64 tensor on the CPU; the same one if it is that already."""
    if isinstance(count, Tensor) and count.dtype == torch.int64 and count.device.type == "cpu":
        return count.reshape(())
    return torch.tensor(int(count), dtype=torch.int64)


def _filled(
    stages: Sequence[Stage], fresh: LeafState, given: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    filled = []
    for stage, keys, one in zip(stages, field_keys(stages), fresh.stages, strict=True):
        if not stage.stateful:
            filled.append(one)
            continue
        values: dict[str, Any] = {}
        for field, key in keys.items():
            there = getattr(one, field)
            if isinstance(there, list):
                values[field] = [given[key]] if there else []
            else:
                values[field] = given[key]
        filled.append(stage.state(**values))
    return tuple(filled)
