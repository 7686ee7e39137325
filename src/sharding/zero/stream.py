"""State from rank to rank: a short description as JSON, tensors as bytes in chunks. No pickles."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_optim.plan.flat.apart import is_dense
from sharding.plan_json import dtype_name, dtype_named
from sharding.transport import TransportError
from sharding.transport.groups import has_messages
from sharding.transport.messages import Direction, launched, receive
from sharding.transport.peers import GroupRank, named
from sharding.zero.collective import as_bytes, as_tensor

CHUNK_BYTES = 1 << 24
"""So much is on its way at once, and is held beside what is sent or received."""
TAG = 1 << 29
"""Messages of these streams are never taken for others, nor others for them."""

Plain = None | bool | int | float | str


class Stream:
    """Messages between this rank and one other of a group.

    Args:
        group: the group.
        peer: the other's rank in it.
        device: where the group's backend works.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._peer = GroupRank(peer)
        self._device = device
        self._has_messages = has_messages(group, device)

    def send(self, content: Any) -> None:
        """Send a tree of dicts, lists, tuples, plain values and tensors.

        Raises:
            TypeError: anything else in it.
            TransportError: the other rank died or did not come.
        """
        tensors: list[Tensor] = []
        text = json.dumps(_described(content, tensors)).encode()
        self._send(torch.tensor([len(text)], device="cpu"))
        self._send(as_tensor(text))
        for parts in parcels(tensors):  # a step count may be on the CPU beside state on a device
            there = [part.to(self._device) for part in parts]
            self._send(there[0] if len(there) == 1 else torch.cat(there))

    def receive(self, place: Callable[[Any], Any] = lambda found: found) -> Any:
        """Receive what the other sends, on the CPU.

        Args:
            place: is called with the tree before its tensors have values, and returns the tree to
                be filled: the same, with other tensors of the same number of elements in their
                places.

        Raises:
            TransportError: the other rank died or did not come.
        """
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._receive(length)
        text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._receive(text)
        content = place(_made(json.loads(as_bytes(text))))
        for parts in parcels(tensors_in(content)):
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
            self._pass(Direction.TO, tensor.to(self._device))

    def _receive(self, into: Tensor) -> None:
        if into.numel():
            on_device = into if self._device.type == "cpu" else into.to(self._device)
            self._pass(Direction.FROM, on_device)
            if on_device is not into:
                into.copy_(on_device)

    def _pass(self, direction: Direction, tensor: Tensor) -> None:
        """Send or receive a message, and wait for it."""
        what, group, peer = "pass state from rank to rank", self._group, self._peer
        if self._has_messages:
            receive(
                what, group, [launched(what, group, direction, peer, tensor, tensor.numel(), TAG)]
            )
            return
        try:
            if direction is Direction.TO:
                dist.send(tensor, group=group, group_dst=peer)
            else:
                dist.recv(tensor, group=group, group_src=peer)
        except RuntimeError as error:
            raise TransportError(
                f"{what}: {named(group, [peer])} was to {direction.value} {tensor.numel()} "
                f"elements, and died or did not come: {error}"
            ) from error


def parcels(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the bytes of tensors as messages: small tensors together, large ones in chunks."""
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
    """The memory of a dense tensor as bytes."""
    flat = tensor.detach()
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8)


def _described(content: Any, tensors: list[Tensor]) -> Any:
    """A tree as JSON has it; its tensors go into the list."""
    if isinstance(content, Tensor):
        dense = content.detach().resolve_conj().resolve_neg()
        dense = dense if is_dense(dense) else dense.contiguous()
        tensors.append(dense)
        return {"tensor": [dtype_name(dense.dtype), list(dense.shape), list(dense.stride())]}
    if isinstance(content, dict):
        keys = [
            [_described(key, tensors), _described(value, tensors)] for key, value in content.items()
        ]
        return {"dict": keys}
    if isinstance(content, (list, tuple)):
        kind = "list" if isinstance(content, list) else "tuple"
        return {kind: [_described(item, tensors) for item in content]}
    if isinstance(content, Plain):
        return content
    raise TypeError(
        "state that is consolidated must be of tensors, numbers, strings, lists, tuples and dicts, "
        f"got {content!r}"
    )


def _made(described: Any) -> Any:
    """The tree, with empty tensors."""
    if not isinstance(described, dict):
        return described
    ((kind, value),) = described.items()
    if kind == "tensor":
        name, shape, stride = value
        return torch.empty_strided(shape, stride, dtype=dtype_named(name), device="cpu")
    if kind == "dict":
        return {_made(key): _made(item) for key, item in value}
    items = [_made(item) for item in value]
    return items if kind == "list" else tuple(items)


def tensors_in(content: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(content, Tensor):
        return [content]
    if isinstance(content, dict):
        # A key that is a tensor cannot come: it is not equal to itself after the journey.
        return [tensor for value in content.values() for tensor in tensors_in(value)]
    if isinstance(content, (list, tuple)):
        return [tensor for item in content for tensor in tensors_in(item)]
    return []


def check_travels(content: Any) -> None:
    """Return True if a tree can be sent.

    Raises:
        TypeError: something in it that cannot.
    """
    _described(content, [])


def emptied(content: Any) -> Any:
    """The tree as it would arrive, its tensors on the CPU and without values."""
    return _made(json.loads(json.dumps(_described(content, []))))
