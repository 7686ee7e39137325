"""Agreement of all ranks, after a backward pass, on whether the step is run.

With torch's GradScaler, a step is skipped on all ranks or on none. GradScaler calls ``step`` in any
case if the optimizer has ``_step_supports_amp_scaling``, so that all ranks come here and can agree.
Otherwise GradScaler would not call ``step`` on a rank with an infinite gradient, and the other
ranks would wait for that rank.

With uneven inputs, a rank that has run out of data still steps what it owns, with the other ranks:
torch's ``Join`` calls a hook on such a rank, to match the collectives of the other ranks. But DDP
does not give the rank the gradients of the iteration, and the schedulers of the rank have stopped.
So, under ``Join``, the ranks exchange which ranks have data, and the first rank with data sends
gradients and options to the ranks without.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from functional_optim.engine.gradients import Scaling
from functional_optim.engine.options import options_of
from sharding.ownership import OwnedRange
from sharding.zero.collective import all_gather_bytes
from sharding.zero.local_shard import slice_gradient
from sharding.zero.range_step_mixin import RangeStepMixin
from sharding.zero.tree_exchange import exchange_trees

logger = logging.getLogger(__name__)


class StepWithOthers(JoinHook):
    """Hook of a rank without data: it steps with the ranks that still have data."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        super().__init__()

    def main_hook(self) -> None:
        self._step()


def agree_on_step(zero: RangeStepMixin, scaling: Scaling, *, uneven: bool, joined: bool) -> bool:
    """Prepare gradients, and return True, on all ranks, if the step is run.

    Collective with a GradScaler, and under ``Join``: ``uneven`` is True if ranks may run out of
    data, ``joined`` if this rank has none.
    """
    if not uneven and scaling.found_inf is None:
        gone, skip = [False], False
    else:
        gone, skip = exchange_status(zero, joined=joined, found_inf=scaling.found)
    if skip:
        _log_skipped(here=scaling.found)
        return False
    scaling.unscale_(param.grad for param in zero.params.values())
    if any(gone) and not all(gone):
        _send_to_joined(zero, gone)
    return True


def exchange_status(
    zero: RangeStepMixin, *, joined: bool, found_inf: bool
) -> tuple[list[bool], bool]:
    """Return for each rank True if it has no data, and True if a gradient anywhere is not finite.

    Collective.
    """
    own, what = bytes([joined, found_inf]), "find out who has data, and if gradients are finite"
    flags = all_gather_bytes(zero.process_group, zero.join_device, own, what, len(own))
    return [bool(gone) for gone, _ in flags], any(found for _, found in flags)


def _send_to_joined(zero: RangeStepMixin, gone: Sequence[bool]) -> None:
    """Send gradients and options from the first rank that has data to the ranks that have none."""
    source = gone.index(False)

    def make() -> dict[int, Any]:
        if zero.rank != source:
            return {}
        options = [_sendable_options(group) for group in zero.param_groups]
        frozen = _frozen_with_gradients(zero)
        return {
            rank: [
                options,
                frozen,
                [_gradient_of_range(zero, one) for one in zero.plan.owned(rank)],
            ]
            for rank, is_gone in enumerate(gone)
            if is_gone
        }

    what = "step for ranks without data"
    for options, frozen, grads in exchange_trees(
        zero.process_group, zero.join_device, what, make
    ).values():
        for group, own in zip(zero.param_groups, options, strict=True):
            _copy_options(group, own)
        _copy_gradients(zero, zero.plan.owned(zero.rank), grads)
        for param in map(zero.params.__getitem__, frozen):
            if param.grad is None:  # owned by another rank; its new value will be gathered
                param.grad = torch.zeros_like(param)


def _log_skipped(*, here: bool) -> None:
    if here:
        logger.info("a gradient is not finite: this step is skipped on all ranks")
        return
    logger.warning(
        "this step is skipped, since another rank has a gradient that is not finite; this one has "
        "none, so its GradScaler will not lower its scale: give all ranks the same gradients, or "
        "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
    )


def _sendable_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options that can be sent. A schedule is a function, which every rank has."""
    return {key: value for key, value in options_of(group).items() if _can_send(value)}


def _can_send(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_can_send, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def _gradient_of_range(zero: RangeStepMixin, one: OwnedRange) -> Tensor | None:
    grad = zero.params[one.path].grad
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {one.path!r} is sparse; under Join, gradients are handed from rank "
            "to rank, and must be dense"
        )
    return slice_gradient(grad, one)


def _copy_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        kept = group.get(key)
        if isinstance(value, Tensor) and isinstance(kept, Tensor):
            with torch.no_grad():
                kept.copy_(value)
        else:
            group[key] = value


def _frozen_with_gradients(zero: RangeStepMixin) -> list[str]:
    """Return the paths of frozen parameters with a gradient, which are stepped as in torch."""
    every = zero.params.items()
    return [path for path, one in every if not one.requires_grad and one.grad is not None]


def _copy_gradients(
    zero: RangeStepMixin, owned: Sequence[OwnedRange], grads: Sequence[Tensor | None]
) -> None:
    for param in zero.params.values():
        param.grad = None
    for one, grad in zip(owned, grads, strict=True):
        param = zero.params[one.path]
        if grad is None:
            continue
        if one.whole:
            param.grad = torch.empty_like(param).copy_(grad)
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.view(-1)[one.start : one.stop] = grad.to(param.device)
