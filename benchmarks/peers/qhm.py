"""QHM as a class of torch.optim.Optimizer, in the usual style, and with clipping before it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class QHM(torch.optim.Optimizer):
    """Quasi-hyperbolic momentum for users of torch alone.

    Args:
        params: the parameters.
        lr: learning rate.
        momentum: decay of the buffer.
        nu: weight of the buffer in the step.
        weight_decay: coefficient of the parameter added to the gradient.
        foreach: True for the ``torch._foreach_*`` functions instead of a loop over tensors. None
            uses a loop on the CPU, as torch.optim does.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1.0,
        momentum: float = 0.999,
        nu: float = 0.7,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nu": nu,
            "weight_decay": weight_decay,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Any]
    ) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if len(state) == 0:
                state["momentum_buffer"] = torch.zeros_like(param)
            params.append(param)
            grads.append(param.grad)
            buffers.append(state["momentum_buffer"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step."""
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, params, grads, buffers)
            foreach = group["foreach"]
            if foreach is None:
                foreach = params[0].is_cuda
            step = _foreach_qhm if foreach else _loop_qhm
            numbers = [group[key] for key in ("lr", "momentum", "nu", "weight_decay")]
            step(params, grads, buffers, *numbers)


def _loop_qhm(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    lr: float,
    momentum: float,
    nu: float,
    weight_decay: float,
) -> None:
    for param, grad, buffer in zip(params, grads, buffers, strict=True):
        direction = grad.add(param, alpha=weight_decay) if weight_decay != 0 else grad
        buffer.lerp_(direction, 1 - momentum)
        param.add_(direction, alpha=-lr * (1 - nu)).add_(buffer, alpha=-lr * nu)


def _foreach_qhm(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    lr: float,
    momentum: float,
    nu: float,
    weight_decay: float,
) -> None:
    directions: Any = grads
    if weight_decay != 0:
        directions = torch._foreach_add(grads, params, alpha=weight_decay)  # noqa: SLF001  torch has no public name
    torch._foreach_lerp_(buffers, directions, 1 - momentum)
    torch._foreach_add_(params, directions, alpha=-lr * (1 - nu))
    torch._foreach_add_(params, buffers, alpha=-lr * nu)


class ClippedQHM(QHM):
    """QHM after ``torch.nn.utils.clip_grad_value_``, in one ``step``.

    Args:
        params: the parameters.
        clip_value: the largest absolute value of a gradient's element.
        options: as for :class:`QHM`.
    """

    def __init__(self, params: Iterable[Tensor], clip_value: float, **options: Any) -> None:
        super().__init__(params, **options)
        self._clip_value = clip_value

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Clip the gradients in place, then make one step."""
        for group in self.param_groups:
            torch.nn.utils.clip_grad_value_(
                group["params"], self._clip_value, foreach=group["foreach"]
            )
        super().step()
