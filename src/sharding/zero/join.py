"""Uneven inputs: a rank that has run out of data still steps what it owns, with the others.

torch's ``Join`` has such a rank shadow the collectives of the others. DDP's shadow leaves it
without the gradients of the iteration, and its schedulers have stopped. So, under ``Join``, the
ranks tell one another who has run out, and the first that has not hands gradients and options to
those.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from functional_optim.frontends.torch_groups import options_of
from sharding.ownership import OwnedRange
from sharding.zero.collective import gathered
from sharding.zero.parts import OptimizerParts
from sharding.zero.stream import Stream


class StepWithOthers(JoinHook):
    """Takes part in every step of the ranks that still have data.

    Args:
        step: what a rank without data does.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        super().__init__()

    def main_hook(self) -> None:
        """Make a step."""
        self._step()


class JoinTurn(NamedTuple):
    """Messages of the ranks before a step."""

    source: int
    """The first rank that has data."""
    without: tuple[int, ...]
    """The ranks that have none."""
    skip: bool
    """Whether one of them found a gradient that is not finite."""


def told(parts: OptimizerParts, *, joined: bool, found_inf: bool) -> JoinTurn:
    """Exchange which ranks have data, and if all gradients are finite. Collective."""
    own = torch.tensor([int(joined), int(found_inf)], device=parts.device)
    flags = [one.tolist() for one in gathered(parts.process_group, own, "find out who has data")]
    without = tuple(rank for rank, (gone, _) in enumerate(flags) if gone)
    source = next((rank for rank, (gone, _) in enumerate(flags) if not gone), -1)
    return JoinTurn(source, without, any(found for _, found in flags))


def hand_over(parts: OptimizerParts, turn: JoinTurn) -> None:
    """Gradients and options from a rank that has data to those that have none."""
    if turn.source < 0 or not turn.without:
        return
    if parts.rank == turn.source:
        for rank in turn.without:
            stream = Stream(parts.process_group, rank, parts.device)
            stream.send([_plain(group) for group in parts.groups])
            owned = parts.plan.owned(rank)
            stream.send([_range(parts.params[one.path].grad, one) for one in owned])
    elif parts.rank in turn.without:
        stream = Stream(parts.process_group, turn.source, parts.device)
        for group, options in zip(parts.groups, stream.receive(), strict=True):
            _take_options(group, options)
        owned = parts.plan.owned(parts.rank)
        _take_gradients(parts, owned, stream.receive())


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The options that can travel; a schedule counts steps, and knows by itself."""
    return {key: value for key, value in options_of(group).items() if _travels(value)}


def _travels(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_travels, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def _range(grad: Tensor | None, one: OwnedRange) -> Tensor | None:
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {one.path!r} is sparse; under Join, gradients are handed from rank "
            "to rank, and must be dense"
        )
    return grad if one.whole else grad.reshape(-1)[one.start : one.stop]


def _take_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        kept = group.get(key)
        if isinstance(value, Tensor) and isinstance(kept, Tensor):
            with torch.no_grad():
                kept.copy_(value)
        else:
            group[key] = value


def _take_gradients(
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
