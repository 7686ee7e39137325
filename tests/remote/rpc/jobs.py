"""Job of the processes over torch's RPC: run all scenarios."""

import os
import traceback
import warnings
from typing import Any

import torch
from torch.distributed import rpc

from functional_optim._torch.distributed import rpc_over_sockets
from sharding.testing import at
from tests.remote.rpc.scenarios import SCENARIOS
from tests.remote.rpc.small_model import NAMES


def drive(meeting: str) -> dict[str, Any]:
    """Run all scenarios on the trainer; return by name the result, or the traceback."""
    # torch's init_rpc uses a process group in a way that torch.distributed deprecates.
    warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rank = torch.distributed.get_rank()
    options = rpc_over_sockets(init_method=f"file://{meeting}", rpc_timeout=60)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)
    found = {}
    if rank == 0:
        for scenario in SCENARIOS:
            at(scenario.__name__)
            try:
                found[scenario.__name__] = scenario()
            except Exception:  # noqa: BLE001  the others go on
                found[scenario.__name__] = {"wrong": traceback.format_exc()}
    rpc.shutdown()
    return found
