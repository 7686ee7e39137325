"""Uneven inputs: a rank that has run out of data still steps what it owns, with the other ranks.

torch's ``Join`` calls a hook on such a rank, to match the collectives of the other ranks. But DDP
does not give the rank the gradients of the iteration, and the schedulers of the rank have stopped.
So, under ``Join``, the ranks exchange which ranks have data, and the first rank with data sends
gradients and options to the ranks without.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from functional_optim.frontends.torch_groups import options_of
from sharding.ownership import OwnedRange
from sharding.zero.collective import all_gather_bytes
from sharding.zero.optimizer_parts import OptimizerParts
from sharding.zero.stream import Stream


class StepWithOthers(JoinHook):
    """Hook of a rank without data: it steps with the ranks that still have data."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        super().__init__()

    def main_hook(self) -> None:
        self._step()


class JoinStatus(NamedTuple):
    """State of all ranks before a step."""

    source: int
    """The first rank that has data; -1 if there is none."""
    without: tuple[int, ...]
    """The ranks that have no data."""
    skip: bool
    """True if a rank has a gradient that is not finite."""


def exchange_join_status(parts: OptimizerParts, *, joined: bool, found_inf: bool) -> JoinStatus:
    """Exchange which ranks have data, and if all gradients are finite. Collective."""
    own, what = bytes([joined, found_inf]), "find out who has data"
    flags = all_gather_bytes(parts.process_group, parts.device, own, what, len(own))
    without = tuple(rank for rank, (gone, _) in enumerate(flags) if gone)
    source = next((rank for rank, (gone, _) in enumerate(flags) if not gone), -1)
    return JoinStatus(source, without, any(found for _, found in flags))


def send_to_joined(parts: OptimizerParts, status: JoinStatus) -> None:
    """Send gradients and options from a rank that has data to the ranks that have none."""
    if status.source < 0 or not status.without:
        return
    if parts.rank == status.source:
        for rank in status.without:
            stream = Stream(parts.process_group, rank, parts.device)
            stream.send([_sendable_options(group) for group in parts.groups])
            owned = parts.plan.owned(rank)
            stream.send([_gradient_of_range(parts.params[one.path].grad, one) for one in owned])
    elif parts.rank in status.without:
        stream = Stream(parts.process_group, status.source, parts.device)
        for group, options in zip(parts.groups, stream.receive(), strict=True):
            _copy_options(group, options)
        owned = parts.plan.owned(parts.rank)
        _copy_gradients(parts, owned, stream.receive())


def _sendable_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options that can be sent. A schedule is a function, which every rank has."""
    return {key: value for key, value in options_of(group).items() if _can_send(value)}


def _can_send(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_can_send, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def _gradient_of_range(grad: Tensor | None, one: OwnedRange) -> Tensor | None:
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {one.path!r} is sparse; under Join, gradients are handed from rank "
            "to rank, and must be dense"
        )
    return grad if one.whole else grad.reshape(-1)[one.start : one.stop]


def _copy_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        kept = group.get(key)
        if isinstance(value, Tensor) and isinstance(kept, Tensor):
            with torch.no_grad():
                kept.copy_(value)
        else:
            group[key] = value


def _copy_gradients(
    parts: OptimizerParts, owned: Sequence[OwnedRange], grads: Sequence[Tensor | None]
) -> None:
    for param in parts.params.values():
        param.grad = None
    for one, grad in zip(owned, grads, strict=True):
        param = parts.params[one.path]
        if grad is None:
            continue
        if one.whole:
            param.grad = torch.empty_like(param).copy_(grad)
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.view(-1)[one.start : one.stop] = grad.to(param.device)
