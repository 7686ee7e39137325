"""Collective functions: a failure on one rank of a group is a failure on all of them."""

import ctypes
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.groups import has_messages
from sharding.transport.peers import GroupRank, named
from sharding.transport.protocol import TransportError
from sharding.zero.dissemination import disseminated

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
        texts = exchanged(group, device, told.encode(), what)
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


def exchanged(
    group: dist.ProcessGroup,
    device: torch.device,
    data: bytes,
    what: str,
    length: int | None = None,
) -> list[bytes]:
    """The bytes of every rank, in the order of group ranks. Collective; nothing is pickled.

    Args:
        group: whose ranks.
        device: where the group's backend works.
        data: of this rank.
        what: the ranks are doing, for errors.
        length: of the data, where all ranks know it to be the same.

    Raises:
        TransportError: a rank died or did not come; names it (over gloo).
    """
    if length is None:
        own_length = torch.tensor([len(data)], device=device)
        lengths = [int(one) for one in gathered(group, own_length, what)]
    else:
        lengths = [length] * group.size()
    if has_messages(group, device):
        return list(map(as_bytes, disseminated(group, as_tensor(data), lengths, what)))
    own = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    own[: len(data)] = as_tensor(data)
    every = gathered(group, own.to(device), what)
    return [as_bytes(one[:size].cpu()) for one, size in zip(every, lengths, strict=True)]


def gathered(group: dist.ProcessGroup, tensor: Tensor, what: str) -> Sequence[Tensor]:
    """A tensor of one shape from every rank. Collective.

    Args:
        group: whose ranks.
        tensor: of this rank, contiguous.
        what: the ranks are doing, for errors.

    Raises:
        TransportError: a rank died or did not come; names it (over gloo).
    """
    if not has_messages(group, tensor.device):
        every = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(every, tensor, group=group)
        return every
    own = tensor.view(-1).view(torch.uint8)
    found = disseminated(group, own, [own.numel()] * group.size(), what)
    return [one.view(tensor.dtype).view(tensor.shape) for one in found]


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def as_bytes(tensor: Tensor) -> bytes:
    """The inverse."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""
