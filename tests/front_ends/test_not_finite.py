"""Clipping and skipping with NaN, infinity, missing gradients, or 16 bits.

All front-ends must agree.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    Optimizer,
    State,
    TorchOptimizer,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.remote.distributed_optimizer import DistributedOptimizer
from hooks import (
    hook_with_zero_step,
    step_hook,
    zero_step_hook,
)
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.tensors import normal

Tree = dict[str, Tensor]
Grads = Mapping[str, Tensor | None]
FrontEnd = Callable[[Optimizer, torch.dtype, Sequence[Grads]], tuple[Tree, set[int]]]
"""Function that makes steps with given gradients, and returns parameters and step counts."""

SHAPES = {"a": (4, 3), "b": (5,), "c": (), "d": (2, 2)}
DTYPES = (torch.float32, torch.bfloat16)
BAD = {"nan": math.nan, "inf": math.inf, "none": None}
NEVER = "d"
"""Name of the parameter that never gets a gradient."""
RANKS = 2


def params_of(dtype: torch.dtype) -> Tree:
    return {
        name: normal(*shape, seed=k).to(dtype) for k, (name, shape) in enumerate(SHAPES.items())
    }


def grads_at(step: int, dtype: torch.dtype, bad: float | None = 1.0, scale: float = 1.0) -> Grads:
    """Return gradients; the one of "b" may have an element that is not finite, or be missing."""
    found: dict[str, Tensor | None] = {
        name: (normal(*shape, seed=10 * step + k + 20) * scale).to(dtype)
        for k, (name, shape) in enumerate(SHAPES.items())
    }
    if bad is None:
        found["b"] = None
    elif not math.isfinite(bad):
        found["b"][2] = bad  # type: ignore[index]
    return {**found, NEVER: None}


def named(params: Tree) -> list[tuple[str, Tensor]]:
    return [(name, param.requires_grad_()) for name, param in params.items()]


def give(params: Mapping[str, Tensor], grads: Grads) -> None:
    for name, grad in grads.items():
        params[name].grad = None if grad is None else grad.clone()


def detached(params: Mapping[str, Tensor]) -> Tree:
    return {name: param.detach().clone() for name, param in params.items()}


class Model(nn.Module):
    """Model whose gradients the caller gives. Parameters without a gradient take no part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, param in params_of(dtype).items():
            self.register_parameter(name, nn.Parameter(param))

    def forward(self, grads: Grads) -> Tensor:
        loss = torch.zeros(())
        for name, grad in grads.items():
            if grad is not None:
                loss = loss + _Given.apply(getattr(self, name), grad)
        return loss


