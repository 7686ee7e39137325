"""Parameters that took part in a backward pass, on any rank.

With ``find_unused_parameters`` or ``static_graph``, DDP puts zeros into a bucket for a parameter
that had no part in the loss. Plain training would leave that parameter alone (its ``.grad`` stays
None), and so must a hook: a zero gradient still decays, and still moves by momentum.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hooks.communication import hold


def may_leave_unused(ddp: DistributedDataParallel) -> bool:
    """Return True if DDP may put zeros into a bucket for a parameter that the loss does not use."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


class UsedFlags:
    """Flags of some parameters that are on their way.

    Args:
        flags: of this rank, int32, 1 where a parameter was used; they are reduced in place.
        group: the ranks.
    """

    def __init__(self, flags: Tensor, group: dist.ProcessGroup) -> None:
        if flags.device.type == "cpu":
            hold(flags)
        self._flags = flags
        self._work: dist.Work | None = dist.all_reduce(
            flags, dist.ReduceOp.MAX, group=group, async_op=True
        )

    def wait(self) -> list[bool]:
        """Return True for each parameter that any rank has used."""
        assert self._work is not None, "it was launched, as this rank is a member"
        self._work.wait()
        self._work = None  # it holds what was sent
        return [bool(flag) for flag in self._flags.tolist()]


class Usage:
    """Notes each gradient that is added to ``.grad``; asks the other ranks bucket by bucket.

    So does DDP: what ``torch.autograd.grad`` computes is added to none. A gradient of None is no
    use either, unless ``.grad`` is there: then plain training would step by it.

    Args:
        params: the parameters watched, by name.
        group: the process group of the DDP module.
    """

    def __init__(self, params: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        self._used: set[str] = set()
        self.handles = [
            param.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, param in params.items()
        ]

    def _note(self, name: str, param: Tensor) -> None:
        if param.grad is not None:
            self._used.add(name)

    def exchange(self, names: Sequence[str], device: torch.device) -> UsedFlags:
        """Ask all ranks which of these were used since they were last asked for."""
        flags = [name in self._used for name in names]
        self._used.difference_update(names)
        return UsedFlags(torch.tensor(flags, dtype=torch.int32, device=device), self._group)
