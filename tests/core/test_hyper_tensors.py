"""Hyper-parameters as 0-d tensors, for derivatives and for vmap over several values."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adagrad,
    adam,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    rmsprop,
    rprop,
    sgd,
    weight_decay,
)
from tests.choices import each_value

from . import support
from .support import assert_same, noise, step, tensors

EVERY = {
    **support.EVERY,
    "clipped by value": chain(clip_by_value(0.5), weight_decay(0.1), sgd(0.1)),
    "adam, rooted": adam(0.1, eps_root=1e-3),
    "adamw, rooted": adamw(0.1, amsgrad=True, eps_root=1e-3),
    "rmsprop, rooted": rmsprop(0.1, centered=True, momentum=0.9, eps_root=1e-3),
    "adagrad, rooted": adagrad(0.1, lr_decay=0.1, eps_root=1e-3),
}
GROWING = ("etas[1]", "d")
"""Hyper-parameters that must be at least 1."""
PARAM = noise(0, 3)
GRADS = [3 * noise(index + 1, 3) for index in range(3)]


def _run(optimizer: Optimizer, **hyper: Any) -> Tensor:
    """Return the parameter after three steps from a fresh state, in double precision."""
    param, state = PARAM, optimizer.init(PARAM)
    for grad in GRADS:
        param, state = optimizer.update(param, grad, state, **hyper)
    return param


def _numbers(optimizer: Optimizer) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield the name of each number but 0 and infinity, and a function that scales the number."""
    for name, value in optimizer.hyper.items():
        if isinstance(value, float) and value not in {0.0, math.inf}:
            yield name, lambda factor, n=name, v=value: {n: factor * v}
        if isinstance(value, tuple):
            for k, one in enumerate(value):
                before, after = value[:k], value[k + 1 :]
                if one is None:
                    continue
                yield (
                    f"{name}[{k}]",
                    lambda f, n=name, v=one, a=before, b=after: {n: (*a, f * v, *b)},
                )


CASES = {
    f"{name}: {hyper}": (optimizer, hyper, setting)
    for name, optimizer in EVERY.items()
    for hyper, setting in _numbers(optimizer)
}


@each_value(one=CASES)
def test_vmap_over_any_number_equals_the_loop(one: Any) -> None:
    """vmap also gives no warning that it runs the members one by one."""
    optimizer, hyper, setting = one
    factors = [1.0, 1.5] if hyper in GROWING else [0.5, 0.9]

    def run(factor: Any) -> Tensor:
        return _run(optimizer, **setting(factor))

    batched = torch.vmap(run)(torch.tensor(factors, dtype=torch.float64))
    torch.testing.assert_close(
        batched, torch.stack(list(map(run, factors))), rtol=1e-13, atol=1e-14
    )


