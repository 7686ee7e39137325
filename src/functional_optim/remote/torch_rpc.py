"""Load the transport over torch's RPC where this build of torch has it."""

from typing import Any

import torch


def load_torch_rpc() -> Any:
    """Return the module of the RPC transport. Raise ImportError if torch was built without RPC."""
    if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
        raise ImportError(
            "parameters on other processes need torch.distributed.rpc, which this build of torch "
            "does not have; DistributedOptimizer.over_threads does without it"
        )
    from functional_optim.remote import rpc  # noqa: PLC0415  imports all of torch's RPC

    return rpc
