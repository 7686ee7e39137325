"""Stream of state between two ranks: structure as JSON, tensors as chunks of bytes, no pickle."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.engine.tensors import is_dense
from sharding.plan_json import dtype_name, find_dtype
from sharding.transport import TransportError
from sharding.transport.groups import GroupRank, format_ranks, has_messages
from sharding.transport.messages import Direction, launch_message, wait_messages
from sharding.zero.collective import as_bytes, as_tensor

CHUNK_BYTES = 1 << 24
"""Maximum number of bytes of a message, and of the memory for it."""
TAG = 1 << 29
"""Tag of these messages, different from the tags of all other messages."""

Plain = None | bool | int | float | str


class Stream:
    """Messages between this rank and another rank of a group, whose backend works on a device."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._peer = GroupRank(peer)
        self._device = device
        self._has_messages = has_messages(group, device)

    def send(self, content: Any) -> None:
        """Send a tree of dicts, lists, tuples, plain values and tensors.

        Raises:
            TypeError: another value.
            TransportError: the other rank died or did not come.
        """
        tensors: list[Tensor] = []
        text = json.dumps(_describe(content, tensors)).encode()
        self._send(torch.tensor([len(text)], device="cpu"))
        self._send(as_tensor(text))
        for parts in iter_messages(tensors):  # a step count may be on the CPU
            there = [part.to(self._device) for part in parts]
            self._send(there[0] if len(there) == 1 else torch.cat(there))

    def receive(self, place: Callable[[Any], Any] = lambda found: found) -> Any:
        """Receive a tree from the other rank, on the CPU.

        ``place`` gets the received tree with empty tensors, and returns the tree to fill: an equal
        tree, whose tensors may be other tensors with the same number of elements.
        """
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._receive(length)
        text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._receive(text)
        content = place(_build_tree(json.loads(as_bytes(text))))
        for parts in iter_messages(list_tensors(content)):
            if len(parts) == 1:
                self._receive(parts[0])
                continue
            lengths = [one.numel() for one in parts]
            buffer = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
            self._receive(buffer)
            for part, values in zip(parts, buffer.split(lengths), strict=True):
                part.copy_(values)
        return content

    def _send(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._transfer(Direction.TO, tensor.to(self._device))

    def _receive(self, into: Tensor) -> None:
        if into.numel():
            on_device = into if self._device.type == "cpu" else into.to(self._device)
            self._transfer(Direction.FROM, on_device)
            if on_device is not into:
                into.copy_(on_device)

    def _transfer(self, direction: Direction, tensor: Tensor) -> None:
        """Send or receive a message, and wait for it."""
        what, group, peer = "pass state from rank to rank", self._group, self._peer
        if self._has_messages:
            wait_messages(
                what,
                group,
                [launch_message(what, group, direction, peer, tensor, tensor.numel(), TAG)],
            )
            return
        try:
            if direction is Direction.TO:
                dist.send(tensor, group=group, group_dst=peer)
            else:
                dist.recv(tensor, group=group, group_src=peer)
        except RuntimeError as error:
            raise TransportError(
                f"{what}: {format_ranks(group, [peer])} was to {direction.value} {tensor.numel()} "
                f"elements, and died or did not come: {error}"
            ) from error


def iter_messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the bytes of tensors by message: small tensors together, large ones in chunks."""
    together: list[Tensor] = []
    left = CHUNK_BYTES
    for tensor in tensors:
        for part in flat_bytes(tensor).split(CHUNK_BYTES):
            if together and part.numel() > left:
                yield together
                together, left = [], CHUNK_BYTES
            together.append(part)
            left -= part.numel()
    if together:
        yield together


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as bytes."""
    flat = tensor.detach()
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8)


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


def _build_tree(described: Any) -> Any:
    """Return the tree of a description, with empty tensors."""
    if not isinstance(described, dict):
        return described
    ((kind, value),) = described.items()
    if kind == "tensor":
        name, shape, stride = value
        return torch.empty_strided(shape, stride, dtype=find_dtype(name), device="cpu")
    if kind == "dict":
        return {_build_tree(key): _build_tree(item) for key, item in value}
    items = [_build_tree(item) for item in value]
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


def check_can_send(content: Any) -> None:
    """Raise TypeError for a tree that cannot be sent."""
    _describe(content, [])


def empty_copy(content: Any) -> Any:
    """Return a tree as :meth:`Stream.receive` creates it, with empty tensors on the CPU."""
    return _build_tree(json.loads(json.dumps(_describe(content, []))))
