"""The ranks of a group, by the numbers that they have in it and in the world."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, NewType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from functional_optim import _torch
from sharding.transport.local_group import LocalGroup

GroupRank = NewType("GroupRank", int)
"""A rank's number in a process group."""
GlobalRank = NewType("GlobalRank", int)
"""A rank's number in the world."""


class SplitGroup(NamedTuple):
    """Record of a group that was split from another: torch's own functions do not know it."""

    ranks: list[int]
    """The numbers in the world of its ranks."""
    backends: dict[str, str]
    """Its backends by device type."""


SPLIT_GROUPS: WeakKeyDictionary[dist.ProcessGroup, SplitGroup] = WeakKeyDictionary()
"""All groups that were split here, as long as anybody holds them."""


def global_rank(group: dist.ProcessGroup, rank: GroupRank) -> GlobalRank:
    """The number in the world of a rank of a group."""
    if isinstance(group, LocalGroup):
        return GlobalRank(group.ranks[rank])
    if group in SPLIT_GROUPS:
        return GlobalRank(SPLIT_GROUPS[group].ranks[rank])
    return GlobalRank(dist.get_global_rank(group, rank))


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The numbers in the world of all ranks of a group, in their order."""
    if isinstance(group, LocalGroup):
        return list(group.ranks)
    if group in SPLIT_GROUPS:
        return list(SPLIT_GROUPS[group].ranks)
    return dist.get_process_group_ranks(group)


def named(group: dist.ProcessGroup, ranks: Sequence[GroupRank]) -> str:
    """Ranks, as an error names them: ``group rank 1 (global rank 3)``."""
    return ", ".join(
        f"group rank {rank} (global rank {global_rank(group, rank)})" for rank in ranks
    )


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """After how long without the others an operation is an error."""
    if isinstance(group, LocalGroup):
        return timedelta(seconds=group.board.seconds)
    return _torch.timeout_of(group, device)
