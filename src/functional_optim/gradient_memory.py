"""Where gradients lie in memory: in what order, and apart from what."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def order_in_memory(grads: Sequence[Tensor | None], names: Sequence[str]) -> list[int]:
    """The places of gradients in the order in which they lie in memory.

    Raises:
        ValueError: one is missing or sparse.
    """
    found = []
    for place, (grad, name) in enumerate(zip(grads, names, strict=True)):
        if grad is None or grad.layout != torch.strided:
            what = "none" if grad is None else f"one with layout {grad.layout}"
            raise ValueError(
                f"the parameter at {name!r} must have a dense gradient whose place is to be "
                f"followed, got {what}: call this after a backward pass that reaches every "
                "parameter"
            )
        found.append((grad.untyped_storage().data_ptr(), grad.data_ptr(), place))
    return [place for *_, place in sorted(found)]


def spans_of(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The memory that tensors are parts of: where it begins, and where it ends."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]


def is_apart(grad: Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a gradient without gaps shares no memory with the spans, whoever made it."""
    begin = grad.data_ptr()
    end = begin + grad.numel() * grad.element_size()
    return all(end <= first or last <= begin for first, last in spans)
