"""Chains with a stage that takes the raw gradient, and their expected results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Transform,
    accumulate,
    cautious,
    chain,
    clip_by_global_norm,
    clip_by_value,
    descend,
    maximized,
    trace,
    weight_decay,
)

from .support import assert_same, noise

SIZES = {"a": (3, 4), "b": (5,), "s": ()}
LR, CALLS = 0.5, 4


class BackHyper(NamedTuple):
    weight: float  # weight of the incoming gradient


def back_transform(
    grad: Tensor, param: Tensor, state: NoState, c: BackHyper, raw: Tensor
) -> tuple[Tensor, NoState]:
    return raw + c.weight * grad, state


BACK = Transform(name="back", hyper=BackHyper, transform=back_transform, raw=True)
"""Transform that returns the raw gradient plus a part of the incoming gradient."""


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.25, 0.25)


class RawCase(NamedTuple):
    optimizer: Optimizer
    sign: float = 1.0
    """The sign of the raw gradient."""
    gate: bool = False
    """True if two calls make one step."""


BACK_AGAIN = (BACK(weight=0.0), descend(LR))
RAW: dict[str, RawCase] = {
    "alone": RawCase(chain(*BACK_AGAIN)),
    "behind a clip": RawCase(chain(clip_by_value(0.25), *BACK_AGAIN)),
    "behind a decay and a memory": RawCase(chain(weight_decay(0.5), trace(0.9), *BACK_AGAIN)),
    "behind a sum": RawCase(chain(clip_by_global_norm(0.25), *BACK_AGAIN)),
    "behind two sums": RawCase(
        chain(clip_by_global_norm(0.5), weight_decay(0.5), clip_by_global_norm(0.25), *BACK_AGAIN)
    ),
    "up": RawCase(chain(maximized(), clip_by_value(0.25), *BACK_AGAIN), -1.0),
    "up, behind a sum": RawCase(chain(maximized(), clip_by_global_norm(0.25), *BACK_AGAIN), -1.0),
    "behind a gate": RawCase(chain(accumulate(2), clip_by_value(0.25), *BACK_AGAIN), 1.0, True),
    "behind a gate and a sum": RawCase(
        chain(accumulate(2), clip_by_global_norm(0.25), *BACK_AGAIN), 1.0, True
    ),
    "up, behind a clip, a gate and a sum": RawCase(
        chain(
            maximized(), clip_by_value(9.0), accumulate(2), clip_by_global_norm(0.25), *BACK_AGAIN
        ),
        -1.0,
        True,
    ),
}


def leaves(seed: int) -> dict[str, Any]:
    return {
        name: noise(10 * seed + k, *size, dtype=torch.float32)
        for k, (name, size) in enumerate(SIZES.items())
    }


def gradients() -> list[dict[str, Any]]:
    """Return the gradients of each call; in the second call, one leaf has none."""
    made = [leaves(index + 1) for index in range(CALLS)]
    made[1]["b"] = None
    return made


def expected(one: RawCase) -> dict[str, Tensor]:
    """Return the parameters after descent by raw gradients.

    Behind a gate, each step takes half the sum of two gradients, one of which can be missing.
    """
    params = leaves(0)
    for name in params:
        given = [grads[name] for grads in gradients()]
        made: Sequence[Tensor] = [grad for grad in given if grad is not None]
        if one.gate:
            halves = [[g * 0.5 for g in given[i : i + 2] if g is not None] for i in (0, 2)]
            made = [pair[0] if len(pair) == 1 else pair[0] + pair[1] for pair in halves]
        for grad in made:
            params[name] = torch.add(params[name], one.sign * grad, alpha=-LR)
    return params


def assert_raw(one: RawCase, executor: Any) -> None:
    """Assert that ``update``, ``update_`` and, without a gate, ``bind`` give expected results."""
    optimizer = one.optimizer.using(executor=executor)
    params, inside, want = leaves(0), leaves(0), expected(one)
    state, kept = optimizer.init(params), optimizer.init(inside)
    bound = [] if one.gate else [optimizer.bind(leaves(0))]
    for grads in gradients():
        params, state = optimizer.update(params, grads, state)
        optimizer.update_(inside, grads, kept)
        for own in bound:
            own.step(grads)
    for made in (params, inside, *(own.params for own in bound)):
        for name in SIZES:
            torch.testing.assert_close(made[name], want[name], rtol=0.0, atol=2e-7, msg=name)


CAUTIOUS: dict[str, Optimizer] = {
    name: chain(clip_by_value(0.25), trace(0.9), cautious(rescale=rescale), descend(LR))
    for name, rescale in (("rescaled", True), ("not rescaled", False))
}


def assert_cautious(optimizer: Optimizer, executor: Any) -> None:
    """Assert that ``update_`` by an executor equals the pure step of the reference, bit for bit."""
    params, others = leaves(0), leaves(0)
    state, kept = optimizer.init(params), optimizer.init(others)
    reference = optimizer.using(executor="reference")
    for grads in gradients():
        params, state = reference.update(params, grads, state)
        optimizer.using(executor=executor).update_(others, grads, kept)
    assert_same((others, kept), (params, state))
