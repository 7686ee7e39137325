"""SnapshotModule: a module on a worker that runs on one version of its parameters per context."""

from typing import Any

from torch import nn

from functional_optim.remote.snapshot import call_with_parameters
from functional_optim.remote.torch_rpc import load_torch_rpc


class SnapshotModule(nn.Module):
    """Module whose parameters may be stepped between the forward and the backward pass.

    Put it on a worker in place of the module. The first pass of a distributed autograd context
    reads a version of the parameters, and all passes of this context run on it. A step of another
    trainer does not change that version, so the backward pass uses the values of the forward pass.
    With one trainer nothing is copied. Buffers are the module's own.

    The optimizer gets the gradients by the id of the context, as gradients of the module's
    parameters. After its step, the version of the context may be overwritten. A version is kept
    until its context ends. torch keeps the context of a trainer that died, and with it at most one
    version.

    Args:
        module: it does not change. Give its parameters to the optimizer.

    Raises:
        TypeError: it is not a module.
        ImportError: in a pass, if this build of torch has no RPC.

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
        """Run the module on the version of the current context."""
        version = load_torch_rpc().contexts.read(dict(self.module.named_parameters()))
        return call_with_parameters(self.module, version, args, kwargs)

    def parameter_rrefs(self) -> list[tuple[str, Any]]:
        """Return (name, RRef) pairs for ``DistributedOptimizer``. Call this on the worker.

        The names are the names in the module. If modules on several workers have the same names,
        add a prefix to each.
        """
        return [
            (name, load_torch_rpc().rpc.RRef(param))
            for name, param in self.module.named_parameters()
        ]
