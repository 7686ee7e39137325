"""Checks if parameters can move into a flat buffer, with the reasons why others cannot."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim._torch.derivatives import is_functorch_wrapped_tensor
from functional_optim._torch.tensors import is_view
from functional_optim.core.buffer_memory import buffer_of
from functional_optim.kernels.chunks import is_dense


def immovable_reasons(params: Sequence[Tensor], names: Sequence[str]) -> dict[int, str]:
    """Return, for each parameter that cannot move to other memory, its index and the reason."""
    found = enumerate(map(immovable_reason, params))
    reasons = {i: reason for i, reason in found if reason is not None}
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
    """Return the device and address of a parameter's storage; None if there is no plain storage."""
    if _reason_of_class(param) or param.layout != torch.strided or param.device.type == "meta":
        return None
    address = param.untyped_storage().data_ptr()
    return (param.device, address) if address else None


def immovable_reason(param: Tensor) -> str | None:
    """Return why a parameter cannot move to other memory, or None if it can."""
    return _reason_of_class(param) or _reason_of_kind(param) or _reason_of_memory(param)


def _reason_of_class(param: Tensor) -> str | None:
    if is_functorch_wrapped_tensor(param):
        return "it is inside a transform of torch.func"
    kind = type(param)
    # The class decides: torch.overrides also depends on modes, such as set_default_device.
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
    if param.numel() and not is_dense(param):
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
    # On an accelerator, is_shared() is always True.
    if param.device.type == "cpu" and param.is_shared():
        return "its memory is shared with other processes"
    return None
