"""Where parameters lie: in memory of their own, or in flat buffers in the order of their owners."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_optim.kernels.chunks import LARGE
from functional_optim.plan.flat_apart import is_dense, reasons_apart
from functional_optim.plan.flat_buffer import difference
from sharding.shard_plan import ShardPlan


@dataclass(slots=True)
class Home:
    """Where the elements of one parameter are."""

    param: Tensor
    flat: Tensor | None
    """All of them as they lie in memory, in one dimension; None where they lie apart."""
    seen: Tensor
    """The parameter as it was when this was found out."""
    buffer: int | None = None
    """The flat buffer that it is in."""
    offset: int = 0
    """Its first element there."""


class Memory:
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
        self.homes: dict[str, Home] = {}
        self.buffers: list[Tensor] = []
        self.extend(params, plan)

    def extend(self, params: Mapping[str, Tensor], plan: ShardPlan) -> None:
        """More parameters; those that are there stay where they are."""
        homes = {path: _home(param) for path, param in params.items()}
        if self._in_buffers:
            self._move(homes, plan)
        self.homes.update(homes)

    def _move(self, homes: dict[str, Home], plan: ShardPlan) -> None:
        """Into buffers, in the order of owners, so that ranges of one rank are neighbours."""
        paths = list(homes)
        apart = reasons_apart([homes[path].param for path in paths], paths)
        movable = [path for i, path in enumerate(paths) if i not in apart]
        alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for path in sorted(movable, key=lambda path: _order(plan, path)):
            param = homes[path].param
            alike.setdefault((param.dtype, param.device), []).append(path)
        with torch.inference_mode(mode=False), torch.no_grad():
            made = []
            for (dtype, device), members in alike.items():
                length = sum(homes[path].param.numel() for path in members)
                made.append(torch.empty(length, dtype=dtype, device=device))
            for buffer, members in zip(made, alike.values(), strict=True):
                self._settle(homes, buffer, members)

    def _settle(self, homes: Mapping[str, Home], buffer: Tensor, members: Sequence[str]) -> None:
        offset = 0
        for path in members:
            home = homes[path]
            view = buffer.as_strided(home.param.shape, home.param.stride(), offset)
            view.copy_(home.param)
            home.param.data = view
            home.seen = view.detach()
            home.flat = buffer[offset : offset + view.numel()]
            home.buffer, home.offset = len(self.buffers), offset
            offset += view.numel()
        self.buffers.append(buffer)

    def refresh(self, paths: Iterable[str]) -> bool:
        """Find parameters again that have other memory than before; whether there were any.

        Raises:
            RuntimeError: one has another shape, dtype or device, or has left its flat buffer.
        """
        moved = False
        for path in paths:
            home = self.homes[path]
            if home.param.data_ptr() == home.seen.data_ptr() and home.param.is_set_to(home.seen):
                continue
            what = difference(home.param, home.seen)
            if what is None:
                continue
            if home.buffer is not None or "memory" not in what:
                raise RuntimeError(
                    f"the parameter {path!r} is not what it was: {what}. Something gave it other "
                    "memory (module.half(), module.to(), an assignment to .data) after the "
                    "optimizer was made; do that before, and make the optimizer then"
                )
            self.homes[path] = _home(home.param)
            moved = True
        return moved

    def mark_changed(self, paths: Iterable[str]) -> None:
        """Tell autograd that parameters were written to, by ways that it does not see."""
        torch.autograd.graph.increment_version([self.homes[path].param for path in paths])


def _home(param: Tensor) -> Home:
    seen = param.detach()
    if seen.is_contiguous():
        return Home(param, seen.view(-1), seen)
    if is_dense(seen):
        return Home(param, seen.as_strided((seen.numel(),), (1,)), seen)
    return Home(param, None, seen)


def _order(plan: ShardPlan, path: str) -> tuple[int, int, int, bool, int]:
    """Owners in turn; a parameter that two of them share stands between what is theirs alone.

    Of one owner, groups in turn, and in each the small ones together: some executors step them as
    one.
    """
    ranks = [owner.ranks[0] for owner in plan.owners(path)]
    index = plan.index_of(path)
    spec = plan.specs[index]
    return min(ranks), max(ranks), spec.group, spec.numel < LARGE, index
