"""The laws of every transport, tried over torch's RPC by the trainer."""

import traceback
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from tests.remote.laws import LAWS

WORKERS = {"ps0": "ps1", "ps1": "ps2"}


def kept(param: Tensor) -> Tensor:
    """On the worker."""
    return param.detach().clone().requires_grad_(param.requires_grad)


def over_rpc(
    optimizer_class: Any, params: Any, placement: Mapping[str, str], *args: Any, **kwargs: Any
) -> DistributedOptimizer:
    """As ``over_threads``: parameters are sent to workers first."""

    def sent(pairs: Any) -> list[tuple[str, Any]]:
        return [
            (name, rpc.remote(WORKERS[placement[name]], kept, args=(param,)))
            for name, param in pairs
        ]

    if isinstance(params, list) and isinstance(params[0], dict):
        made: list[Any] = [{**group, "params": sent(group["params"])} for group in params]
    else:
        made = sent(params.items() if isinstance(params, dict) else params)
    return DistributedOptimizer(optimizer_class, made, *args, **kwargs)


def the_laws() -> dict[str, str]:
    """Which of them hold, and of others why not."""
    found = {}
    for name, law in LAWS.items():
        try:
            law(over_rpc)
        except Exception:  # noqa: BLE001  it is told
            found[name] = traceback.format_exc()
        else:
            found[name] = "holds"
    return found
