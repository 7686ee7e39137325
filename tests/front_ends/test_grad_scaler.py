"""Gradients scaled by a GradScaler: every front-end unscales them once, and skips bad steps."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer
from functional_optim.frontends.loss_scale import record_unscale
from hooks import PeriodicModelAverager, PostLocalSGDOptimizer
from sharding import ZeroRedundancyOptimizer
from tests.choices import case

from .test_not_finite import (
    BAD,
    DTYPES,
    TAIL,
    Grads,
    Tree,
    assert_same,
    by_update,
    cloned,
    detached,
    give,
    grads_at,
    hooked,
    named,
    on_ranks,
    params_of,
    workers,
    wrapped,
)

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

    return on_ranks(run)


def scaled_hook(kind: str, by_hand: bool, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    def run(group: Any) -> Any:
        ddp, loop = wrapped(dtype, group), Scaled()
        params, zero, hook = hooked(kind, ddp, TAIL, group, grad_scaler=loop.scaler)
        for grads in steps:
            loop.scaler.scale(ddp(grads)).backward()
            if by_hand:
                with pytest.raises(RuntimeError, match="already"):
                    loop.scaler.unscale_(zero)
            loop.scaler.step(zero)
            loop.scaler.update()
            ddp.zero_grad()
        assert hook.skipped == sum(not all_finite(grads) for grads in steps)
        return detached(params), loop.scaler.get_scale()

    return on_ranks(run)


def scaled_workers(by_hand: bool, dtype: torch.dtype, steps: Sequence[Grads]) -> Any:
    params, loop = params_of(dtype), Scaled()
    ours = workers(TAIL, params)
    for grads in steps:
        own = cloned(grads)
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
    for dtype, what, by_hand in product(DTYPES, BAD, (False, True)):
        bad = BAD[what]
        with case(dtype=dtype, what=what, by_hand=by_hand):
            steps = [grads_at(k, dtype, bad if k == 1 else 1.0, SCALE) for k in range(3)]
            got, scale = SCALED[way](by_hand, dtype, steps)
            after = SCALE if bad is None else SCALE / 2
            made = [divided(*pair) for pair in zip(steps, (SCALE, SCALE, after), strict=True)]
            assert_same(got, by_update(TAIL, dtype, list(filter(all_finite, made)))[0])
            assert scale == after


def test_gradients_that_an_error_left_scaled_in_part_are_not_stepped() -> None:
    scaler, param = Scaled().scaler, torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = torch.optim.SGD([param], lr=1.0)

    def unscale(scale: float) -> bool:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        record_unscale(scaler, optimizer, unscale)
    with pytest.raises(RuntimeError, match="already"):
        record_unscale(scaler, optimizer, unscale)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 1.0] and scaler.get_scale() == SCALE / 2


def divided(grads: Grads, scale: float) -> Grads:
    inverse = torch.tensor(1.0 / scale)
    return {
        name: None if grad is None else (grad.float() * inverse).to(grad.dtype)
        for name, grad in grads.items()
    }
