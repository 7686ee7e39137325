"""Memory of parameters: their own, or flat buffers in the order of their owners."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_optim.kernels.chunks import LARGE
from functional_optim.plan.flat.apart import is_dense
from functional_optim.plan.flat.buffer import difference
from functional_optim.plan.flat.layout import FlatBuffer, FlatLayout
from functional_optim.plan.guard import MemoryGuard, mark_changed
from sharding.shard_plan import ShardPlan


@dataclass(slots=True)
class Location:
    """Memory of the elements of one parameter."""

    param: Tensor
    flat: Tensor | None
    """All of them as they lie in memory, in one dimension; None where they do not fill it."""
    seen: Tensor
    """The parameter as it was when this was found out."""
    buffer: int | None = None
    """The flat buffer that it is in."""
    offset: int = 0
    """Its first element there."""


class ParameterMemory:
    """The memory of parameters, found again where they have been moved.

    Args:
        params: by path.
        plan: who owns them.
        in_buffers: move them into one flat buffer per dtype and device, so that what a rank owns
            is one range of each. A parameter that cannot be moved unnoticed (a view, one that
            shares its memory) stays where it is.
    """

    def __init__(self, params: Mapping[str, Tensor], plan: ShardPlan, *, in_buffers: bool) -> None:
        self._in_buffers = in_buffers
        self.locations: dict[str, Location] = {}
        self.buffers: list[Tensor] = []
        self._flat: list[FlatBuffer] = []  # so that no other layout moves the parameters
        self._every: tuple[list[Tensor], MemoryGuard] | None = None
        """All parameters, and a guard that they are where they were."""
        self.extend(params, plan)

    def extend(self, params: Mapping[str, Tensor], plan: ShardPlan) -> None:
        """More parameters; those that are there stay where they are."""
        self._every = None
        places = self._moved(params, plan) if self._in_buffers else {}
        self.locations.update(
            {path: _location(one, *places.get(path, ())) for path, one in params.items()}
        )

    def _moved(self, params: Mapping[str, Tensor], plan: ShardPlan) -> dict[str, tuple[int, int]]:
        """Move parameters into buffers, so that ranges of one rank are neighbours.

        Returns:
            By path, the number of the buffer that a parameter is in, and its first element there.
        """
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
        """Find parameters again that have other memory than before; whether there were any.

        One loop in C sees that all parameters are where they were.

        Raises:
            RuntimeError: one has another shape, dtype or device, or has left its flat buffer.
        """
        is_every, moved = len(paths) == len(self.locations), False
        if is_every and self._every is not None and self._every[1].hold(self._every[0]):
            return False
        for path in paths:
            location = self.locations[path]
            if location.param.is_set_to(location.seen):
                continue
            what = difference(location.param, location.seen)
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
            guard = MemoryGuard([one.seen for one in every])
            self._every = [one.param for one in every], guard
        return moved

    def mark_changed(self, paths: Iterable[str]) -> None:
        """Tell autograd that parameters were written to, by ways that it does not see."""
        mark_changed([self.locations[path].param for path in paths])


def _location(param: Tensor, buffer: int | None = None, offset: int = 0) -> Location:
    seen = param.detach()
    flat = None
    if seen.is_contiguous():
        flat = seen.view(-1)
    elif is_dense(seen):
        flat = seen.as_strided((seen.numel(),), (1,))
    return Location(param, flat, seen, buffer, offset)


def _order(plan: ShardPlan, path: str) -> tuple[int, int, int, bool, int]:
    """Owners in turn; a parameter that two of them share stands between what is theirs alone.

    Of one owner, groups in turn, and in each the small ones together: some executors step them as
    one.
    """
    ranks = [owner.ranks[0] for owner in plan.owners(path)]
    index = plan.index_of(path)
    spec = plan.specs[index]
    return min(ranks), max(ranks), spec.group, spec.numel < LARGE, index
