"""What all ranks of a group must agree on, compared before anything depends on it."""

import ctypes
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.shard_plan import ShardPlan
from sharding.transport.groups import has_messages
from sharding.transport.messages import Direction, launched, receive
from sharding.transport.peers import GroupRank, named
from sharding.transport.protocol import TransportError

COMPARED = ("path", "shape", "dtype", "device", "requires_grad", "kind", "group")
"""What of a parameter must be the same on all ranks."""

DIGEST_BYTES = 32
FAILED = "failed: "
"""What stands in place of a plan."""
TAG = (1 << 29) + 1
"""Of the messages of these exchanges; no other messages have it."""


def agreed(
    group: dist.ProcessGroup, device: torch.device, make: Callable[[], ShardPlan]
) -> ShardPlan:
    """Make a plan, and see to it that every rank of a group has made the same one. Collective.

    What travels is a digest; only where one differs, the plans as JSON.

    Raises:
        ValueError: on every rank, naming the first difference between their parameters or plans,
            or the rank that could not make one.
        Exception: what ``make`` raises, on the rank where it does.
    """
    try:
        plan = make()
    except BaseException as error:  # an interrupt, too
        # The others are not left waiting.
        exchanged(group, device, bytes(DIGEST_BYTES), DIGEST_BYTES)
        exchanged(group, device, f"{FAILED}{type(error).__name__}: {error}".encode())
        raise
    trained = "".join(str(int(spec.requires_grad)) for spec in plan.specs)
    digest = sha256(f"{plan.digest} {trained}".encode()).digest()
    if len(set(exchanged(group, device, digest, DIGEST_BYTES))) == 1:
        return plan
    texts = [one.decode() for one in exchanged(group, device, plan.to_json().encode())]
    for rank, text in enumerate(texts):
        if text.startswith(FAILED):
            who = named(group, [GroupRank(rank)])
            raise ValueError(f"{who} could not make a plan: {text.removeprefix(FAILED)}")
    plans = [ShardPlan.from_json(text) for text in texts]
    for rank, other in enumerate(plans):
        _compare(plans[0], other, named(group, [GroupRank(rank)]))
    return plan


def _compare(first: ShardPlan, other: ShardPlan, who: str) -> None:
    """Raise ValueError for the first difference."""
    told = "the ranks have different parameters"
    for place, (one, two) in enumerate(zip_longest(first.specs, other.specs)):
        if one is None or two is None:
            path, where = (two.path, who) if one is None else (one.path, "group rank 0")
            raise ValueError(f"{told}: {path!r}, at place {place}, is on {where} only")
        for name in COMPARED:
            here, there = getattr(one, name), getattr(two, name)
            if here != there:
                raise ValueError(
                    f"{told}: the one at place {place}, {one.path!r}, has {name} {there!r} on "
                    f"{who}, {here!r} on group rank 0; all must be the same, in the same order"
                )
    changes = first.diff(other)
    if changes:
        raise ValueError(f"the ranks have different plans: {who} against group rank 0:\n{changes}")


def exchanged(
    group: dist.ProcessGroup,
    device: torch.device,
    data: bytes,
    length: int | None = None,
    what: str = "compare what ranks have",
) -> list[bytes]:
    """The bytes of every rank, in the order of group ranks. Collective; nothing is pickled.

    Args:
        group: whose ranks.
        device: where the group's backend works.
        data: of this rank.
        length: of the data, where all ranks know it to be the same.
        what: the ranks are doing, for errors.

    Raises:
        TransportError: a rank died or did not come; names it (over gloo).
    """
    if length is None:
        own_length = torch.tensor([len(data)], device=device)
        lengths = [int(one) for one in gathered(group, own_length, what)]
    else:
        lengths = [length] * group.size()
    own = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    own[: len(data)] = as_tensor(data)
    every = gathered(group, own.to(device), what)
    return [as_bytes(one[:size].cpu()) for one, size in zip(every, lengths, strict=True)]


def gathered(
    group: dist.ProcessGroup, tensor: Tensor, what: str = "compare what ranks have"
) -> Sequence[Tensor]:
    """A tensor of one shape from every rank. Collective.

    Args:
        group: whose ranks.
        tensor: of this rank.
        what: the ranks are doing, for errors.

    Raises:
        TransportError: a rank died or did not come; names it (over gloo).
    """
    every = [torch.empty_like(tensor) for _ in range(group.size())]
    if not has_messages(group, tensor.device):
        dist.all_gather(every, tensor, group=group)
        return every
    every[group.rank()] = tensor
    if tensor.numel():
        _exchange(group, tensor, every, what)
    return every


def _exchange(group: dist.ProcessGroup, own: Tensor, every: Sequence[Tensor], what: str) -> None:
    """Send to each and receive from each: in a ring, a rank would know of its neighbour alone.

    A rank that finds another one gone still sends to all others: they find it gone themselves, and
    would otherwise wait for this one.
    """
    messages = []
    gone: TransportError | None = None
    for direction in (Direction.TO, Direction.FROM):
        for rank, other in enumerate(every):
            if rank == group.rank():
                continue
            tensor = own if direction is Direction.TO else other
            try:
                messages.append(launched(what, group, direction, rank, tensor, tensor.numel(), TAG))
            except TransportError as error:
                gone = gone or error
    receive(what, group, messages, patient=True)
    if gone is not None:
        raise gone


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
