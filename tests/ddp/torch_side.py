"""torch side of comparisons: classes and hooks that torch lacks, or has for accelerators."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

Hook = Callable[[Any, dist.GradBucket], Future[Any]]


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay, in torch's usual style."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].lerp(param.grad, 1 - beta_1).sign_()
                param.add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(param.grad, 1 - beta_2)


def as_list(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    """Run an allreduce whose result is a list, as in torch 1.x."""
    return allreduce_hook(group, bucket).then(lambda done: [done.value()])


def as_copy(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    """Run an allreduce that returns a copy, and leaves NaN in the bucket."""

    def finish(done: Future[Tensor]) -> Tensor:
        result = done.value().clone()
        bucket.buffer().fill_(float("nan"))
        return result

    return allreduce_hook(group, bucket).then(finish)


def done(value: Any) -> Future[Any]:
    """Return a future that has this result already."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def at_once(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    """Run an allreduce that is done before the hook returns, so callbacks run inside backward."""
    return done(allreduce_hook(group, bucket).wait())


def slow(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    """Run an allreduce, then another collective from a callback.

    The callback is late on rank 1, while rank 0 waits for its end before it continues.
    """

    def then(done: Future[Tensor]) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.05)
        dist.all_reduce(torch.zeros(1000), group=group)
        return done.value()

    future = allreduce_hook(group, bucket).then(then)
    if dist.get_rank() == 0:
        future.wait()
    return future


def fails_later(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    """Run an allreduce whose callback raises an error for bucket 1."""

    def fail(done: Future[Tensor]) -> Tensor:
        raise OSError(f"bucket {bucket.index()} is lost")

    reduced = allreduce_hook(group, bucket)
    return reduced.then(fail) if bucket.index() == 1 else reduced


def fails_at_once(group: Any, bucket: dist.GradBucket) -> Future[Any]:
    """Raise an error for bucket 1; run an allreduce for the others."""
    if bucket.index() == 1:
        raise OSError("bucket 1 is lost")
    return allreduce_hook(group, bucket)


def _power(group: Any) -> tuple[Any, Hook]:
    state = PowerSGDState(
        group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        orthogonalization_epsilon=1e-6,  # otherwise gradients that are all zero give NaN
    )
    return state, powerSGD_hook


INNER: dict[str, Callable[[Any], tuple[Any, Hook]]] = {
    "allreduce": lambda group: (group, allreduce_hook),
    "fp16": lambda group: (group, fp16_compress_hook),
    "bf16": lambda group: (group, bf16_compress_hook),
    "power": _power,
    "fp16 power": lambda group: (_power(group)[0], fp16_compress_wrapper(powerSGD_hook)),
    "list": lambda group: (group, as_list),
    "copy": lambda group: (group, as_copy),
    "slow": lambda group: (group, slow),
    "at once": lambda group: (group, at_once),
}
"""Inner hooks by name: a process group -> (fresh state, hook)."""

FOR_TORCH = {**INNER, "list": INNER["allreduce"]}
"""Inner hooks for the twin: DDP itself takes no list."""


def on_cpu(hook: Hook, *, in_order: bool) -> Hook:
    """Rename a hook, since DDP refuses bf16 on a CPU by name.

    If ``in_order``, wait for each bucket, so that no later collective overtakes it.
    """

    def renamed(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        if in_order:
            future.wait()
        return future

    return renamed
