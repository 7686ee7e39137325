"""Jobs of the ranks, one of which dies in a step, or while state is collected.

The timeout of the group is far away: a rank that waited for it would be taken for a hang. The rank
that dies ends with the code of one that ends well, so that the others have their time.
"""

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

from sharding.zero import full_state_dict, stream

from .towers import give, raised, tower

FAR = 3600.0
"""Seconds of a group's timeout: far more than a launch has."""
DYING = 1


def dies_in(what: str) -> str:
    """One rank dies: before a step, before its state is collected, or while it sends that; what the
    others raise."""
    _, zero = tower("adamw", policy="elements")
    for step in range(2):
        give(zero, step)
        zero.step()
    give(zero, 3)
    place, name, action = {
        "step": (zero, "_find_memory", zero.step),
        "collect": (full_state_dict, "local_content", zero.consolidate_state_dict),
        "sending": (stream.Stream, "_send", zero.consolidate_state_dict),
    }[what]
    function, calls = getattr(place, name), 0

    def dies(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if what != "sending" or calls == 3:  # the first two say what is to come
            os._exit(0)
        return function(*arguments, **options)

    if dist.get_rank() == DYING:
        mock.patch.object(place, name, dies).start()
    error = raised(action)
    if what != "step":  # others may wait for pieces of a rank that has failed, until it is gone
        # Whoever left would be gone, too, for those that have not noticed yet.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"told {dist.get_rank()}", "")
        others = [rank for rank in range(dist.get_world_size()) if rank != DYING]
        store.wait([f"told {rank}" for rank in others], timedelta(seconds=120))
    return error
