"""Parameters that took part in a backward pass, on any rank.

With ``find_unused_parameters`` or ``static_graph``, DDP puts zeros into a bucket for a parameter
that the loss does not use. Plain training does not step such a parameter (its ``.grad`` stays
None), and neither may a hook: weight decay and momentum move a parameter with a zero gradient too.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hooks.communication import keep_alive


def may_leave_unused(ddp: DistributedDataParallel) -> bool:
    """Return True if DDP may put zeros into a bucket for a parameter that the loss does not use."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


class UsedFlags:
    """Flags of parameters, while they are reduced over ranks.

    Args:
        flags: int32, 1 for each parameter that this rank used; reduced in place.
        group: the ranks.
    """

    def __init__(self, flags: Tensor, group: dist.ProcessGroup) -> None:
        if flags.device.type == "cpu":
            keep_alive(flags)
        self._flags = flags
        self._work: dist.Work | None = dist.all_reduce(
            flags, dist.ReduceOp.MAX, group=group, async_op=True
        )

    def wait(self) -> list[bool]:
        """Return for each parameter True if any rank used it."""
        assert self._work is not None, "this rank is a member of the group"
        self._work.wait()
        self._work = None  # it holds the tensor
        return [bool(flag) for flag in self._flags.tolist()]


class Usage:
    """Names of the parameters whose ``.grad`` a backward pass adds to, exchanged bucket by bucket.

    Gradients of ``torch.autograd.grad`` do not count, as for DDP: they are added to no ``.grad``. A
    gradient of None counts only if ``.grad`` is set: plain training would then step by ``.grad``.

    Args:
        params: the parameters to watch, by name.
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
        """Start to ask all ranks which of these parameters were used since the last such call."""
        flags = [name in self._used for name in names]
        self._used.difference_update(names)
        return UsedFlags(torch.tensor(flags, dtype=torch.int32, device=device), self._group)
