"""Exchange of ranges of parameters between ranks: it makes the copies of ``reshard``."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functional_optim.engine.messages import format_value
from sharding.resharding import RangeCopy
from sharding.transport.groups import GroupRank, backends_of, format_ranks, resolve_group
from sharding.transport.packed import Form, PackedTensors, copy_pairs, exchange_packed
from sharding.zero.collective import run_on_all_ranks

_WHAT = "exchange ranges of parameters"


def exchange(
    copies: Iterable[RangeCopy],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Make the copies of :func:`~sharding.reshard` between the ranks of a group. Collective.

    Each rank sends all elements for another rank in one message, bit for bit. So parameters, or
    state tensors of their shape, get from the owners of one plan to the owners of another: between
    policies, or between numbers of ranks of which both are at most the size of the group. Call it
    once for the parameters, and once for each state tensor.

    A 0-d tensor, such as a step count, belongs to a whole parameter. Each copy of its parameter
    carries it.

    Args:
        copies: those that this rank sends or receives, as ``reshard(..., rank=rank)`` returns them;
            copies between other ranks are ignored. Their ranks are ranks in the group.
        before: by path, the elements that this rank has before, in a tensor of one dimension: its
            ranges of the parameter, one after the other.
        after: by path, a tensor for the elements that this rank gets, in the same form. It may
            share memory with ``before``.
        group: the ranks; by default the world.
        device: of all tensors, on all ranks.

    Raises:
        TypeError: a value is no tensor.
        ValueError: the group has no backend for the device; a tensor is missing, too short, of
            several dimensions, or on another device. On all ranks: two ranks have copies of
            different plans, or tensors of different dtypes. Nothing has changed on any rank.
        RuntimeError: the tensors of another rank were refused; names the rank, and its error.
        TransportError: a rank died, or did not come.

    Example::

        >>> import torch
        >>> import torch.distributed as dist
        >>> from sharding import ParameterSpec, exchange, plan, reshard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> specs = [ParameterSpec("w", (4,))]
        >>> copies = reshard(plan(specs, 1), plan(specs, 1, "elements"), rank=0)
        >>> after = {"w": torch.zeros(4)}
        >>> exchange(copies, {"w": torch.arange(4.0)}, after)
        >>> after["w"]
        tensor([0., 1., 2., 3.])
        >>> dist.destroy_process_group()
    """
    members = resolve_group(group)
    device, rank, size = torch.device(device), members.rank(), members.size()
    if device.type not in backends_of(members):
        raise ValueError(
            f"this group has no backend for {device.type} tensors, it has {backends_of(members)}; "
            "init_process_group('cpu:gloo,cuda:nccl') gives a group both"
        )
    ordered = sorted(copies, key=lambda one: (one.path, one.start, one.source, one.target))

    def check() -> dict[str, dict[int, str]]:
        """Check this rank's tensors. Return a digest for each other rank, sent and received."""
        sends = {True: dict[int, Any](), False: dict[int, Any]()}
        for one, is_sent, peer in _copies_of(ordered, rank):
            part = _part_of(one, before if is_sent else after, device, size, sends=is_sent)
            digest = sends[is_sent].setdefault(peer, hashlib.blake2b(digest_size=16))
            digest.update(f"{one.path}\0{one.start}\0{part.dtype}\0{tuple(part.shape)}\1".encode())
        told = {name: sends[key] for name, key in (("sent", True), ("received", False))}
        return {name: {k: one.hexdigest() for k, one in own.items()} for name, own in told.items()}

    told = run_on_all_ranks(members, device, _WHAT, check)
    sent = {(k, int(to)): one for k, own in enumerate(told) for to, one in own["sent"].items()}
    found = {(int(at), k): one for k, own in enumerate(told) for at, one in own["received"].items()}
    for pair in sorted({*sent, *found}):
        if sent.get(pair) != found.get(pair):
            source, target = (format_ranks(members, [GroupRank(one)]) for one in pair)
            raise ValueError(
                f"{source} sends other ranges or dtypes than {target} expects: give all ranks "
                "copies of the same two plans, and tensors of the same dtypes"
            )
    make_copies(ordered, before, after, members, device, _WHAT)


def make_copies(
    copies: Sequence[RangeCopy],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    what: str,
) -> None:
    """Make copies without a check of their tensors.

    Arguments as for :func:`exchange`; ``copies`` are in the same order on all ranks, tensors may be
    on any device, and ``device`` is that of the messages. ``what`` the ranks do, for errors.
    """
    ranks, rank = range(group.size()), group.rank()
    sent: list[list[Tensor]] = [[] for _ in ranks]
    found: list[list[Tensor]] = [[] for _ in ranks]
    for one, is_sent, peer in _copies_of(copies, rank):
        tensors, at = (before, one.source_offset) if is_sent else (after, one.target_offset)
        part = tensors[one.path].detach()
        (sent if is_sent else found)[peer].append(
            part[at : at + one.length] if part.dim() else part
        )
    packed, coming = (PackedTensors(_forms(own), device, header=0) for own in (sent, found))
    packed.write(b"", [part for parts in sent for part in parts])
    exchange_packed(group, coming, packed, what)
    pairs = zip(found, coming.tensors, strict=True)
    copy_pairs([pair for parts, views in pairs for pair in zip(parts, views, strict=True)])


def _copies_of(copies: Iterable[RangeCopy], rank: int) -> Iterator[tuple[RangeCopy, bool, int]]:
    """Yield the copies of a rank with the other rank, True for those that the rank sends."""
    for one in copies:
        if one.source == rank:
            yield one, True, one.target
        if one.target == rank:
            yield one, False, one.source


def _part_of(
    copy: RangeCopy, tensors: Mapping[str, Tensor], device: torch.device, size: int, *, sends: bool
) -> Tensor:
    """Return the elements of a copy in the tensor of this rank, after checking it."""
    name, at = ("before", copy.source_offset) if sends else ("after", copy.target_offset)
    if not 0 <= (copy.target if sends else copy.source) < size:
        raise ValueError(
            f"a copy of {copy.path!r} goes from rank {copy.source} to rank {copy.target}, and the "
            f"group has {size} ranks: give a group with all ranks of both plans"
        )
    if copy.path not in tensors:
        raise ValueError(
            f"{name} has no {copy.path!r}, and this rank {'sends' if sends else 'gets'} "
            f"{copy.length} elements of it"
        )
    tensor = tensors[copy.path]
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}[{copy.path!r}] must be a tensor, got {format_value(tensor)}")
    if tensor.device.type != device.type:
        raise ValueError(
            f"{name}[{copy.path!r}] is on {tensor.device}, and tensors on {device.type} are "
            f"exchanged: move it there, or give device={tensor.device.type!r} on all ranks"
        )
    if tensor.dim() == 0:
        return tensor.detach()
    if tensor.dim() > 1 or tensor.numel() < at + copy.length:
        raise ValueError(
            f"{name}[{copy.path!r}] has shape {tuple(tensor.shape)}, and elements "
            f"[{at}, {at + copy.length}) of it are copied: give a tensor of one dimension with the "
            "ranges of this rank, one after the other"
        )
    return tensor.detach()[at : at + copy.length]


def _forms(parts: Sequence[Sequence[Tensor]]) -> list[list[Form]]:
    return [[(tuple(part.shape), part.dtype) for part in own] for own in parts]
