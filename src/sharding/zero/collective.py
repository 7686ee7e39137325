"""Collective functions: a failure on one rank of a group is raised on all of its ranks."""

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.groups import GroupRank, format_ranks, has_messages
from sharding.transport.protocol import TransportError
from sharding.zero.dissemination import disseminate

MAX_ERROR_LENGTH = 10_000
"""Maximum number of characters of an error that are sent to the other ranks."""


def run_on_all_ranks(
    group: dist.ProcessGroup, device: torch.device, what: str, action: Callable[[], Any]
) -> list[Any]:
    """Call a function on every rank, and return the result of each rank. Collective.

    If the call fails on a rank, also by an interrupt, the rank first sends the error to all others.

    Args:
        group: the ranks.
        device: on which the backend of the group works.
        what: the function does, for errors: "save the checkpoint".
        action: returns a value that JSON can encode.

    Raises:
        BaseException: what ``action`` raised, on the rank where it failed.
        RuntimeError: ``action`` failed on another rank; names the first such rank, and its error.
        TransportError: a rank died, or did not come; names it.
    """
    error: BaseException | None = None
    try:
        told = json.dumps({"value": action()})
    except BaseException as found:  # noqa: BLE001  raised below, after the other ranks know of it
        error = found
        told = json.dumps({"error": f"{type(found).__name__}: {found}"[:MAX_ERROR_LENGTH]})
    try:
        texts = all_gather_bytes(group, device, told.encode(), what)
    except TransportError:
        if error is None:
            raise
        raise error from None  # other ranks may be gone because of this error
    if error is not None:
        raise error
    found_by_rank = [json.loads(text) for text in texts]
    failed = [rank for rank, found in enumerate(found_by_rank) if "error" in found]
    if failed:
        others = [GroupRank(rank) for rank in failed[1:]]
        more = f" ({format_ranks(group, others)} failed as well)" if others else ""
        raise RuntimeError(
            f"{format_ranks(group, [GroupRank(failed[0])])} could not {what}: "
            f"{found_by_rank[failed[0]]['error']}{more}"
        )
    return [found["value"] for found in found_by_rank]


def all_gather_bytes(
    group: dist.ProcessGroup,
    device: torch.device,
    data: bytes,
    what: str,
    length: int | None = None,
) -> list[bytes]:
    """Return the bytes of every rank, in the order of group ranks. Collective, without pickle.

    Arguments as for :func:`run_on_all_ranks`. ``length`` is that of the data, if all ranks have the
    same length.
    """
    if length is None:
        sizes = all_gather_bytes(group, device, len(data).to_bytes(8, "little"), what, 8)
        lengths = [int.from_bytes(one, "little") for one in sizes]
    else:
        lengths = [length] * group.size()
    if has_messages(group, device):
        return list(map(as_bytes, disseminate(group, as_tensor(data), lengths, what)))
    padded = as_tensor(data.ljust(max(lengths), b"\0")).to(device)
    every = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(every, padded, group=group)
    return [as_bytes(one[:size].cpu()) for one, size in zip(every, lengths, strict=True)]


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a uint8 tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""