@pytest.fixture
def double_by_default() -> Iterator[None]:
    """Use float64 for the numbers of ASGD and NAdam, because differences need all digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@each_value(one=CASES)
def test_grad_by_any_number_equals_finite_differences(one: Any) -> None:
    optimizer, hyper, setting = one
    weights, width = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), 1e-5

    def value(factor: Any) -> Any:
        return (weights * _run(optimizer, **setting(factor))).sum()

    at = 0.95 if hyper not in GROWING else 1.05
    slope = torch.func.grad(value)(torch.tensor(at, dtype=torch.float64))
    difference = (value(at + width) - value(at - width)) / (2 * width)
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-8)


def test_the_numbers_matter_in_these_runs() -> None:
    """The comparisons above are not comparisons of constants.

    The exceptions are numbers that init uses, limits that no run reaches, and numbers of CAME for
    matrices only.
    """
    still = {
        hyper
        for name, (optimizer, hyper, setting) in CASES.items()
        if not name.startswith((*SIGNS, "radam:"))
        and torch.equal(
            _run(optimizer), _run(optimizer, **setting(1.1 if hyper in GROWING else 0.9))
        )
    }
    limits = {"step_sizes[0]", "step_sizes[1]", "eps[0]", "d", "t0"}
    of_matrices = {"betas[2]", "eps[1]"}
    assert still == {"d0", "initial_accumulator_value", "lr", "reps_rel", *limits, *of_matrices}


SIGNS = ("lion", "rule before", "sign_sgd", "signum")
"""Optimizers whose signs hide small changes. The first steps of RAdam are momentum steps."""


def test_a_derivative_by_lr_goes_through_init() -> None:
    """The init of rprop uses the lr."""
    one = torch.ones(2)
    slope = torch.func.grad(lambda lr: step(rprop(lr), one, one).sum())(torch.tensor(0.1))
    assert slope.item() == -2.0


def test_the_graph_reaches_a_tensor_of_one_element() -> None:
    rate = torch.tensor([0.1], requires_grad=True)
    step(adamw(rate), torch.ones(2), torch.ones(2)).sum().backward()
    assert rate.grad is not None
    assert rate.grad.shape == (1,)
    torch.testing.assert_close(rate.grad, torch.tensor([2 * (-0.01 - 1.0)]), rtol=1e-6, atol=0)


@each_value(
    shape=[(1,), (1, 1), ()], dtype=[torch.float32, torch.float64, torch.bfloat16, torch.int64]
)
def test_one_element_of_any_shape_and_dtype_is_a_number(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    new = step(adam(torch.full(shape, 1.0).to(dtype)), PARAM, GRADS[0])
    torch.testing.assert_close(new, step(adam(1.0), PARAM, GRADS[0]), rtol=1e-14, atol=1e-15)


@each_value(optimizer=EVERY, dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_no_tensor_makes_a_dtype_drift(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """torch's promotion rules let a double-precision number change the dtype of 0-d parameters."""
    setting = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in optimizer.hyper.items()
        if isinstance(value, float) and value != 0.0
    }
    params, grads = ([noise(s, dtype=dtype), noise(s, 3, dtype=dtype)] for s in (0, 1))
    state = optimizer.init(params)
    new, new_state = optimizer.update(params, grads, state, **setting)
    kinds = [[t.dtype for t in tensors(one.leaves)] for one in (state, new_state)]
    assert kinds[0] == kinds[1]
    assert {one.dtype for one in new} == {dtype}
    optimizer.update_(params, grads, state, **setting)
    assert_same((params, state), (new, new_state))


def test_two_links_share_a_tensor_lr() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = chain(clip_by_global_norm(1e9), decoupled_weight_decay(0.5), sgd(rate))
    assert step(optimizer, torch.ones(1), torch.ones(1)).item() == 0.25


PLAIN = chain(clip_by_global_norm(1.0), adamw(0.1))


@each_value(
    pair=[
        ("update", PLAIN),
        ("update_", PLAIN),
        ("update_", chain(apply_if_finite(3), PLAIN)),
        ("bind", PLAIN),
    ],
    bad=[-0.5, math.nan, math.inf],
)
def test_a_tensor_that_was_written_to_is_held_to_its_bounds(
    pair: tuple[str, Optimizer], bad: float
) -> None:
    """A number out of bounds is refused at the next step, and nothing has changed."""
    door, optimizer = pair
    optimizer = optimizer.replace(lr=torch.tensor(0.1))
    params, grads = [noise(0, 3)], [noise(1, 3)]
    if door == "bind":
        bound = optimizer.bind(params)
        made: Any = bound.params, bound.state
        call = partial(bound.step, grads)
    else:
        made = params, optimizer.init(params)
        call = partial(getattr(optimizer, door), params, grads, made[1])
    call()
    before = [one.clone() for one in tensors(made)]
    optimizer.hyper["lr"].fill_(bad)
    with pytest.raises(ValueError, match=rf"lr must be a finite number >= 0, got {bad}"):
        call()
    assert_same(tensors(made), before)
