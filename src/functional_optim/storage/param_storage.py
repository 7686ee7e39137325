"""Storages of a parameter between steps. A rule gets the parameter in float32."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.storage.rounding import Noise, round_stochastically, round_to_nearest

Extras = tuple[Tensor, ...]
"""Tensors that a storage keeps in the state, such as a master."""

PARAM_STREAM = 0
"""The stream of the random bits of the parameter. Streams of state fields start at 1."""


class ParamStorage(NamedTuple):
    """Storage of a parameter."""

    name: str
    dtype: torch.dtype
    """The dtype of the parameter."""
    extras: tuple[str, ...]
    """Names of the extra tensors in the state. Each has the shape of the parameter."""
    decode: Callable[[Tensor, Extras], Tensor]
    """``decode(param, extras)`` returns the parameter in float32."""
    encode: Callable[[Tensor, Noise | None], tuple[Tensor, Extras]]
    """``encode(value, noise)`` returns (param, extras). Without noise it rounds to nearest."""
    stochastic: bool = False


def _same(param: Tensor, extras: Extras) -> Tensor:
    return param


def _as_it_is(value: Tensor, noise: Noise | None) -> tuple[Tensor, Extras]:
    return value, ()


def _widen(param: Tensor, extras: Extras) -> Tensor:
    return param.to(torch.float32)


def _nearest(value: Tensor, noise: Noise | None) -> tuple[Tensor, Extras]:
    return value.to(torch.bfloat16), ()


def _stochastic(value: Tensor, noise: Noise | None) -> tuple[Tensor, Extras]:
    if noise is None:
        return _nearest(value, noise)
    return round_stochastically(value, noise, PARAM_STREAM).to(torch.bfloat16), ()


def _master(param: Tensor, extras: Extras) -> Tensor:
    (master,) = extras
    wide = param.to(torch.float32)
    # Elements that were written to since the last step replace those of the master.
    return torch.where(round_to_nearest(master) == wide, master, wide)


def _with_master(value: Tensor, noise: Noise | None) -> tuple[Tensor, Extras]:
    return value.to(torch.bfloat16), (value,)


def _compensated(param: Tensor, extras: Extras) -> Tensor:
    wide, compensation = param.to(torch.float32), extras[0].to(torch.float32)
    # Half a unit in the last place of a bfloat16 is at most 2^-8 of it. A larger compensation, or
    # NaN, belongs to an element that was written to since.
    belongs = compensation.abs() <= wide.abs() * 2.0**-8
    return torch.where(belongs, wide + compensation, wide)


def _with_compensation(value: Tensor, noise: Noise | None) -> tuple[Tensor, Extras]:
    rounded = round_to_nearest(value)
    return rounded.to(torch.bfloat16), ((value - rounded).to(torch.bfloat16),)


PARAM_STORAGES: dict[str, ParamStorage] = {
    one.name: one
    for one in (
        ParamStorage("float32", torch.float32, (), _same, _as_it_is),
        ParamStorage("bfloat16", torch.bfloat16, (), _widen, _nearest),
        ParamStorage("bfloat16+master", torch.bfloat16, ("master",), _master, _with_master),
        ParamStorage(
            "bfloat16+kahan", torch.bfloat16, ("compensation",), _compensated, _with_compensation
        ),
        ParamStorage("bfloat16+stochastic", torch.bfloat16, (), _widen, _stochastic, True),
    )
}
"""All storages of parameters, by name."""

EXTRAS = tuple(name for one in PARAM_STORAGES.values() for name in one.extras)
"""Names of the extra tensors of all storages."""


def value_of(param: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """Return a parameter in float32, with the digits that a storage kept in its extra tensors.

    The parameter is in bfloat16, or in a wider dtype. Elements that are no bfloat16 numbers were
    written to since, and are returned unchanged.
    """
    wide = param.to(torch.float32)
    for one in PARAM_STORAGES.values():
        if one.extras and all(name in kept for name in one.extras):
            own = tuple(kept[name].to(param.device).view_as(param) for name in one.extras)
            return torch.where(round_to_nearest(wide) == wide, one.decode(wide, own), wide)
    return wide


def extras_for(storage: ParamStorage, param: Tensor, kept: Mapping[str, Tensor]) -> Extras:
    """Convert the extra tensors of a bfloat16 parameter to those of another storage.

    Tensors with the names of ``storage`` are used unchanged, whatever the parameter is.
    """
    _, like = storage.encode(param.to(torch.float32), None)
    if all(name in kept for name in storage.extras):
        pairs = zip(storage.extras, like, strict=True)
        return tuple(kept[name].to(one.device, one.dtype).view_as(one) for name, one in pairs)
    value, wide = value_of(param, kept), param.to(torch.float32)
    # A value halfway between two numbers of bfloat16 may round to the other one. Then it would not
    # belong to this parameter any more, so it is moved by one float32 number.
    belongs = round_to_nearest(value) == wide
    value = torch.where(belongs, value, torch.nextafter(value, wide))
    return storage.encode(value, None)[1]
