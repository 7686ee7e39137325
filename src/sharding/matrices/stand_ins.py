"""Stand-ins: plain tensors that this rank steps instead of the parameters of a module."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.engine.tensors import to_local


@dataclass(frozen=True, eq=False)
class StandIn:
    """Plain tensor that this rank steps for a parameter: the whole parameter, or its local rows."""

    param: Tensor
    """The parameter of the module."""
    tensor: Tensor
    """Shares the memory of the parameter's local part, unless it is a gathered matrix."""
    is_matrix: bool
    """True if the tensor is the gathered whole of a sharded matrix."""
    adds: bool
    """True if this rank adds to totals for it. For a replicated parameter, only one rank does."""


class StandIns:
    """Stand-ins of a rank, by the ``id`` of the parameter and of the stand-in."""

    def __init__(self) -> None:
        self.by_param: dict[int, StandIn] = {}
        self.by_tensor: dict[int, StandIn] = {}

    def add(self, one: StandIn) -> None:
        self.by_param[id(one.param)] = one
        self.by_tensor[id(one.tensor)] = one

    def refresh(self) -> None:
        """Update stand-ins of parameters that got other memory, as by ``module.to``."""
        for one in self.by_param.values():
            if not one.is_matrix:
                now = to_local(one.param.detach())
                if now.data_ptr() != one.tensor.data_ptr() or now.dtype != one.tensor.dtype:
                    one.tensor.data = now

    def tensors(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the stand-in of each parameter, or the parameter if this rank does not step it."""
        found = [self.by_param.get(id(param)) for param in params]
        return [b if a is None else a.tensor for a, b in zip(found, params, strict=True)]

    def stepped(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter group with only stand-ins, of the parameters that this rank steps."""
        here = [k for k, one in enumerate(group["params"]) if id(one) in self.by_param]
        made = {**group, "params": [self.by_param[id(group["params"][k])].tensor for k in here]}
        if "param_names" in group:
            made["param_names"] = [group["param_names"][k] for k in here]
        return made


class StandInStates(MutableMapping[Tensor, dict[str, Any]]):
    """torch's dicts of state by stand-in; the optimizer stores them by parameter."""

    def __init__(self, states: MutableMapping[Tensor, dict[str, Any]], stand_ins: StandIns) -> None:
        self._states, self._stand_ins = states, stand_ins

    def __getitem__(self, tensor: Tensor) -> dict[str, Any]:
        return self._states[self._param(tensor)]

    def __setitem__(self, tensor: Tensor, entries: dict[str, Any]) -> None:
        self._states[self._param(tensor)] = entries

    def __delitem__(self, tensor: Tensor) -> None:
        del self._states[self._param(tensor)]

    def __iter__(self) -> Iterator[Tensor]:
        every = self._stand_ins.by_param.values()
        return (one.tensor for one in every if one.param in self._states)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _param(self, tensor: Tensor) -> Tensor:
        found = self._stand_ins.by_tensor.get(id(tensor))
        if found is None:
            raise KeyError(tensor)
        return found.param


def empty_like_whole(param: Tensor) -> Tensor:
    """Return a plain tensor with the shape of a whole DTensor, on its device."""
    like = to_local(param.detach())
    return torch.empty(tuple(param.shape), dtype=like.dtype, device=like.device)
