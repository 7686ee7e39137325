"""Parameters that took part in a backward pass, on any rank.

With ``find_unused_parameters`` or ``static_graph``, DDP puts zeros into a bucket for a parameter
that the loss does not use. Plain training does not step such a parameter (its ``.grad`` stays
None), and neither may a hook: weight decay and momentum move a parameter with a zero gradient too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hooks.communication import start_all_reduce


def may_leave_unused(ddp: DistributedDataParallel) -> bool:
    """Return True if DDP may put zeros into a bucket for a parameter that the loss does not use."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


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

    def exchange(self, names: Sequence[str], device: torch.device) -> Callable[[], list[bool]]:
        """Start to ask all ranks which of these parameters were used since the last such call.

        The result waits, and returns for each parameter True if any rank used it.
        """
        used = [name in self._used for name in names]
        self._used.difference_update(names)
        flags = torch.tensor(used, dtype=torch.int32, device=device)
        wait = start_all_reduce(flags, self._group, dist.ReduceOp.MAX)

        def wait_used() -> list[bool]:
            wait()
            return list(map(bool, flags.tolist()))

        return wait_used
