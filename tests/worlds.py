"""Process groups with this process as the only rank."""

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_LATEST: collections.deque[Any] = collections.deque(maxlen=4)
"""Latest groups, kept alive: otherwise a callback in a thread of gloo may free a group, or the end
of a DDP module may wait for that thread, which waits for Python."""


@contextmanager
def world_of_one(**options: Any) -> Iterator[None]:
    """Make a default group in which this process is the only rank.

    Args:
        options: options of ``init_process_group``.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **options)
    _LATEST.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
