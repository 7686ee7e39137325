"""Clipping, skipping and unscaling with NaN, infinity, missing gradients, or 16 bits.

All front-ends must agree.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.remote.distributed_optimizer import DistributedOptimizer
from hooks import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
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


def wrapped(dtype: torch.dtype, group: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        Model(dtype), process_group=group, bucket_cap_mb=1e-5, find_unused_parameters=True
    )


def every(runs: Sequence[tuple[Tree, Any]]) -> tuple[Tree, Any]:
    """Return the first rank's run, and assert that all ranks have the same."""
    for params, counted in runs[1:]:
        assert_same(params, runs[0][0])
        assert counted == runs[0][1]
    return runs[0]


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
    return params, {int(leaf.step) for name, leaf in state.leaves.items() if name != NEVER}


def by_torch_optimizer(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    params = params_of(dtype)
    ours = TorchOptimizer(named(params), optimizer)
    for grads in steps:
        give(params, grads)
        ours.step()
    return detached(params), counted(ours, params)


def counted(optimizer: torch.optim.Optimizer, params: Tree) -> set[int]:
    known = {name: optimizer.state.get(param, {}) for name, param in params.items()}
    return {int(one["step"]) for name, one in known.items() if name != NEVER and "step" in one}


def by_bind(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    bound = optimizer.bind(params_of(dtype))
    for grads in steps:
        bound.step(grads)
    return detached(bound.params), {
        int(leaf.step) for name, leaf in bound.state.leaves.items() if name != NEVER
    }


def by_step_hook(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        ddp = wrapped(dtype, group)
        state = step_hook(ddp, optimizer)
        for grads in steps:
            ddp(grads).backward()
            ddp.zero_grad()
        leaves = state.state.leaves.items()
        found = dict(ddp.module.named_parameters())
        return detached(found), {int(leaf.step) for name, leaf in leaves if name != NEVER}

    return every(LocalWorld(RANKS).run(run))


def by_zero(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        params = params_of(dtype)
        zero = ZeroRedundancyOptimizer(named(params), optimizer, group)
        for grads in steps:
            give(params, grads)
            zero.step()
        return detached(params), set()

    return every(LocalWorld(RANKS).run(run))


def by_zero_hook(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        ddp = wrapped(dtype, group)
        named_ = list(ddp.module.named_parameters())
        zero = ZeroRedundancyOptimizer(named_, optimizer, group, overlap_with_ddp=True)
        ddp.register_comm_hook(None, zero_step_hook(ddp, zero))
        for grads in steps:
            ddp(grads).backward()
            ddp.zero_grad()
        return detached(dict(named_)), set()

    return every(LocalWorld(RANKS).run(run))


def by_workers(optimizer: Optimizer, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    params = params_of(dtype)
    there = {name: f"ps{k % RANKS}" for k, name in enumerate(params)}
    ours = DistributedOptimizer.over_threads(optimizer, dict(named(params)), there)
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
def test_a_chain_clips_alike(front_end: str) -> None:
    """NaN in one gradient makes all parameters NaN; infinity makes the factor zero.

    All ranks agree bit for bit.
    """
    for dtype in DTYPES:
        for what, bad in BAD.items():
            with case(dtype=dtype, what=what):
                steps = [grads_at(0, dtype), grads_at(1, dtype, bad), grads_at(2, dtype)]
                got, steps_made = FRONT_ENDS[front_end](CLIPS, dtype, steps)
                want, _ = by_update(CLIPS, dtype, steps)
                assert_same(got, want)
                assert steps_made in (set(), {2, 3} if bad is None else {3})
                assert bool(got["a"].isnan().any()) == (what == "nan")
                assert bool(got["b"].isnan().any()) == (what != "none")


@pytest.mark.parametrize("front_end", [name for name in FRONT_ENDS if name not in SHARE_NOTHING])
def test_a_chain_skips_alike(front_end: str) -> None:
    """A step with NaN or infinity changes no leaf, and increases no step count."""
    for dtype in DTYPES:
        for what, bad in BAD.items():
            with case(dtype=dtype, what=what):
                steps = [grads_at(0, dtype), grads_at(1, dtype, bad), grads_at(2, dtype)]
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
        return {name: p.grad for name, p in params.items() if p.grad is not None}, float(norm)

    (found, norm), other = LocalWorld(RANKS).run(run)
    assert_same(other[0], found)
    assert str(other[1]) == str(norm)
    return found, norm


def clipped_by_workers(dtype: torch.dtype, grads: Grads, limit: float, **more: Any) -> Any:
    params = params_of(dtype)
    there = {name: f"ps{k % RANKS}" for k, name in enumerate(params)}
    ours = DistributedOptimizer.over_threads(sgd(1.0), dict(named(params)), there)
    own = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
    try:
        norm = ours.clip_grad_norm_(own, limit, **more)
    finally:
        ours.close()
    return {name: grad for name, grad in own.items() if grad is not None}, float(norm)


def clipped_by_hook(kind: str, dtype: torch.dtype, grads: Grads, limit: float) -> Any:
    def run(group: Any) -> Any:
        ddp = wrapped(dtype, group)
        with torch.no_grad():
            for param in ddp.parameters():
                param.zero_()
        named_ = list(ddp.module.named_parameters())
        zero = ZeroRedundancyOptimizer(named_, sgd(1.0), group, overlap_with_ddp=True)
        hook = build_hook(kind, ddp, zero, max_norm=limit)
        ddp(grads).backward()
        return {n: -p.detach() for n, p in named_ if grads[n] is not None}, float(hook.norm)

    (found, norm), other = LocalWorld(RANKS).run(run)
    assert_same(other[0], found)
    assert str(other[1]) == str(norm)
    return found, norm


def build_hook(kind: str, ddp: Any, zero: Any, **options: Any) -> Any:
    made = {"scatter": zero_step_hook, "held": partial(hook_with_zero_step, allreduce_hook)}
    hook = made[kind](ddp, zero, **options)
    ddp.register_comm_hook(None, hook)
    return hook


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
    for dtype in DTYPES:
        for what, bad in {**BAD, "finite": 1.0}.items():
            for limit in (0.3, 1e4):
                with case(dtype=dtype, what=what, limit=limit):
                    grads = grads_at(1, dtype, bad)
                    got, norm = CLIPPED[way](dtype, grads, limit)
                    theirs = params_of(dtype)
                    give(theirs, grads)
                    wanted = torch.nn.utils.clip_grad_norm_(theirs.values(), limit, foreach=False)
                    close = {"rtol": RTOL[dtype], "atol": 0, "equal_nan": True}
                    torch.testing.assert_close(torch.tensor(norm), wanted.float(), **close)
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


# --------------------------------------------------------------------------- under a GradScaler


SCALE = 24.0
"""Scale that is no power of two, so that a division by it rounds."""


class Scaled:
    """GradScaler with the usual training loop over scaled gradients."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
        self.scaler.scale(torch.ones(()))

    def step(self, optimizer: Any, unscale: Callable[[], Any], *more: Any) -> None:
        """Unscale by hand, check that a second unscaling raises, and make a step."""
        unscale()
        with pytest.raises(RuntimeError, match="already"):
            unscale()
        self.scaler.step(optimizer, *more)
        self.scaler.update()


def scaled_torch(
    make: Callable[[Tree, Any], Any], by_hand: bool, dtype: torch.dtype, steps: Sequence[Grads]
) -> Any:
    """Run an optimizer whose parameters hold the gradients in ``.grad``."""

    def run(group: Any) -> Any:
        params, loop = params_of(dtype), Scaled()
        optimizer = make(params, group)
        for grads in steps:
            give(params, grads)
            if by_hand:
                loop.step(optimizer, partial(loop.scaler.unscale_, optimizer))
            else:
                loop.scaler.step(optimizer)
                loop.scaler.update()
        return detached(params), loop.scaler.get_scale()

    return every(LocalWorld(RANKS).run(run))


def scaled_hook(kind: str, by_hand: bool, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        ddp, loop = wrapped(dtype, group), Scaled()
        named_ = list(ddp.module.named_parameters())
        zero = ZeroRedundancyOptimizer(named_, TAIL, group, overlap_with_ddp=True)
        hook = build_hook(kind, ddp, zero, grad_scaler=loop.scaler)
        for grads in steps:
            loop.scaler.scale(ddp(grads)).backward()
            if by_hand:
                with pytest.raises(RuntimeError, match="already"):
                    loop.scaler.unscale_(zero)
            loop.scaler.step(zero)
            loop.scaler.update()
            ddp.zero_grad()
        assert hook.skipped == sum(not all_finite(grads) for grads in steps)
        return detached(dict(named_)), loop.scaler.get_scale()

    return every(LocalWorld(RANKS).run(run))


def scaled_workers(by_hand: bool, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    params, loop = params_of(dtype), Scaled()
    there = {name: f"ps{k % RANKS}" for k, name in enumerate(params)}
    ours = DistributedOptimizer.over_threads(TAIL, dict(named(params)), there)
    for grads in steps:
        own = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        loop.step(ours, partial(ours.unscale_, own, loop.scaler), own)
    assert {one.steps for one in ours.counters().values()} == {sum(map(all_finite, steps))}
    ours.close()
    return detached(params), loop.scaler.get_scale()


def all_finite(grads: Grads) -> bool:
    return all(grad is None or bool(grad.isfinite().all()) for grad in grads.values())


def post_local(params: Tree, group: Any) -> Any:
    plain = torch.optim.SGD(list(dict(named(params)).values()), lr=0.5, momentum=0.5)
    return PostLocalSGDOptimizer(plain, PeriodicModelAverager(2, 0, group))


SCALED: dict[str, Any] = {
    "TorchOptimizer": partial(scaled_torch, lambda params, _: TorchOptimizer(named(params), TAIL)),
    "ZeRO": partial(
        scaled_torch, lambda params, group: ZeroRedundancyOptimizer(named(params), TAIL, group)
    ),
    "post-local SGD": partial(scaled_torch, post_local),
    "scatter": partial(scaled_hook, "scatter"),
    "held": partial(scaled_hook, "held"),
    "workers": scaled_workers,
}


@pytest.mark.parametrize("way", SCALED)
def test_a_scaler_unscales_once_and_skips_alike(way: str) -> None:
    """The scaler divides gradients once, by itself or by hand, and skips steps with bad values."""
    for dtype in DTYPES:
        for what, bad in BAD.items():
            for by_hand in (False, True):
                with case(dtype=dtype, what=what, by_hand=by_hand):
                    steps = [grads_at(k, dtype, bad if k == 1 else 1.0, SCALE) for k in range(3)]
                    got, scale = SCALED[way](by_hand, dtype, steps)
                    after = SCALE if bad is None else SCALE / 2
                    scales = (SCALE, SCALE, after)
                    made = [divided(*pair) for pair in zip(steps, scales, strict=True)]
                    assert_same(got, by_update(TAIL, dtype, list(filter(all_finite, made)))[0])
                    assert scale == after


def divided(grads: Grads, scale: float) -> Grads:
    inverse = torch.tensor(1.0 / scale)
    return {
        name: None if grad is None else (grad.float() * inverse).to(grad.dtype)
        for name, grad in grads.items()
    }
