"""Conversion of state between storages: decode to plain values, then encode.

A plain value is in float32, under the name that torch.optim has for the field. A decoded value
encodes to a code that decodes to the same bits, so a conversion from a storage to itself changes no
later step. Every state dict has plain values.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.links import state_names
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.core.torch_state import entry_layout, from_entries
from functional_optim.storage.layout import field_name
from functional_optim.storage.param_storage import EXTRAS, extras_for
from functional_optim.storage.state_storage import BLOCK, STATE_STORAGES, are_codes
from functional_optim.storage.stored import Stored

STEP = "step"
_SCALE = STATE_STORAGES["int8"].suffixes[1]


class PlainForm(NamedTuple):
    """A chain before it was stored, and the fields of its state."""

    stages: tuple[Stage, ...]
    hypers: tuple[Any, ...]
    dtypes: Mapping[str, torch.dtype]
    """The dtype of each field of the state, by its name."""
    unused: frozenset[str]
    """Fields that have tensors with other options only. A state dict may still have them."""
    stored: bool
    """True if the chain is stored."""
    extras: tuple[str, ...]
    """Names of the extra tensors of the parameter's storage, such as a master."""
    renamed: Mapping[str, str]
    """Names of the chain's encoded tensors that differ from those that are decoded, by name."""

    def entries_of(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a parameter, or of a range, as every state dict has them."""
        if not self.stored:
            return dict(entries)
        found = {}
        for name, value in entries.items():
            field, bracket, index = name.partition("[")
            found[self.renamed.get(field, field) + bracket + index] = value
        return decode_entries(found, self.dtypes.keys() | self.unused)


class FieldTensors(NamedTuple):
    """Names of the tensors of an encoded field."""

    values: str
    scale: str | None
    """The scales of the blocks, if the values have 8 bits."""


def plain_form(
    stages: Sequence[Stage], hypers: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> PlainForm:
    """Return the plain form of a chain, stored or not, for parameters of a shape and a dtype."""
    plain = plain_stages(stages)
    values: list[Any] = []
    extras: tuple[str, ...] = ()
    stored = False
    for stage, hyper in zip(stages, hypers, strict=True):
        if isinstance(stage, Stored):
            values += stage.layout.hypers(hyper)
            extras += stage.layout.extras
            stored = True
        else:
            values.append(hyper)
    layout = entry_layout(plain, tuple(values), tuple(shape), torch.float32 if stored else dtype)
    unused = frozenset(field.name for field in layout.every if not field.keys)
    renamed = _rename_encoded(stages) if stored else {}
    return PlainForm(plain, tuple(values), layout.dtypes, unused, stored, extras, renamed)


def _rename_encoded(stages: Sequence[Stage]) -> dict[str, str]:
    """Return the names under which encoded tensors are decoded, where the chain has other names.

    A field that several stages have is prefixed with the label of its stage. The label of a stored
    stage differs from the labels of the stages that were stored.
    """
    plain = iter(state_names(plain_stages(stages)))
    found: dict[str, str] = {}
    for stage, own in zip(stages, state_names(stages), strict=True):
        if not isinstance(stage, Stored):
            next(plain)
            continue
        names = list(stage.layout.extras)
        for kept in stage.layout.kept:
            for name, field in zip(next(plain), kept, strict=True):
                names += [field_name(name) + suffix for suffix in field.storage.suffixes]
        found.update(zip(own, names, strict=True))
    return {name: other for name, other in found.items() if name != other}


def plain_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages of a chain before it was stored."""
    found: list[Stage] = []
    for stage in stages:
        found += stage.parts() if isinstance(stage, Stored) else [stage]
    return tuple(found)


def refuse_codes(
    forms: Sequence[tuple[PlainForm, Collection[str]]], loaded: Sequence[Mapping[str, Any]]
) -> None:
    """Raise ValueError if every value of an 8-bit field is a code.

    Releases before this one saved codes and scales. ``torch.distributed.checkpoint`` converts such
    codes to the numbers that it is asked for, without an error and without the scales. ``forms``
    has for each parameter its plain form, and the names of its tensors as stored.
    """
    found: dict[str, list[Tensor]] = {}
    for (form, names), entries in zip(forms, loaded, strict=True):
        for field, tensors in find_field_tensors(form.dtypes, names).items():
            value = entries.get(field)
            if tensors.scale and isinstance(value, Tensor) and value.is_floating_point():
                found.setdefault(field, []).append(value)
    for field, values in found.items():
        if any(bool(one.any()) for one in values) and all(map(are_codes, values)):
            raise ValueError(
                f"{field} has 8-bit codes without their scales: an earlier release saved this "
                "checkpoint, and torch.distributed.checkpoint has converted the codes to numbers. "
                "Write it to a file with `functional-optim convert FOLDER old.pt`, and load that "
                "with optimizer.load_state_dict(torch.load('old.pt')), which decodes the codes"
            )


def find_field_tensors(fields: Collection[str], names: Collection[str]) -> dict[str, FieldTensors]:
    """Return the names of the tensors of each field. Missing fields are left out."""
    found = {}
    for field in fields:
        for base in (field, field_name(field)):
            if base in names:
                scale = base + _SCALE
                is_scale = scale in names and scale not in fields
                found[field] = FieldTensors(base, scale if is_scale else None)
                break
    return found


def find_extras(names: Collection[str], fields: Collection[str]) -> list[str]:
    """Return the names that belong to the storage of the parameter."""
    return [name for name in EXTRAS if name in names and name not in fields]


def decode_entries(entries: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Decode the entries of a state in any storage.

    Return the fields under their plain names, and all other entries unchanged, such as ``step`` and
    the extra tensors of the parameter.
    """
    parts = find_field_tensors(fields, entries)
    used = {name for one in parts.values() for name in one}
    found: dict[str, Any] = {key: value for key, value in entries.items() if key not in used}
    for field, (values, scale) in parts.items():
        found[field] = _decode_field(entries[values], entries[scale] if scale else None, field)
    return found


def plain_entries(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor, entries: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries of a parameter as every state dict has them: see :class:`PlainForm`."""
    if plain_stages(stages) == tuple(stages):
        return dict(entries)
    return plain_form(stages, hypers, param.shape, param.dtype).entries_of(entries)


def _decode_field(values: Any, scale: Any, field: str) -> Any:
    if not isinstance(values, Tensor):
        return values
    if scale is None:
        is_short = values.dtype in (torch.bfloat16, torch.float16)
        return STATE_STORAGES["bfloat16"].decode((values,)) if is_short else values
    blocks = -(-values.numel() // BLOCK)
    if values.dtype != torch.uint8 or scale.numel() != blocks:
        raise ValueError(
            f"{field} has {values.numel()} elements of {values.dtype} and {scale.numel()} scales: "
            f"8-bit state must be torch.uint8, with one scale per {BLOCK} elements ({blocks}); "
            "pass codes and scales of one field"
        )
    return STATE_STORAGES["int8"].decode((values, scale.to(values.device, torch.float32)))


def encode_entries(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    entries: Mapping[str, Any],
    name: str,
    *,
    group_step: Any = None,
) -> LeafState:
    """Return the state of a chain from plain entries, encoded with rounding to nearest.

    Extra tensors with the names that the chain has are used unchanged. Otherwise they are computed
    from the parameter, and from the extra tensors of another storage. From the parameter alone, a
    master equals the parameter, and a compensation is zero. ``entries`` are those that
    :func:`decode_entries` returns.
    """
    form = plain_form(stages, hypers, param.shape, param.dtype)
    kept = {key: entries[key] for key in find_extras(entries, form.dtypes)}
    given = {
        key: _cast(value, param, form.dtypes.get(key))
        for key, value in entries.items()
        if key not in kept
    }
    read = partial(from_entries, form.stages, form.hypers, group_step=group_step, reinit=True)
    if not form.stored:
        return read(param, given, name)
    with torch.no_grad():
        wide = param.detach().to(torch.float32)
        state = read(wide, given, name)
        left = list(state.stages)
        encoded = []
        for stage, hyper in zip(stages, hypers, strict=True):
            if not isinstance(stage, Stored):
                encoded.append(_in_own_dtypes(stage, hyper, param, left.pop(0)))
                continue
            layout = stage.layout
            count = len(layout.stages)
            storage = layout.param
            extras = extras_for(storage, param.detach(), kept) if layout.extras else ()
            encoded.append(layout.encode_states(extras, left[:count], wide))
            left = left[count:]
    return state._replace(stages=tuple(encoded))


def _in_own_dtypes(stage: Stage, hyper: Any, param: Tensor, state: Any) -> Any:
    """Return the state of a stage that is not stored, from its state for a float32 parameter."""
    layout = entry_layout((stage,), (hyper,), tuple(param.shape), param.dtype)
    pairs = zip(state_tensors((state,)), layout.dtypes.values(), strict=True)
    tensors = [one.to(dtype) for one, dtype in pairs]
    counts = [param.new_zeros(())] * (len(layout.every_key) - len(tensors))  # not used
    (found,) = layout.state([*counts, *tensors]).stages
    return found


def _cast(value: Any, param: Tensor, dtype: torch.dtype | None) -> Any:
    """Return a field on the device of the parameter, in the dtype of the plain field."""
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
    """Return the state of a stored chain from entries in any storage, or without storage."""
    form = plain_form(stages, hypers, param.shape, param.dtype)
    digits = find_extras(entries, form.dtypes)
    if digits and param.dtype != torch.bfloat16:
        raise ValueError(
            f"the state of {name!r} has {', '.join(digits)}: digits of a bfloat16 parameter, which "
            f"one of {param.dtype} would have to take itself, and loading state changes no "
            "parameter; load it with sharding.ZeroRedundancyOptimizer, which does that, or take "
            "them out of the state dict"
        )
    plain = form.entries_of(entries)
    return encode_entries(stages, hypers, param, plain, name, group_step=group_step)
