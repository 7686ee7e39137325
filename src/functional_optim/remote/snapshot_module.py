"""SnapshotModule: a module on a worker, whose passes keep the version that they began with."""

from typing import Any

from torch import nn

from functional_optim.remote.running import run
from functional_optim.remote.torch_rpc import torch_rpc


class SnapshotModule(nn.Module):
    """A module whose parameters may be stepped between the forward and the backward pass.

    Put it on a worker in place of the module. All passes of one distributed autograd context run on
    the version of the parameters that the first of them found; a step of another trainer leaves
    that version as it is, so the backward pass sees what the forward pass saw. With one trainer
    nothing is copied. Buffers are the module's own.

    The optimizer finds these gradients by the context's id, as those of the module's parameters,
    and from then on the context's version may be overwritten. A version is kept no longer than its
    context; torch keeps the context of a trainer that died, and with it at most one version.

    Args:
        module: it stays as it is; its parameters are those that the optimizer is given.

    Raises:
        TypeError: it is no module.
        ImportError: in a pass, where this build of torch has no RPC.

    Over RPC, on the trainer::

        module = rpc.remote("ps", SnapshotModule, args=(torch.nn.Linear(4, 2),))
        optimizer = DistributedOptimizer(
            torch.optim.AdamW, module.rpc_sync().parameter_rrefs(), lr=1e-3)
        with torch.distributed.autograd.context() as context_id:
            loss = module.rpc_sync().forward(inputs).sum()
            torch.distributed.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Example::

        >>> import torch
        >>> module = SnapshotModule(torch.nn.Linear(2, 1))  # outside of contexts: no gradients
        >>> module(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, on the version of the current context."""
        version = torch_rpc().contexts.read(dict(self.module.named_parameters()))
        return run(self.module, version, args, kwargs)

    def parameter_rrefs(self) -> list[tuple[str, Any]]:
        """(name, RRef) of each parameter, for ``DistributedOptimizer``; called on the worker.

        Names are those in the module; where several workers have modules with the same names, put
        something before them.
        """
        return [
            (name, torch_rpc().rpc.RRef(param)) for name, param in self.module.named_parameters()
        ]
