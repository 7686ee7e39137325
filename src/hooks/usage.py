"""Parameters that took part in a backward pass, on any rank.

With ``find_unused_parameters`` or ``static_graph``, DDP puts zeros into a bucket for a parameter
that had no part in the loss. Plain training would leave that parameter alone (its ``.grad`` stays
None), and so must a hook: a zero gradient still decays, and still moves by momentum.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def may_leave_unused(ddp: DistributedDataParallel) -> bool:
    """Return True if DDP may put zeros into a bucket for a parameter that the loss does not use."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


class Usage:
    """Notes each gradient as it is computed; asks the other ranks bucket by bucket.

    Args:
        params: the parameters watched, by name.
        group: the process group of the DDP module.
    """

    def __init__(self, params: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        self._used: set[str] = set()
        self.handles = [
            param.register_hook(lambda gradient, name=name: self._used.add(name))
            for name, param in params.items()
        ]

    def exchange(self, names: Sequence[str], device: torch.device) -> Future[list[bool]]:
        """For each name, whether any rank used it since it was last asked for."""
        flags = torch.tensor(
            [name in self._used for name in names], dtype=torch.int32, device=device
        )
        self._used.difference_update(names)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        answer: Future[list[bool]] = work.get_future().then(
            lambda _: [bool(flag) for flag in flags.tolist()]
        )
        return answer
