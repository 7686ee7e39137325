"""Exchange of ranges of parameters between ranks: it makes the copies of ``reshard``."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functional_optim.engine.messages import format_value
from sharding.resharding import RangeCopy
from sharding.transport.groups import GroupRank, backends_of, format_ranks, resolve_group
from sharding.transport.packed import HEADER, Form, PackedTensors, begin_exchange, copy_pairs
from sharding.zero.collective import run_on_all_ranks

_WHAT = "exchange ranges of parameters"

_REFUSED = bytes(HEADER)
"""Header of a rank that refuses its arguments, whose error is then raised on all ranks."""


def exchange(
    copies: Iterable[RangeCopy],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Make the copies of :func:`~sharding.reshard` between the ranks of a group. Collective.

    One all_to_all moves all elements, bit for bit. So parameters, or state tensors of their shape,
    get from the owners of one plan to the owners of another: between policies, or between numbers
    of ranks of which both are at most the size of the group. Call it once for the parameters, and
    once for each state tensor.

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
            several dimensions, on another device, or of another dtype than on the other rank.
            Nothing has changed on any rank.
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
    sent: list[list[Tensor]] = [[] for _ in range(size)]
    found: list[list[Tensor]] = [[] for _ in range(size)]
    keys = {True: [hashlib.blake2b(digest_size=HEADER) for _ in sent]}
    keys[False] = [one.copy() for one in keys[True]]
    refused: Exception | None = None
    own = [(one, True, one.target) for one in ordered if one.source == rank]
    own += [(one, False, one.source) for one in ordered if one.target == rank]
    try:
        for one, sends, peer in own:
            part = _part_of(one, before if sends else after, device, size, sends=sends)
            (sent if sends else found)[peer].append(part)
            keys[sends][peer].update(_key_of(one, part).encode())
    except (TypeError, ValueError) as error:
        refused = error
    own_headers = [_REFUSED if refused else one.digest() for one in keys[True]]
    headers = _exchange_headers(members, device, own_headers)

    def check() -> None:
        if refused is not None:
            raise refused
        wanted = [one.digest() for one in keys[False]]
        for peer, (own, other) in enumerate(zip(wanted, headers, strict=True)):
            if other not in (own, _REFUSED):
                raise ValueError(
                    f"{format_ranks(members, [GroupRank(peer)])} sends other ranges or dtypes than "
                    f"{format_ranks(members, [GroupRank(rank)])} expects: give all ranks copies of "
                    "the same two plans, and tensors of the same dtypes"
                )

    run_on_all_ranks(members, device, _WHAT, check)
    packed, coming = PackedTensors(_forms(sent), device), PackedTensors(_forms(found), device)
    packed.write(bytes(HEADER), [part for parts in sent for part in parts])
    begin_exchange(members, coming, packed, _WHAT)()
    pairs = zip(found, coming.tensors, strict=True)
    copy_pairs([pair for parts, views in pairs for pair in zip(parts, views, strict=True)])


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


def _key_of(copy: RangeCopy, part: Tensor) -> str:
    """Return what both ranks of a copy must agree on, as text."""
    return f"{copy.path}\0{copy.start}\0{part.dtype}\0{tuple(part.shape)}\1"


def _forms(parts: Sequence[Sequence[Tensor]]) -> list[list[Form]]:
    return [[(tuple(part.shape), part.dtype) for part in own] for own in parts]


def _exchange_headers(
    group: dist.ProcessGroup, device: torch.device, headers: Sequence[bytes]
) -> list[bytes]:
    """Send a header to each rank, and return the header of each rank."""
    sent = PackedTensors([()] * group.size(), device)
    found = PackedTensors([()] * group.size(), device)
    for into, header in zip(sent.headers, headers, strict=True):
        into.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    begin_exchange(group, found, sent, _WHAT)()
    return found.read_headers()
