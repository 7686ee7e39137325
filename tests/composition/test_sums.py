"""Totals over the states of many leaves: one call sums several leaves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    if_any,
    labels,
    partition,
    prodigy,
    sgd,
    weight_decay,
)
from functional_optim.plan import addend_rows

from ..choices import case, each_value
from ..tensors import assert_same, normal

LARGE = (addend_rows.BATCH + 1,)
SIZES = ((3,), LARGE, (), (2, 5), (0, 4), (7,), (200, 150), (4, 4), (9,), LARGE, (6,))
OPTIMIZERS: dict[str, Any] = {
    "prodigy": prodigy(),
    "with decay": prodigy(betas=(0.0, 0.9), weight_decay=0.1, decouple=False),
    "of some elements": prodigy(slice_p=3),
    "clipped": chain(clip_by_value(0.5), prodigy(use_bias_correction=True)),
}


def dtype_of(k: int) -> torch.dtype:
    return (torch.float32, torch.float64, torch.float32, torch.bfloat16)[k % 4]


def tensors(seed: int) -> dict[str, Any]:
    return {
        str(k): normal(*shape, seed=seed + k, dtype=dtype_of(k)) for k, shape in enumerate(SIZES)
    }


def histories(optimizer: Optimizer, torch_class: bool) -> Iterator[tuple[Any, Any]]:
    """Yield the parameters after each step, with those of the pure step."""
    alone = optimizer.using(executor="reference")  # has no plans
    want, params = tensors(0), {name: one.clone() for name, one in tensors(0).items()}
    state, own = optimizer.init(want), optimizer.init(params)
    if torch_class:
        params = {name: one.requires_grad_() for name, one in params.items()}
        trained = TorchOptimizer(params.items(), optimizer)
    for step in range(6):
        grads: dict[str, Any] = tensors(100 * (step + 1))
        if step == 3:
            grads["5"] = None
        want, state = alone.update(want, grads, state)
        if torch_class:
            for name, grad in grads.items():
                params[name].grad = grad
            trained.step()
        else:
            optimizer.update_(params, grads, own)
        yield {name: one.detach() for name, one in params.items()}, want


@each_value(optimizer=OPTIMIZERS, torch_class=[False, True])
def test_they_have_the_bits_of_one_after_the_other(optimizer: Optimizer, torch_class: bool) -> None:
    for step, (got, want) in enumerate(histories(optimizer, torch_class)):
        with case(step=step):
            assert_same(got, want)


@pytest.mark.parametrize("seed", range(3))
def test_a_norm_does_not_depend_on_how_leaves_are_divided(seed: int) -> None:
    """A norm is the same in every bit however a partition divides the leaves, in planned steps too.

    Squares are added in the order of the leaves.
    """
    shapes = [(k % 5 + 1, 3) for k in range(40)]
    split = labels({"odd": if_any(lambda path: int(path[0]) % 2 == 1)}, default="even")
    parts = partition({"odd": sgd(lr=0.1), "even": sgd(lr=0.1)}, split)
    after = []
    for optimizer in (chain(clip_by_global_norm(0.5), one) for one in (parts, sgd(lr=0.1))):
        params = {
            f"{k:02}": normal(*shape, seed=seed + k, dtype=torch.float64)
            for k, shape in enumerate(shapes)
        }
        state = optimizer.init(params)
        for step in range(8):
            grads = {
                name: normal(*param.shape, seed=1000 * step + int(name), dtype=torch.float64)
                for name, param in params.items()
            }
            optimizer.update_(params, grads, state)
        after.append(params)
    assert_same(after[0], after[1])


@pytest.mark.parametrize("by_gate", [False, True])
def test_a_stage_before_the_norm_may_change_the_gradients_of_some_leaves_only(
    by_gate: bool,
) -> None:
    stages = weight_decay(0.0), clip_by_global_norm(0.5), sgd(lr=0.1)
    made = chain(apply_if_finite(max_skips=1), *stages) if by_gate else chain(*stages)
    optimizer = made.override(("b",), **{"weight_decay.weight_decay": 0.5})
    found = []
    for executor in ("auto", "reference"):
        own = optimizer.using(executor=executor)
        params = {name: normal(8, 4, seed=k) for k, name in enumerate("abcd")}
        state = own.init(params)
        for step in range(4):
            grads = {name: normal(8, 4, seed=9 * step + k + 5) for k, name in enumerate("abcd")}
            own.update_(params, grads, state)
        found.append(params)
    assert_same(*found)


def test_totals_are_of_parameters_that_an_earlier_stage_has_changed() -> None:
    optimizer = chain(decoupled_weight_decay(0.1), prodigy(d0=0.1))
    found = []
    for executor in ("auto", "reference"):
        own = optimizer.using(executor=executor)
        params = {name: normal(9, 5, seed=k) for k, name in enumerate("abcdef")}
        state = own.init(params)
        for step in range(8):
            noise = normal(9, 5, seed=step)
            grads = {name: one + 0.1 * noise for name, one in params.items()}
            own.update_(params, grads, state)
        found.append([params, state.shared])
    assert_same(*found)
