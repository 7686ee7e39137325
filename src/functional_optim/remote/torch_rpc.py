"""The transport over torch's RPC, imported when it is asked for."""

from typing import Any

import torch


def torch_rpc() -> Any:
    """The transport over torch's RPC.

    Raises:
        ImportError: this build of torch has none.
    """
    if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
        raise ImportError(
            "parameters on other processes need torch.distributed.rpc, which this build of torch "
            "does not have; DistributedOptimizer.over_threads does without it"
        )
    from functional_optim.remote import rpc  # noqa: PLC0415  it brings in all of torch's RPC

    return rpc
