"""The state of bound parameters, in flat buffers if possible."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import LeafState
from functional_optim.core.state_init import init_leaf
from functional_optim.kernels.chunks import why_not_pointwise
from functional_optim.optimizer.bound_buffer import (
    BoundBuffer,
    has_flat_state,
    tensors_of_state,
)
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.list_layout import MemoryGuard


def layout_of(
    params: Sequence[Tensor], names: Sequence[str], groups: Sequence[int], block_size: int
) -> FlatLayout:
    """Move parameters into flat buffers, each of which can be stepped as one tensor."""
    keys = [
        # Blocks of several elements are consecutive only in contiguous parameters. Frozen
        # parameters have no gradients. There may be a gap before a complex parameter.
        (
            group,
            block_size == 1 or param.is_contiguous(),
            param.requires_grad,
            param.is_complex(),
        )
        for group, param in zip(groups, params, strict=True)
    ]
    return FlatLayout(params, names, keys=keys, align=block_size)


def gradients_of(layout: FlatLayout, params: Sequence[Tensor]) -> list[Tensor]:
    """Return a gradient for each parameter: its view of the gradient buffers, or else zeros."""
    views = dict(zip(layout.order, layout.gradient_views(), strict=True))
    with torch.inference_mode(mode=False), torch.no_grad():
        every = enumerate(params)
        return [views[k] if k in views else torch.zeros_like(one) for k, one in every]


def check_shapes(
    states: Sequence[LeafState], given: Sequence[LeafState], names: Sequence[str]
) -> None:
    """Raise ValueError if a tensor of a given state has another shape than the bound state."""
    for own, one, name in zip(states, given, names, strict=True):
        for target, source in zip(tensors_of_state(own), tensors_of_state(one), strict=True):
            if target.shape != source.shape:
                raise ValueError(
                    f"the state at {name!r} has a tensor of shape {tuple(source.shape)}, and the "
                    f"bound state has shape {tuple(target.shape)} there; load a state of the same "
                    "optimizer and parameters"
                )


def init_states(
    stages: Sequence[Stage],
    params: Sequence[Tensor],
    hypers: Sequence[tuple[Any, ...]],
    layout: FlatLayout,
    *,
    counts_on_device: bool = False,
) -> tuple[list[BoundBuffer], list[LeafState], list[int]]:
    """Return the initial state of every parameter.

    The results are the buffers that are stepped as chunks; the state of each parameter; and the
    indices of the parameters that are in no such buffer. The second key of a buffer is True if
    blocks of elements are consecutive in it.
    """
    buffers: list[BoundBuffer] = []
    states: dict[int, LeafState] = {}
    for buffer, gradient in zip(layout.buffers, layout.gradient_buffers(), strict=True):
        own = hypers[buffer.segments[0].index]
        in_order = buffer.key[1]  # type: ignore[index]  # of the keys that were given to the layout
        shapes = [one.shape for one in buffer.segments]
        if in_order and has_flat_state(stages, own, shapes, buffer.dtype):
            bound = BoundBuffer(stages, own, buffer, gradient, counts_on_device=counts_on_device)
            buffers.append(bound)
            indices = [one.index for one in buffer.segments]
            made = bound.states([params[i] for i in indices])
            states.update(zip(indices, made, strict=True))
    with torch.inference_mode(mode=False), torch.no_grad():
        others = [i for i in range(len(params)) if i not in states]
        for i in others:
            alone = init_leaf(stages, hypers[i], params[i])
            step = alone.step.to(params[i].device) if counts_on_device else alone.step
            states[i] = alone._replace(step=step)
    return buffers, [states[i] for i in range(len(params))], others


class StateGuard:
    """Check that the tensors of a state have not moved since a caller got the state."""

    def __init__(self, states: Sequence[LeafState], names: Sequence[str]) -> None:
        own = list(map(tensors_of_state, states))
        self._tensors = [tensor for tensors in own for tensor in tensors]
        self._names = [
            name for name, tensors in zip(names, own, strict=True) for _ in range(len(tensors))
        ]
        self._starts = list(map(Tensor.data_ptr, self._tensors))
        self._guard = MemoryGuard(self._tensors)

    def check(self) -> None:
        """Raise RuntimeError if a tensor has moved, with the name of its parameter."""
        if self._guard.hold(self._tensors):
            return
        pairs = zip(self._tensors, self._starts, self._names, strict=True)
        name = next((name for one, start, name in pairs if one.data_ptr() != start), None)
        raise RuntimeError(
            f"the state{'' if name is None else f' of {name!r}'} was resized or given other memory "
            "since it was bound, and steps do not see that; bind the parameters again, and write "
            "values in place, as by tensor.copy_(value) or load_state()"
        )


def why_alone(
    stages: Sequence[Stage], params: Sequence[Tensor], others: Sequence[int], layout: FlatLayout
) -> list[str]:
    """Return why parameters are stepped one by one, one line for each reason."""

    def why(place: int) -> str:
        whole = why_not_pointwise(stages)
        if whole is not None:
            return whole
        if place in layout.reasons:
            return layout.reasons[place]
        if block_size_of(stages) > 1 and not params[place].is_contiguous():
            return (
                "its elements do not lie in the order of its shape, and the chain works in blocks"
            )
        return "its state has another shape"

    counts = Counter(map(why, others))
    return [
        f"{count} {'parameters are' if count > 1 else 'parameter is'} stepped one by one: {reason}"
        for reason, count in counts.items()
    ]
