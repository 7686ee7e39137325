"""Process groups of this process alone."""

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_LATEST: collections.deque[Any] = collections.deque(maxlen=4)
"""Held on to: a callback of a collective may be the last to hold its group, in a thread of gloo; or
a DDP module is, whose end waits for that thread, which waits for Python."""


@contextmanager
def world_of_one(**options: Any) -> Iterator[None]:
    """A default group in which this process is the only rank.

    Args:
        options: of ``init_process_group``.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **options)
    _LATEST.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