class _Given(torch.autograd.Function):
    """Loss term with a given gradient, which the scale of the loss does not change."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad, None


def cloned(grads: Grads) -> dict[str, Tensor | None]:
    return {name: None if grad is None else grad.clone() for name, grad in grads.items()}


def workers(optimizer: Optimizer, params: Tree) -> Any:
    there = {name: f"ps{k % RANKS}" for k, name in enumerate(params)}
    return DistributedOptimizer.over_threads(optimizer, dict(named(params)), there)


def wrapped(dtype: torch.dtype, group: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        Model(dtype), process_group=group, bucket_cap_mb=1e-5, find_unused_parameters=True
    )


HOOKS: dict[str, Callable[..., Any]] = {
    "scatter": zero_step_hook,
    "held": partial(hook_with_zero_step, allreduce_hook),
}


def hooked(
    kind: str, ddp: DistributedDataParallel, optimizer: Optimizer, group: Any, **options: Any
) -> tuple[dict[str, Tensor], ZeroRedundancyOptimizer, Any]:
    """Return the parameters of a DDP module, its ZeRO optimizer, and the hook that steps it."""
    params = dict(ddp.module.named_parameters())
    zero = ZeroRedundancyOptimizer(list(params.items()), optimizer, group, overlap_with_ddp=True)
    hook = HOOKS[kind](ddp, zero, **options)
    ddp.register_comm_hook(None, hook)
    return params, zero, hook


def on_ranks(run: Callable[[Any], tuple[Tree, Any]]) -> tuple[Tree, Any]:
    """Return the first rank's run, and assert that all ranks have the same."""
    first, *others = LocalWorld(RANKS).run(run)
    for params, counted in others:
        assert_same(params, first[0])
        assert counted == first[1]
    return first


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Check that two trees have equal values, where NaN equals NaN."""
    for name, one in got.items():
        torch.testing.assert_close(one, want[name], rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------- chains, by who steps


def by_update(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    params = params_of(dtype)
    state = optimizer.init(params)
    for grads in steps:
        params, state = optimizer.update(params, grads, state)
    return params, counts_of(state)


def counts_of(state: State) -> set[int]:
    return {int(leaf.step) for name, leaf in state.leaves.items() if name != NEVER}


def by_torch_optimizer(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    params = params_of(dtype)
    ours = TorchOptimizer(named(params), optimizer)
    for grads in steps:
        give(params, grads)
        ours.step()
    known = {name: ours.state.get(param, {}) for name, param in params.items() if name != NEVER}
    return detached(params), {int(one["step"]) for one in known.values() if "step" in one}


def by_bind(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    bound = optimizer.bind(params_of(dtype))
    for grads in steps:
        bound.step(grads)
    return detached(bound.params), counts_of(bound.state)


def by_step_hook(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        ddp = wrapped(dtype, group)
        state = step_hook(ddp, optimizer)
        for grads in steps:
            ddp(grads).backward()
            ddp.zero_grad()
        return detached(dict(ddp.module.named_parameters())), counts_of(state.state)

    return on_ranks(run)


def by_zero(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        params = params_of(dtype)
        zero = ZeroRedundancyOptimizer(named(params), optimizer, group)
        for grads in steps:
            give(params, grads)
            zero.step()
        return detached(params), set()

    return on_ranks(run)


def by_zero_hook(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        ddp = wrapped(dtype, group)
        params, *_ = hooked("scatter", ddp, optimizer, group)
        for grads in steps:
            ddp(grads).backward()
            ddp.zero_grad()
        return detached(params), set()

    return on_ranks(run)


def by_workers(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    params = params_of(dtype)
    ours = workers(optimizer, params)
    for grads in steps:
        ours.step(grads)
    ours.close()
    return detached(params), set()


FRONT_ENDS: dict[str, FrontEnd] = {
    "TorchOptimizer": by_torch_optimizer,
    "bind": by_bind,
    "step_hook": by_step_hook,
    "ZeRO": by_zero,
    "ZeRO hook": by_zero_hook,
    "workers": by_workers,
}
SHARE_NOTHING = ("bind", "ZeRO", "ZeRO hook")
"""Front-ends that need one chain for all leaves, without shared scalars."""
TAIL = sgd(lr=0.5, momentum=0.5)
CLIPS = chain(clip_by_global_norm(0.3), TAIL)
SKIPS = chain(apply_if_finite(3), clip_by_global_norm(0.3), TAIL)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_chain_clips_and_skips_alike(front_end: str) -> None:
    """NaN in one gradient makes all parameters NaN; infinity makes the factor zero.

    Behind ``apply_if_finite``, such a step changes no leaf, and increases no step count. All ranks
    agree bit for bit.
    """
    for dtype, what in product(DTYPES, BAD):
        bad = BAD[what]
        steps = [grads_at(0, dtype), grads_at(1, dtype, bad), grads_at(2, dtype)]
        with case(dtype=dtype, what=what):
            got, steps_made = FRONT_ENDS[front_end](CLIPS, dtype, steps)
            assert_same(got, by_update(CLIPS, dtype, steps)[0])
            assert steps_made in (set(), {2, 3} if bad is None else {3})
            assert bool(got["a"].isnan().any()) == (what == "nan")
            assert bool(got["b"].isnan().any()) == (what != "none")
        if front_end in SHARE_NOTHING:
            continue
        with case(dtype=dtype, what=what, skips=True):
            got, steps_made = FRONT_ENDS[front_end](SKIPS, dtype, steps)
            made = steps if bad is None else [steps[0], steps[2]]
            assert_same(got, by_update(CLIPS, dtype, made)[0])
            assert steps_made in (set(), {2, 3} if bad is None else {2})


# ------------------------------------------------------- clip_grad_norm_, and max_norm of hooks


def clipped_by_zero(dtype: torch.dtype, grads: Grads, limit: float, **more: Any) -> Any:
    def run(group: Any) -> Any:
        params = params_of(dtype)
        zero = ZeroRedundancyOptimizer(named(params), sgd(1.0), group)
        give(params, grads)
        norm = zero.clip_grad_norm_(limit, **more)
        return {n: p.grad for n, p in params.items() if p.grad is not None}, str(float(norm))

    return on_ranks(run)


def clipped_by_workers(dtype: torch.dtype, grads: Grads, limit: float, **more: Any) -> Any:
    ours, own = workers(sgd(1.0), params_of(dtype)), cloned(grads)
    try:
        norm = ours.clip_grad_norm_(own, limit, **more)
    finally:
        ours.close()
    return {name: grad for name, grad in own.items() if grad is not None}, str(float(norm))


def clipped_by_hook(kind: str, dtype: torch.dtype, grads: Grads, limit: float) -> Any:
    def run(group: Any) -> Any:
        ddp = wrapped(dtype, group)
        with torch.no_grad():
            for param in ddp.parameters():
                param.zero_()
        params, _, hook = hooked(kind, ddp, sgd(1.0), group, max_norm=limit)
        ddp(grads).backward()
        stepped = {n: -p.detach() for n, p in params.items() if grads[n] is not None}
        return stepped, str(float(hook.norm))

    return on_ranks(run)


CLIPPED: dict[str, Any] = {
    "ZeRO": clipped_by_zero,
    "workers": clipped_by_workers,
    "scatter": partial(clipped_by_hook, "scatter"),
    "held": partial(clipped_by_hook, "held"),
}
RTOL = {torch.float32: 1e-6, torch.bfloat16: 6 * 2.0**-8}
"""Tolerances, because torch rounds norms, factor and product in the dtype of the gradients."""


@pytest.mark.parametrize("way", CLIPPED)
def test_clip_grad_norm_is_torch_s(way: str) -> None:
    """Clipping equals torch's up to rounding, and a chain's bit for bit in float32."""
    for dtype, bad, limit in product(DTYPES, (*BAD.values(), 1.0), (0.3, 1e4)):
        with case(dtype=dtype, bad=bad, limit=limit):
            grads = grads_at(1, dtype, bad)
            got, norm = CLIPPED[way](dtype, grads, limit)
            theirs = params_of(dtype)
            give(theirs, grads)
            wanted = torch.nn.utils.clip_grad_norm_(theirs.values(), limit, foreach=False)
            close = {"rtol": RTOL[dtype], "atol": 0, "equal_nan": True}
            torch.testing.assert_close(torch.tensor(float(norm)), wanted.float(), **close)
            for name, grad in got.items():
                torch.testing.assert_close(grad, theirs[name].grad, **close)
            zeros = {name: torch.zeros_like(p) for name, p in theirs.items()}
            own = chain(clip_by_global_norm(limit), sgd(1.0))
            stepped, _ = own.update(zeros, grads, own.init(zeros))
            close["rtol"] = 0.0 if dtype == torch.float32 else 2.0**-7
            for name, grad in got.items():
                torch.testing.assert_close(grad, -stepped[name], **close)


@pytest.mark.parametrize("way", ["ZeRO", "workers"])
def test_what_is_not_finite_may_be_an_error(way: str) -> None:
    """A norm that is not finite raises an error on request."""
    for what in ("nan", "inf"):
        grads = grads_at(1, torch.float32, BAD[what])
        with case(what=what), pytest.raises(RuntimeError, match="cannot be clipped"):
            CLIPPED[way](torch.float32, grads, 0.3, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="max_norm must be a number >= 0, got -1.0"):
        CLIPPED[way](torch.float32, grads, -1.0)
