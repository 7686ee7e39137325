"""Memory of parameters: their own memory, or flat buffers in the order of their owners."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_optim.engine.tensors import (
    LARGE,
    FlatBuffer,
    FlatLayout,
    MemoryGuard,
    difference,
    is_dense,
    mark_changed,
)
from sharding.shard_plan import ShardPlan


@dataclass(slots=True)
class Location:
    """Memory of the elements of one parameter."""

    param: Tensor
    flat: Tensor | None
    """A flat view, in memory order; None if the parameter is not dense."""
    known: Tensor
    """A detached alias of the parameter, which shows if the parameter gets other memory."""
    buffer: int | None = None
    """The index of the flat buffer of the parameter, or None."""
    offset: int = 0
    """The first element of the parameter in the flat buffer."""


class ParameterMemory:
    """Memory of parameters, which is found again after it has moved.

    Args:
        params: by path.
        plan: their owners.
        in_buffers: True to move the parameters into one flat buffer per dtype and device, so that
            a rank owns one range of each buffer. Parameters that share memory, or are views, are
            not moved.
    """

    def __init__(self, params: Mapping[str, Tensor], plan: ShardPlan, *, in_buffers: bool) -> None:
        self._in_buffers = in_buffers
        self.locations: dict[str, Location] = {}
        self.buffers: list[Tensor] = []
        self._flat: list[FlatBuffer] = []  # so that no other layout moves the parameters
        self._every: tuple[list[Tensor], MemoryGuard] | None = None
        """All parameters, and a guard that compares their addresses."""
        self.extend(params, plan)

    def extend(self, params: Mapping[str, Tensor], plan: ShardPlan) -> None:
        """Add parameters. Known parameters are not moved."""
        self._every = None
        places = self._move_to_buffers(params, plan) if self._in_buffers else {}
        self.locations.update(
            {path: _location(one, *places.get(path, ())) for path, one in params.items()}
        )

    def _move_to_buffers(
        self, params: Mapping[str, Tensor], plan: ShardPlan
    ) -> dict[str, tuple[int, int]]:
        """Move parameters into buffers, ordered by owner; return their buffers and offsets."""
        paths, tensors = list(params), list(params.values())
        order = sorted(range(len(paths)), key=lambda place: _order(plan, paths[place]))
        layout = FlatLayout(tensors, paths, keys=[one.dtype for one in tensors], order=order)
        found = {}
        self._flat += layout.buffers
        for buffer in layout.buffers:
            real = 2 if params[buffer.segments[0].name].is_complex() else 1
            for one in buffer.segments:
                found[one.name] = (len(self.buffers), one.offset // real)
            self.buffers.append(
                torch.view_as_complex(buffer.data.view(-1, 2)) if real == 2 else buffer.data
            )
        return found

    def refresh(self, paths: Collection[str]) -> bool:
        """Find the memory of parameters again; return True if a parameter has moved.

        Usually one native call compares all addresses.

        Raises:
            RuntimeError: a parameter has another shape, dtype or device, or left its flat buffer.
        """
        is_every, moved = len(paths) == len(self.locations), False
        if is_every and self._every is not None and self._every[1].hold(self._every[0]):
            return False
        for path in paths:
            location = self.locations[path]
            if location.param.is_set_to(location.known):
                continue
            what = difference(location.param, location.known)
            if what is None:
                continue
            if location.buffer is not None or "memory" not in what:
                raise RuntimeError(
                    f"the parameter {path!r} is not what it was: {what}. Something gave it other "
                    "memory (module.half(), module.to(), an assignment to .data) after the "
                    "optimizer was made; do that before, and make the optimizer then"
                )
            self.locations[path] = _location(location.param)
            moved = True
        if is_every:
            every = self.locations.values()
            guard = MemoryGuard([one.known for one in every])
            self._every = [one.param for one in every], guard
        return moved

    def mark_changed(self, paths: Iterable[str]) -> None:
        """Tell autograd about writes to parameters that autograd does not see."""
        mark_changed([self.locations[path].param for path in paths])


def _location(param: Tensor, buffer: int | None = None, offset: int = 0) -> Location:
    known = param.detach()
    flat = None
    if known.is_contiguous():
        flat = known.view(-1)
    elif is_dense(known):
        flat = known.as_strided((known.numel(),), (1,))
    return Location(param, flat, known, buffer, offset)


def _order(plan: ShardPlan, path: str) -> tuple[int, int, int, bool, int]:
    """Return the sort key of a parameter: by owner, and then by group.

    A parameter with two owners is between the parameters of each. In a group, small parameters are
    adjacent, since some executors step them together.
    """
    ranks = [owner.ranks[0] for owner in plan.owners(path)]
    index = plan.index_of(path)
    spec = plan.specs[index]
    return min(ranks), max(ranks), spec.group, spec.numel < LARGE, index
