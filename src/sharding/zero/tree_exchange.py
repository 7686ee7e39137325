"""Exchange of trees between ranks: structure as JSON, tensors as copies of bytes, no pickle."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.engine.tensors import is_dense
from sharding.plan_json import dtype_name, find_dtype
from sharding.resharding import RangeCopy
from sharding.transport.groups import has_messages
from sharding.transport.protocol import TransportError
from sharding.zero.collective import run_on_all_ranks
from sharding.zero.range_exchange import make_copies

CHUNK_BYTES = 1 << 24
"""Maximum number of bytes of a message, and of the memory for it."""

Plain = None | bool | int | float | str
Pair = tuple[int, int]
"""The rank that sends a tree, and the rank that gets it."""


def exchange_trees(
    group: dist.ProcessGroup,
    device: torch.device,
    what: str,
    make: Callable[[], Mapping[int, Any]],
    place: Callable[[Any], Any] | None = None,
) -> dict[int, Any]:
    """Send trees to other ranks, and return those that other ranks send to this one. Collective.

    A tree consists of dicts, lists, tuples, plain values and tensors. The received tensors are on
    the CPU.

    Args:
        group: the ranks.
        device: of the messages.
        what: the ranks do, for errors: "collect state".
        make: returns this rank's tree for each rank that gets one.
        place: gets a received tree, with tensors on the meta device, and returns the tree to fill,
            with as many tensors of as many elements; by default, a tree of new tensors.

    Raises:
        BaseException: what ``make`` or ``place`` raised; before the first tensor is sent.
        TypeError: ``make`` returned a value of another kind.
        RuntimeError: another rank failed; names the rank, and its error.
        TransportError: a rank died, or did not come; names it.
    """
    tensors: dict[Pair, list[Tensor]] = {}
    rank, found = group.rank(), dict[int, Any]()

    def describe() -> dict[int, Any]:
        given = make()
        return {to: _describe(given[to], tensors.setdefault((rank, to), [])) for to in given}

    told = run_on_all_ranks(group, device, what, describe)
    trees = {(k, int(to)): one for k, own in enumerate(told) for to, one in own.items()}
    into: dict[Pair, list[Tensor]] = {}

    def allocate() -> None:
        for (source, target), described in trees.items():
            if target == rank:
                tree = _build_tree(described, "cpu" if place is None else "meta")
                found[source] = tree if place is None else place(tree)
                into[source, target] = list_tensors(found[source])

    run_on_all_ranks(group, device, what, allocate)
    run_on_all_ranks(group, device, what, lambda: _copy(group, device, what, trees, tensors, into))
    return found


def _copy(
    group: dist.ProcessGroup,
    device: torch.device,
    what: str,
    trees: Mapping[Pair, Any],
    sent: Mapping[Pair, Sequence[Tensor]],
    received: Mapping[Pair, Sequence[Tensor]],
) -> None:
    """Copy the tensors of trees, whose descriptions all ranks have, from rank to rank."""
    first: TransportError | None = None
    is_collective = not has_messages(group, device)
    for pair, described in trees.items():
        if is_collective or group.rank() in pair:
            before, after = (_bytes_by_path(one.get(pair, ())) for one in (sent, received))
            sizes = [one.nbytes for one in list_tensors(_build_tree(described, "meta"))]
            try:
                for copies in plan_copies(*pair, sizes):
                    make_copies(copies, before, after, group, device, what)
            except TransportError as error:
                first = first or error  # other ranks still wait for this one
    if first is not None:
        raise first


def plan_copies(source: int, target: int, sizes: Sequence[int]) -> Iterator[list[RangeCopy]]:
    """Yield the copies of tensors by message, from their sizes in bytes.

    A message has many small tensors, or a part of a large one.
    """
    copies: list[RangeCopy] = []
    room = CHUNK_BYTES
    for place, size in enumerate(sizes):
        start = 0
        while start < size:
            length = min(room, size - start)
            copies.append(RangeCopy(str(place), source, start, target, start, length, start))
            start, room = start + length, room - length
            if not room:
                yield copies
                copies, room = [], CHUNK_BYTES
    if copies:
        yield copies


def _bytes_by_path(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the memory of dense tensors as bytes, by the path of their copies."""
    found = {}
    for place, tensor in enumerate(tensors):
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        found[str(place)] = flat.view(torch.uint8)
    return found


def _describe(content: Any, tensors: list[Tensor]) -> Any:
    """Return a tree as JSON can encode it, and append its tensors to a list."""
    if isinstance(content, Tensor):
        dense = content.detach().resolve_conj().resolve_neg()
        dense = dense if is_dense(dense) else dense.contiguous()
        tensors.append(dense)
        return {"tensor": [dtype_name(dense.dtype), list(dense.shape), list(dense.stride())]}
    if isinstance(content, dict):
        pairs = content.items()
        return {"dict": [[_describe(key, tensors), _describe(one, tensors)] for key, one in pairs]}
    if isinstance(content, (list, tuple)):
        kind = "list" if isinstance(content, list) else "tuple"
        return {kind: [_describe(item, tensors) for item in content]}
    if isinstance(content, Plain):
        return content
    raise TypeError(
        "state that is consolidated must be of tensors, numbers, strings, lists, tuples and dicts, "
        f"got {content!r}"
    )


def _build_tree(described: Any, device: str) -> Any:
    """Return the tree of a description, with empty tensors on a device."""
    if not isinstance(described, dict):
        return described
    ((kind, value),) = described.items()
    if kind == "tensor":
        name, shape, stride = value
        return torch.empty_strided(shape, stride, dtype=find_dtype(name), device=device)
    if kind == "dict":
        return {_build_tree(key, device): _build_tree(item, device) for key, item in value}
    items = [_build_tree(item, device) for item in value]
    return items if kind == "list" else tuple(items)


def list_tensors(content: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    if isinstance(content, Tensor):
        return [content]
    if isinstance(content, dict):
        # A received tree has no tensors as keys: they would not be equal to the sent keys.
        return [tensor for value in content.values() for tensor in list_tensors(value)]
    if isinstance(content, (list, tuple)):
        return [tensor for item in content for tensor in list_tensors(item)]
    return []
