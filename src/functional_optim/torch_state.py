"""Leaf states and torch.optim's dicts of state: the same tensors under the same names."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.checks import check_leaf_state
from functional_optim.initial import fields_of, init_leaf
from functional_optim.links import state_names
from functional_optim.stage import Stage
from functional_optim.state import LeafState


class _Keyed(NamedTuple):
    """The key under which torch-like dicts hold a field of a stage's state."""

    key: str
    optional: bool
    """Whether it is a list: there for some options only."""
    present: bool
    """Whether it is there with the hyper-parameters at hand."""
    dtype: torch.dtype | None
    """The dtype; None where there is no tensor."""


def _keyed(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> list[list[_Keyed]]:
    """For each stage the keys of its fields."""
    layout = fields_of(stages, hypers, param.dim(), param.dtype)
    return [
        [
            _Keyed(name, field.tensors is not None, field.tensors != 0, field.dtype)
            for name, field in zip(names, fields, strict=True)
        ]
        for names, fields in zip(state_names(stages), layout, strict=True)
    ]


def kept_dtypes(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor
) -> dict[str, torch.dtype | None]:
    """By key, the dtype of every tensor that the state of a parameter has."""
    return {
        field.key: field.dtype
        for fields in _keyed(stages, hypers, param)
        for field in fields
        if field.present
    }


def to_entries(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor, state: LeafState
) -> dict[str, Tensor]:
    """The state of one parameter as torch.optim keeps it, ``step`` first.

    The tensors are those of ``state``, not copies; a field that an option leaves out has no entry.
    """
    entries = {"step": state.step}
    layout = _keyed(stages, hypers, param)
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
    layout = _keyed(stages, hypers, param)
    wanted = {field.key for fields in layout for field in fields if field.present}
    # What an option that is off has left behind is not used, as in torch.
    unused = {field.key for fields in layout for field in fields if not field.present}
    given = {
        key: value.to_dense() if value.is_sparse else value
        for key, value in entries.items()
        if key != "step" and key not in unused and value is not None
    }
    if given and given.keys() != wanted:
        odd = sorted(given.keys() ^ wanted)
        raise ValueError(
            f"the state of {name!r} does not fit this optimizer: it has {sorted(given)}, wanted is "
            f"{sorted(wanted)} (differing: {', '.join(odd)})"
        )
    if wanted and not given:
        with torch.no_grad():
            return init_leaf(stages, hypers, param)
    step = entries.get("step", 0)
    if (
        int(step) == 0
        and starts_in_first_step(stages, hypers, param)
        and any(bool(value.any()) for value in given.values())
    ):
        step = 1  # torch counts no steps where it makes the state in the first one
    states = tuple(
        stage.state(*(_value(field, given) for field in fields)) if stage.stateful else ()
        for stage, fields in zip(stages, layout, strict=True)
    )
    state = LeafState(_as_step(step), states)
    check_leaf_state(stages, hypers, param, state, name)
    return state


def _value(field: _Keyed, given: Mapping[str, Tensor]) -> Tensor | list[Tensor]:
    if not field.optional:
        return given[field.key]
    return [given[field.key]] if field.present else []


def _as_step(count: Any) -> Tensor:
    """A 0-d int64 tensor on the CPU; the same one if it is that already."""
    if isinstance(count, Tensor) and count.dtype == torch.int64 and count.device.type == "cpu":
        return count.reshape(()) if count.dim() else count
    return torch.tensor(int(count), dtype=torch.int64, device="cpu")


def starts_in_first_step(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> bool:
    """Whether all state is there for an option only, as SGD's momentum buffer is.

    torch makes such state in the first step and takes what it finds for a later one's.
    """
    fields = [field for one in _keyed(stages, hypers, param) for field in one]
    return all(field.optional for field in fields)


def torch_step(step: Tensor) -> Tensor:
    """A step count as torch.optim keeps it: 0-d, on the CPU, in the dtype torch gives scalars."""
    wide = torch.get_default_dtype() == torch.float64 or int(step) > 2**24
    return step.to(device="cpu", dtype=torch.float64 if wide else torch.float32)
