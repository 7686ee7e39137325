"""Parameters that can move into a flat buffer, and the reasons why others cannot."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim._torch import is_functorch_wrapped_tensor, is_view
from functional_optim.core.aliasing import overlaps_itself
from functional_optim.core.buffer_memory import buffer_of


def reasons_apart(params: Sequence[Tensor], names: Sequence[str]) -> dict[int, str]:
    """Return why parameters cannot move to other memory, by their index in the list.

    Parameters that are not in it can be given other memory without anyone noticing.
    """
    reasons = {i: why for i, param in enumerate(params) if (why := reason_apart(param)) is not None}
    holders: dict[tuple[torch.device, int], list[int]] = {}
    for i, param in enumerate(params):
        memory = _memory(param)
        if memory is not None:
            holders.setdefault(memory, []).append(i)
    for together in holders.values():
        for i in together if len(together) > 1 else ():
            other = next(j for j in together if j != i)
            reasons.setdefault(i, f"it shares its memory with {names[other]!r}")
    return reasons


def _memory(param: Tensor) -> tuple[torch.device, int] | None:
    """Return the storage of a parameter; None if it has none of the usual kind."""
    if _reason_of_class(param) or param.layout != torch.strided or param.device.type == "meta":
        return None
    address = param.untyped_storage().data_ptr()
    return (param.device, address) if address else None


def reason_apart(param: Tensor) -> str | None:
    """Return why one parameter, by itself, cannot move to other memory; None if it can."""
    return _reason_of_class(param) or _reason_of_kind(param) or _reason_of_memory(param)


def _reason_of_class(param: Tensor) -> str | None:
    if is_functorch_wrapped_tensor(param):
        return "it is inside a transform of torch.func"
    kind = type(param)
    # Asked of the class: torch.overrides also looks at modes, such as set_default_device's.
    plain = kind is Tensor or kind.__torch_function__ is Parameter.__torch_function__
    if not plain or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"its class {kind.__name__} has operations of its own"
    return None


def _reason_of_kind(param: Tensor) -> str | None:
    if param.layout != torch.strided or param.is_nested:
        return f"it is not dense: its layout is {'nested' if param.is_nested else param.layout}"
    if param.device.type == "meta":
        return "it is on the meta device, so it has no memory"
    if not (param.is_floating_point() or param.is_complex()):
        return f"its dtype is {param.dtype}, neither floating nor complex"
    if not param.is_leaf:
        return "it is the result of an operation, not a leaf of autograd"
    if param.is_conj() or param.is_neg():
        return "it is a lazy conjugate (or negative) of other memory"
    return None


def _reason_of_memory(param: Tensor) -> str | None:
    if buffer_of(param) is not None:
        return "it is in a flat buffer already, such as that of another optimizer"
    if is_view(param):
        return "it is a view of another tensor"
    if not is_dense(param):
        return (
            f"its elements do not fill its memory: shape {tuple(param.shape)}, strides "
            f"{param.stride()}"
        )
    held, needed = param.untyped_storage().nbytes(), param.numel() * param.element_size()
    if held != needed:
        return (
            f"its memory is {'larger' if held > needed else 'smaller'} than it is, {held} bytes "
            f"for {needed}, so other tensors may live there"
        )
    # On an accelerator every tensor can be shared, and is_shared() says so.
    if param.device.type == "cpu" and param.is_shared():
        return "its memory is shared with other processes"
    return None


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill a stretch of memory, each once, in whatever order."""
    if tensor.numel() == 0:
        return True
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return bool(reach + 1 == tensor.numel()) and not overlaps_itself(tensor)
