"""Laws of every transport, run over torch's RPC by the trainer."""

import threading
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from functional_optim.remote.rpc import RpcTransport
from tests.remote.laws import LAWS
from tests.remote.support import LIMIT
from tests.remote.transports import Shelf

WORKERS = {"ps0": "ps1", "ps1": "ps2"}


def kept(param: Tensor) -> Tensor:
    """Return a copy of a parameter, made on the worker."""
    return param.detach().clone().requires_grad_(param.requires_grad)


def over_rpc(
    optimizer_class: Any, params: Any, placement: Mapping[str, str], *args: Any, **kwargs: Any
) -> DistributedOptimizer:
    """Send the parameters to workers, then make an optimizer as ``over_threads`` does."""

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
    """Try the laws; return for each name "holds", or the traceback."""
    found = {}
    for name, law in LAWS.items():
        try:
            law(over_rpc)
        except Exception:  # noqa: BLE001  it is told
            found[name] = traceback.format_exc()
        else:
            found[name] = "holds"
    return found


_MAY_START = threading.Event()


def _held() -> Shelf:
    """Make an object on a worker, but only after the trainer allows it."""
    assert _MAY_START.wait(LIMIT)
    return Shelf(torch.ones(2))


def _may_start() -> None:
    _MAY_START.set()


_MAY_END = threading.Event()


def _endless(*_: Any) -> Shelf:
    """Block a worker until the trainer ends the wait, then return an object."""
    assert _MAY_END.wait(LIMIT)
    return Shelf(torch.ones(2))


def _may_end() -> None:
    _MAY_END.set()


def endless_start() -> str:
    """Return the error of a start that does not end before a much longer limit of calls."""
    transport = RpcTransport(start_timeout=0.1)
    told = transport.place("ps1", _endless).exception(LIMIT)
    rpc.rpc_sync("ps1", _may_end)
    return f"{type(told).__name__}: {told}"


def slow_start() -> dict[str, Any]:
    """Place an object for longer than a call can last; return its total, or the error."""
    seconds = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(0.5)
    try:
        transport = RpcTransport()
        placed = transport.place("ps1", _held)
    finally:
        rpc._set_rpc_timeout(seconds)
    try:
        early = placed.exception(1.0)
    except TimeoutError:  # the time-out of this caller, not of the worker
        early = None
    rpc.rpc_sync("ps1", _may_start)
    if early is not None:
        return {"early": str(early)}
    return {"total": transport.call(placed.result(LIMIT), "total").result(LIMIT).tolist()}
