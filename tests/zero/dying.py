"""Jobs in which one rank dies, in a step or while state is collected.

The group's timeout is so long that a rank that waits for it counts as a hang. The dying rank exits
with code 0, so that the launcher does not stop the other ranks early.
"""

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

from sharding.zero import full_state_dict, stream

from .towers import give, raised, tower

FAR = 3600.0
"""Timeout of a group in seconds, far longer than a launch may take."""
DYING = 1


def dies_in(what: str) -> str:
    """Let one rank die in a step or a collection, and return the error of the other ranks."""
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
        if what != "sending" or calls == 3:  # the first two announce the tensors
            os._exit(0)
        return function(*arguments, **options)

    if dist.get_rank() == DYING:
        mock.patch.object(place, name, dies).start()
    error = raised(action)
    if what != "step":  # other ranks may wait for a failed rank's data until it exits
        # Ranks that have not noticed the death would report a rank that leaves early.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"told {dist.get_rank()}", "")
        others = [rank for rank in range(dist.get_world_size()) if rank != DYING]
        store.wait([f"told {rank}" for rank in others], timedelta(seconds=120))
    return error
