"""Jobs in which one rank dies while state is collected or in a step, or does not come.

The group's timeout is so long that a rank that waits for it counts as a hang. The dying rank exits
with code 0, so that the launcher does not stop the other ranks early.
"""

import os
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from functional_optim import adamw, chain, clip_by_global_norm
from sharding import ZeroRedundancyOptimizer
from sharding.zero import full_state_dict, norm, step_agreement, tree_exchange

from .towers import give, raised, tower

FAR = 3600.0
"""Timeout of a group in seconds, far longer than a launch may take."""
DYING = 1
SUMS = ("total", "clip", "clip by maximum", "scaler")
"""Collectives of a step, or of clipping, of a few numbers of each rank."""


def dies_in(what: str) -> str:
    """Let one rank die in a collection, and return the error of the other ranks."""
    _, zero = tower("adamw", policy="elements")
    for step in range(2):
        give(zero, step)
        zero.step()
    give(zero, 3)
    place, name = {
        "collect": (full_state_dict, "local_content"),
        "sending": (tree_exchange, "make_copies"),
    }[what]

    def dies(*_: Any, **__: Any) -> Any:
        os._exit(0)

    if dist.get_rank() == DYING:
        mock.patch.object(place, name, dies).start()
    error = raised(zero.consolidate_state_dict)
    wait_for_others(DYING)
    return error


def lost_in(what: str, *, dies: bool) -> str:
    """Let one rank die before a sum over ranks, or not come; return the error of other ranks."""
    optimizer = chain(clip_by_global_norm(0.1), adamw(lr=0.1))
    params = [(f"p{place}", torch.nn.Parameter(torch.ones(5, 3))) for place in range(4)]
    zero = ZeroRedundancyOptimizer(params, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # the first call creates the scale

    def give_gradients() -> None:
        for _, param in params:
            param.grad = torch.ones(5, 3)

    actions = {
        "total": zero.step,
        "clip": lambda: zero.clip_grad_norm_(1.0),
        "clip by maximum": lambda: zero.clip_grad_norm_(1.0, float("inf")),
        "scaler": lambda: scaler.step(zero),
    }
    place: tuple[Any, str] = {
        "total": (zero, "total"),
        "scaler": (step_agreement, "exchange_status"),
    }.get(what, (norm, "_reduce_addends"))
    give_gradients()
    zero.step()
    give_gradients()

    def leaves(*_: Any, **__: Any) -> None:
        if dies:
            os._exit(0)
        raise KeyboardInterrupt

    with ExitStack() as stack:
        if dist.get_rank() == DYING:
            stack.enter_context(mock.patch.object(*place, leaves))
        error = raised(actions[what])
    wait_for_others(DYING)
    return error


def wait_for_others(lost: int) -> None:
    """Wait until each rank but the lost one has an error.

    A rank that leaves early would be reported, too.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"told {dist.get_rank()}", "")
    others = [rank for rank in range(dist.get_world_size()) if rank != lost]
    store.wait([f"told {rank}" for rank in others], timedelta(seconds=120))
