"""State of one algorithm from any storage to any other, by way of its plain values.

A field is plain in float32, under the name that it has in torch.optim. What is decoded is encoded
again to the same bits, so the way from a storage to itself changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState
from functional_optim.core.torch_state import from_entries, kept_dtypes
from functional_optim.storage.layout import Layout, field_name
from functional_optim.storage.param_storage import EXTRAS, extras_for
from functional_optim.storage.state_storage import BLOCK, STATE_STORAGES
from functional_optim.storage.stored import StoredRule, StoredTransform

STEP = "step"
_SCALE = STATE_STORAGES["int8"].suffixes[1]


class PlainForm(NamedTuple):
    """A chain as it was before it was stored, and what its state is."""

    stages: tuple[Stage, ...]
    hypers: tuple[Any, ...]
    dtypes: Mapping[str, torch.dtype]
    """Of each field of state, by its name."""
    stored: bool
    """Whether the chain keeps it in other forms."""
    extras: tuple[str, ...]
    """What the chain keeps of the parameter: a master, or a compensation."""


class FieldTensors(NamedTuple):
    """Names of the tensors of a stored field."""

    values: str
    scale: str | None
    """Where it was in 8 bits: of what the values of a block are multiplied by."""


def plain_form(
    stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> PlainForm:
    """The plain form of a chain, stored or not, for parameters of a shape.

    Args:
        stages: of the chain.
        hypers: its hyper-parameters.
        shape: of the parameter.
        dtype: of the parameter.
    """
    plain: list[Stage] = []
    values: list[Any] = []
    extras: tuple[str, ...] = ()
    for stage, hyper in zip(stages, hypers, strict=True):
        layout = layout_of_stage(stage)
        if layout is None:
            plain.append(stage)
            values.append(hyper)
        else:
            plain += layout.plan.stages
            values += layout.hypers(hyper)
            extras += layout.extras
    stored = any(layout_of_stage(stage) is not None for stage in stages)
    wide = torch.float32 if stored else dtype
    dtypes = kept_dtypes(plain, values, shape, wide)
    return PlainForm(tuple(plain), tuple(values), dtypes, stored, extras)


def layout_of_stage(stage: Stage) -> Layout | None:
    """Return the layout of a stored stage; None for a stage that is not stored."""
    return stage.layout if isinstance(stage, (StoredRule, StoredTransform)) else None


def plain_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of a chain before it was stored."""
    found: list[Stage] = []
    for stage in stages:
        layout = layout_of_stage(stage)
        found += [stage] if layout is None else layout.plan.stages
    return tuple(found)


def parts_of(fields: Collection[str], names: Collection[str]) -> dict[str, FieldTensors]:
    """Under which of these names each field is kept; a field that is not there is left out.

    Args:
        fields: names of plain fields.
        names: of the tensors at hand, in whatever storage.
    """
    found = {}
    for field in fields:
        for base in (field, field_name(field)):
            if base in names:
                scale = base + _SCALE
                is_scale = scale in names and scale not in fields
                found[field] = FieldTensors(base, scale if is_scale else None)
                break
    return found


def extras_in(names: Collection[str], fields: Collection[str]) -> list[str]:
    """Return those of these names that belong to a parameter's storage."""
    return [name for name in EXTRAS if name in names and name not in fields]


def decoded(entries: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Entries of a state from any storage, as plain ones.

    Args:
        entries: by name, of a parameter or of a part of it that begins with a block.
        fields: names of the plain fields.

    Returns:
        The fields under their plain names; all else, such as ``step`` and what a storage keeps of
        the parameter, as it is.

    Raises:
        ValueError: values and scales that do not belong together.
    """
    parts = parts_of(fields, entries)
    used = {name for one in parts.values() for name in one}
    found: dict[str, Any] = {key: value for key, value in entries.items() if key not in used}
    for field, (values, scale) in parts.items():
        found[field] = _decoded(entries[values], entries[scale] if scale else None, field)
    return found


def _decoded(values: Any, scale: Any, field: str) -> Any:
    if not isinstance(values, Tensor):
        return values
    if scale is None:
        return STATE_STORAGES["bfloat16"].decode((values,)) if _is_short(values) else values
    blocks = -(-values.numel() // BLOCK)
    if values.dtype != torch.uint8 or scale.numel() != blocks:
        raise ValueError(
            f"{field} has {values.numel()} elements of {values.dtype} and {scale.numel()} scales: "
            f"8-bit state is torch.uint8, with a scale for each {BLOCK} elements ({blocks})"
        )
    return STATE_STORAGES["int8"].decode((values, scale.to(values.device, torch.float32)))


def _is_short(values: Tensor) -> bool:
    return values.dtype in (torch.bfloat16, torch.float16)


def encoded(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
    *,
    group_step: Any = None,
) -> LeafState:
    """Plain entries as a chain keeps them.

    Each is within the error of its storage, rounded to nearest. What the chain keeps of the
    parameter is what the entries have of the same kind. Otherwise it is made of the parameter, and
    of what another storage kept of it: a master of a parameter alone is the parameter, a
    compensation zero.

    Args:
        stages: of the chain, stored or not.
        hypers: its hyper-parameters.
        param: the parameter, or the part that the entries are of; it is left as it is.
        entries: as :func:`decoded` returns them.
        name: of the parameter, for errors.
        group_step: the step count of its group, for entries that have none.

    Raises:
        ValueError: entries that are missing, unknown, or of another shape.
    """
    form = plain_form(stages, hypers, param.shape, param.dtype)
    kept = {key: entries[key] for key in extras_in(entries, form.dtypes)}
    given = {
        key: _cast(value, param, form.dtypes.get(key))
        for key, value in entries.items()
        if key not in kept
    }
    read = partial(from_entries, form.stages, form.hypers, group_step=group_step, begins_anew=True)
    if not form.stored:
        return read(param, given, name)
    with torch.no_grad():
        wide = param.detach().to(torch.float32)
        state = read(wide, given, name)
        left = list(state.stages)
        made = []
        for stage in stages:
            layout = layout_of_stage(stage)
            assert layout is not None, "all stages of a stored chain are"
            count = len(layout.plan.stages)
            storage = layout.plan.param
            extras = extras_for(storage, param.detach(), kept) if layout.extras else ()
            made.append(layout.kept(extras, left[:count], wide))
            left = left[count:]
    return state._replace(stages=tuple(made))


def _cast(value: Any, param: Tensor, dtype: torch.dtype | None) -> Any:
    """A tensor of a field, where the parameter is and in the dtype of the plain field."""
    if not isinstance(value, Tensor) or dtype is None:
        return value
    same = value.is_floating_point() == dtype.is_floating_point
    same = same and value.is_complex() == dtype.is_complex
    return value.detach().to(param.device, dtype if same else value.dtype)


def from_any_storage(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
    *,
    group_step: Any = None,
) -> LeafState:
    """The state of a stored chain, from entries in another storage, or in none.

    Raises:
        ValueError: they do not fit, or have digits that only the parameter itself could take.
    """
    fields = plain_form(stages, hypers, param.shape, param.dtype).dtypes
    digits = extras_in(entries, fields)
    if digits and param.dtype != torch.bfloat16:
        raise ValueError(
            f"the state of {name!r} has {', '.join(digits)}: digits of a bfloat16 parameter, which "
            f"one of {param.dtype} would have to take itself, and loading state changes no "
            "parameter; load it with sharding.ZeroRedundancyOptimizer, which does that, or take "
            "them out of the state dict"
        )
    plain = decoded(entries, fields)
    return encoded(stages, hypers, param, plain, name, group_step=group_step)
