"""Lion as a class of torch.optim.Optimizer, in the usual style: for-loop and foreach."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion for users of torch alone.

    Args:
        params: the parameters.
        lr: learning rate.
        betas: weights of the momentum in the direction and in its own decay.
        weight_decay: coefficient of the decoupled decay.
        foreach: True for the ``torch._foreach_*`` functions instead of a loop over tensors. None
            uses a loop on the CPU, as torch.optim does.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach}
        super().__init__(params, defaults)

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], averages: list[Any]
    ) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if len(state) == 0:
                state["exp_avg"] = torch.zeros_like(param)
            params.append(param)
            grads.append(param.grad)
            averages.append(state["exp_avg"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step."""
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            averages: list[Tensor] = []
            self._init_group(group, params, grads, averages)
            foreach = group["foreach"]
            if foreach is None:
                foreach = params[0].is_cuda
            step = _foreach_lion if foreach else _loop_lion
            step(params, grads, averages, group["lr"], group["betas"], group["weight_decay"])


def _loop_lion(
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    for param, grad, average in zip(params, grads, averages, strict=True):
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        param.add_(average.lerp(grad, 1 - betas[0]).sign_(), alpha=-lr)
        average.lerp_(grad, 1 - betas[1])


def _foreach_lion(
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    if weight_decay != 0:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    directions = torch._foreach_lerp(averages, grads, 1 - betas[0])  # noqa: SLF001  torch has no public name
    torch._foreach_sign_(directions)
    torch._foreach_add_(params, directions, alpha=-lr)
    torch._foreach_lerp_(averages, grads, 1 - betas[1])
