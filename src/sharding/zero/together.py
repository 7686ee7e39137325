"""What all ranks do at once: where it fails on one of them, it has failed on all."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sharding.transport import TransportError
from sharding.transport.peers import GroupRank, named
from sharding.zero.agreement import exchanged

LONGEST = 10_000
"""Characters of an error that travel to the other ranks."""


def together(
    group: dist.ProcessGroup, device: torch.device, what: str, action: Callable[[], Any]
) -> list[Any]:
    """Do something on every rank, and learn what became of it on each. Collective.

    A rank that fails in any way, by an interrupt too, tells the others, and then raises what it
    would have raised alone.

    Args:
        group: whose ranks.
        device: where the group's backend works.
        what: is being done, for errors: "save the checkpoint".
        action: returns what the other ranks are to know: something that JSON can hold.

    Returns:
        What it returned on each rank, in their order.

    Raises:
        BaseException: what ``action`` raised, on the rank where it did.
        RuntimeError: another rank could not; names the first, and says why.
        TransportError: a rank died, or did not come; names it.
    """
    error: BaseException | None = None
    try:
        told = json.dumps({"value": action()})
    except BaseException as found:  # noqa: BLE001  raised below, once the others know
        error = found
        told = json.dumps({"error": f"{type(found).__name__}: {found}"[:LONGEST]})
    try:
        texts = exchanged(group, device, told.encode(), what=what)
    except TransportError:
        if error is None:
            raise
        raise error from None  # the ranks that are gone are not the reason here
    if error is not None:
        raise error
    found_by_rank = [json.loads(text) for text in texts]
    failed = [rank for rank, found in enumerate(found_by_rank) if "error" in found]
    if failed:
        others = [GroupRank(rank) for rank in failed[1:]]
        more = f" ({named(group, others)} failed as well)" if others else ""
        raise RuntimeError(
            f"{named(group, [GroupRank(failed[0])])} could not {what}: "
            f"{found_by_rank[failed[0]]['error']}{more}"
        )
    return [found["value"] for found in found_by_rank]
