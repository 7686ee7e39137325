"""Storages of a parameter between steps. The rule sees it in float32."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.storage.noise import Noise
from functional_optim.storage.rounding import nearest, stochastic

Extras = tuple[Tensor, ...]
"""What a storage keeps in the state beside the parameter."""

PARAM_STREAM = 0
"""The stream of the parameter's random bits; state fields have those from 1 on."""


class ParamStorage(NamedTuple):
    """A way of keeping a parameter."""

    name: str
    dtype: torch.dtype
    """The parameter's dtype."""
    extras: tuple[str, ...]
    """Fields of the state that belong to it; each has the parameter's shape."""
    decode: Callable[[Tensor, Extras], Tensor]
    """``decode(param, extras)``: the parameter in float32."""
    encode: Callable[[Tensor, Noise | None], tuple[Tensor, Extras]]
    """``encode(value, noise)``: (param, extras). Without noise it rounds to nearest."""
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
    return stochastic(value, noise, PARAM_STREAM).to(torch.bfloat16), ()


def _master(param: Tensor, extras: Extras) -> Tensor:
    (master,) = extras
    wide = param.to(torch.float32)
    # Where somebody wrote to the parameter, what was written is the parameter.
    return torch.where(nearest(master) == wide, master, wide)


def _with_master(value: Tensor, noise: Noise | None) -> tuple[Tensor, Extras]:
    return value.to(torch.bfloat16), (value,)


def _compensated(param: Tensor, extras: Extras) -> Tensor:
    wide, compensation = param.to(torch.float32), extras[0].to(torch.float32)
    # Half a unit in the last place of a bfloat16 is at most 2^-8 of it. More than that (or NaN)
    # is left over from a parameter that somebody has since written to.
    belongs = compensation.abs() <= wide.abs() * 2.0**-8
    return torch.where(belongs, wide + compensation, wide)


def _with_compensation(value: Tensor, noise: Noise | None) -> tuple[Tensor, Extras]:
    rounded = nearest(value)
    return rounded.to(torch.bfloat16), ((value - rounded).to(torch.bfloat16),)


PARAM_STORAGES: dict[str, ParamStorage] = {
    one.name: one
    for one in (
        ParamStorage("float32", torch.float32, (), _same, _as_it_is),
        ParamStorage("bfloat16", torch.bfloat16, (), _widen, _nearest),
        ParamStorage("bfloat16+master", torch.bfloat16, ("master",), _master, _with_master),
        ParamStorage(
            "bfloat16+kahan",
            torch.bfloat16,
            ("compensation",),
            _compensated,
            _with_compensation,
        ),
        ParamStorage("bfloat16+stochastic", torch.bfloat16, (), _widen, _stochastic, True),
    )
}
"""Every way of keeping a parameter, by name."""

EXTRAS = tuple(name for one in PARAM_STORAGES.values() for name in one.extras)
"""Names of what storages keep of a parameter beside it."""


def value_of(param: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """A parameter in float32, with the digits that some storage kept of it.

    Args:
        param: in bfloat16, or in a wider dtype with the values of a bfloat16 parameter. Elements
            that have other values were written to since, and count as they are.
        kept: by name, of its shape; what a storage has among its ``extras``.
    """
    wide = param.to(torch.float32)
    for one in PARAM_STORAGES.values():
        if one.extras and all(name in kept for name in one.extras):
            own = tuple(kept[name].to(param.device).view_as(param) for name in one.extras)
            return torch.where(nearest(wide) == wide, one.decode(wide, own), wide)
    return wide


def extras_for(storage: ParamStorage, param: Tensor, kept: Mapping[str, Tensor]) -> Extras:
    """Convert what one storage keeps of a bfloat16 parameter to what another keeps.

    Args:
        storage: for which.
        param: the parameter.
        kept: by name; what is of the same kind is taken as it is, whatever the parameter.
    """
    _, like = storage.encode(param.to(torch.float32), None)
    if all(name in kept for name in storage.extras):
        pairs = zip(storage.extras, like, strict=True)
        return tuple(kept[name].to(one.device, one.dtype).view_as(one) for name, one in pairs)
    value, wide = value_of(param, kept), param.to(torch.float32)
    # Halfway between two numbers of bfloat16, a value may be rounded to the other one, and would
    # be taken for that of another parameter.
    belongs = nearest(value) == wide
    value = torch.where(belongs, value, torch.nextafter(value, wide))
    return storage.encode(value, None)[1]
