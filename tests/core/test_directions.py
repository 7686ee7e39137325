"""Directions before a descent, compared with the algorithms that they form."""

import math
from typing import Any

import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    adam,
    adamw,
    chain,
    descend,
    lamb,
    lars,
    lion,
    masked,
    rmsprop,
    scale_by_adam,
    scale_by_lion,
    scale_by_rms,
    scale_by_sign,
    scale_by_trust_ratio,
    sgd,
    trace,
    weight_decay,
)
from tests.choices import each_value

from ..choices import case, pairs
from .support import assert_same, noise, same_bits, step, steps
from .twins import DTYPES, LAYOUTS, matrix

LR = 0.1
EPS = 1e-4
"""An eps that is not 0 in 16 bits, unlike the squares of small gradients."""
SAME: dict[str, tuple[Optimizer, Optimizer]] = {
    "lion": (chain(scale_by_lion((0.6, 0.2)), descend(LR)), lion(LR, (0.6, 0.2))),
    "sgd": (chain(trace(0.0), descend(LR)), sgd(LR)),
    "momentum": (chain(trace(0.9, 0.3), descend(LR)), sgd(LR, 0.9, 0.3)),
    "nesterov": (
        chain(weight_decay(0.1), trace(0.9, nesterov=True), descend(LR)),
        sgd(LR, 0.9, weight_decay=0.1, nesterov=True),
    ),
}
CLOSE: dict[str, tuple[Optimizer, Optimizer]] = {
    "adam": (chain(scale_by_adam(eps=EPS), descend(LR)), adam(LR, eps=EPS)),
    "amsgrad": (
        chain(scale_by_adam((0.5, 0.7), 1e-3, amsgrad=True), descend(LR)),
        adam(LR, (0.5, 0.7), 1e-3, amsgrad=True),
    ),
    "rmsprop": (chain(scale_by_rms(0.9, EPS), descend(LR)), rmsprop(LR, 0.9, EPS)),
    "centered": (
        chain(scale_by_rms(0.5, 1e-3, centered=True), descend(LR)),
        rmsprop(LR, 0.5, 1e-3, centered=True),
    ),
}
ULPS = 4
"""Bound relative to the parameter or to the step, whichever is larger, as in the docstrings."""


@each_value(both=SAME, dtype=DTYPES, param=list(LAYOUTS)[:-1], grad=list(LAYOUTS))
def test_directions_before_a_descent_are_their_algorithm_to_the_bit(
    both: tuple[Optimizer, Optimizer], dtype: torch.dtype, param: str, grad: str
) -> None:
    start = matrix(0, dtype, param)
    ends = [steps(one, start, lambda index: matrix(index + 1, dtype, grad)) for one in both]
    assert same_bits(ends[0][0], ends[1][0])
    assert not same_bits(ends[0][0], start)
    kept = [[one for one in state.leaves.stages if one] for _, state in ends]
    assert_same(*kept)


@each_value(both=CLOSE, dtype=DTYPES)
def test_others_are_it_to_the_bit_in_their_state_and_within_the_stated_bound_in_parameters(
    both: tuple[Optimizer, Optimizer], dtype: torch.dtype
) -> None:
    ours, whole = both
    param = noise(0, 500, dtype=dtype)
    state, kept = whole.init(param), ours.init(param)
    for index in range(20):
        grad = noise(index + 1, 500, dtype=dtype)
        got, kept = ours.update(param, grad, kept)
        want, state = whole.update(param, grad, state)
        assert_same(
            [one for one in kept.leaves.stages if one], [one for one in state.leaves.stages if one]
        )
        moved = (want.double() - param.double()).abs()
        largest = torch.maximum(torch.maximum(param.double().abs(), want.double().abs()), moved)
        apart = (got.double() - want.double()).abs()
        assert bool((apart <= ULPS * torch.finfo(dtype).eps * largest).all())
        assert not same_bits(want, param)
        param = want


def test_rms_with_a_trace_is_rmsprop_with_momentum() -> None:
    ours = chain(scale_by_rms(0.9), trace(0.8), descend(LR))
    start = noise(0, 50)
    ends = [
        steps(one, start, lambda index: noise(index + 1, 50))[0]
        for one in (ours, rmsprop(LR, 0.9, momentum=0.8))
    ]
    torch.testing.assert_close(ends[0] - start, ends[1] - start, rtol=1e-12, atol=1e-13)


def test_signs_are_lion_without_memory() -> None:
    for name, made in (("plain", scale_by_sign()), ("lion", scale_by_lion((0.0, 0.0)))):
        with case(name=name):
            moved = step(chain(made, descend(0.25)), torch.zeros(3), torch.tensor([2.0, -1e-30, 0]))
            assert moved.tolist() == [-0.25, 0.25, 0.0]


START = noise(0, 6)
GRADS = [noise(index + 1, 6) for index in range(6)]


def _end(optimizer: Optimizer, start: Tensor = START, grads: list[Tensor] = GRADS) -> Tensor:
    end: Tensor = steps(optimizer, start, lambda index: grads[index], len(grads))[0]
    return end


def _length(values: list[float]) -> float:
    return math.sqrt(math.fsum(one * one for one in values))


def test_lamb_is_the_algorithm() -> None:
    """Algorithm 2 of You et al. 2020, in Python's numbers, gives the same parameters."""
    for hyper in pairs(
        betas=[(0.9, 0.999), (0.0, 0.5), (0.7, 0.0)],
        weight_decay=[0.0, 0.3],
        min_norm=[0.0, 5.0],
        max_ratio=[0.2, math.inf],
        maximize=[False, True],
    ):
        with case(**hyper):
            want = torch.tensor(_lamb(START.tolist(), hyper), dtype=torch.float64)
            end = _end(lamb(LR, eps=1e-6, **hyper))
            torch.testing.assert_close(end - START, want - START, rtol=1e-11, atol=1e-13)


def _lamb(p: list[float], c: dict[str, Any]) -> list[float]:
    (b_1, b_2), m, v = c["betas"], [0.0] * 6, [0.0] * 6
    for t, grad in enumerate(GRADS, start=1):
        g = [-one if c["maximize"] else one for one in grad.tolist()]
        m = [b_1 * one + (1 - b_1) * a for one, a in zip(m, g, strict=True)]
        v = [b_2 * one + (1 - b_2) * a * a for one, a in zip(v, g, strict=True)]
        d = [
            a / (1 - b_1**t) / (math.sqrt(b / (1 - b_2**t)) + 1e-6) + c["weight_decay"] * x
            for a, b, x in zip(m, v, p, strict=True)
        ]
        ratio = min(max(_length(p), c["min_norm"]) / _length(d), c["max_ratio"])
        p = [x - LR * ratio * one for x, one in zip(p, d, strict=True)]
    return p


def test_lars_is_the_algorithm() -> None:
    """Algorithm 1 of You et al. 2017, with the norm of the sum, gives the same parameters."""
    for hyper in pairs(
        momentum=[0.0, 0.9],
        weight_decay=[0.0, 0.3],
        trust_coefficient=[0.5, 2.0],
        nesterov=[False, True],
        maximize=[False, True],
    ):
        if hyper["nesterov"] and not hyper["momentum"]:
            continue  # nesterov needs momentum
        with case(**hyper):
            want = torch.tensor(_lars(START.tolist(), hyper), dtype=torch.float64)
            end = _end(lars(LR, **hyper))
            torch.testing.assert_close(end - START, want - START, rtol=1e-11, atol=1e-13)


def _lars(p: list[float], c: dict[str, Any]) -> list[float]:
    b = [0.0] * 6
    for grad in GRADS:
        g = [-one if c["maximize"] else one for one in grad.tolist()]
        d = [a + c["weight_decay"] * x for a, x in zip(g, p, strict=True)]
        ratio = c["trust_coefficient"] * _length(p) / _length(d)
        d = [ratio * one for one in d]
        b = [c["momentum"] * one + a for one, a in zip(b, d, strict=True)]
        ahead = [a + c["momentum"] * one for a, one in zip(d, b, strict=True)]
        p = [x - LR * one for x, one in zip(p, ahead if c["nesterov"] else b, strict=True)]
    return p


def test_lamb_with_a_ratio_of_1_is_adam_with_its_decay_outside() -> None:
    """AdamW also applies its decay after the averages."""
    made = lamb(LR, (0.8, 0.9), 1e-6, 0.3, min_norm=1e9, max_ratio=1.0)
    plain = chain(scale_by_adam((0.8, 0.9), 1e-6), weight_decay(0.3), descend(LR))
    assert_same(_end(made), _end(plain))
    decoupled = _end(adamw(LR, (0.8, 0.9), 1e-6, 0.3))
    torch.testing.assert_close(_end(made) - START, decoupled - START, rtol=1e-12, atol=1e-14)
    assert not same_bits(_end(made), _end(lamb(LR, (0.8, 0.9), 1e-6, 0.3)))


def test_lars_with_a_ratio_of_1_is_sgd() -> None:
    """The ratio is 1 at the first step of zeros. Without trust, no parameter moves."""
    zeros, grad = torch.zeros(6), GRADS[0].float()
    for hyper in ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}):
        with case(**hyper):
            ours, theirs = lars(LR, **hyper), sgd(LR, **hyper)  # type: ignore[arg-type]
            assert_same(step(ours, zeros, grad), step(theirs, zeros, grad))
    assert_same(_end(lars(LR, trust_coefficient=0.0)), START)


@each_value(
    made={
        "lamb": (lambda: lamb(LR, eps=0.0, weight_decay=0.0), LR),
        "lars": (lambda: lars(LR, trust_coefficient=0.5), LR * 0.5),
    }
)
def test_a_step_is_as_long_as_a_part_of_its_parameter(made: Any) -> None:
    """The relative length depends neither on the scale of the gradient nor on the parameter's."""
    build, part = made
    end = _end(build())
    first = step(build(), START, GRADS[0])
    expected = part * START.norm()
    torch.testing.assert_close((first - START).norm(), expected, rtol=1e-13, atol=0.0)
    assert_same(_end(build(), START, [1024 * one for one in GRADS]), end)
    assert_same(_end(build(), 4 * START), 4 * end)


def test_a_ratio_of_nothing_is_1() -> None:
    """A zero gradient moves nothing, and a zero parameter starts without scaling."""
    ratio = chain(scale_by_trust_ratio(trust_coefficient=7.0), descend(1.0))
    for param, grad, want in (
        ([0.0, 0.0], [3.0, 4.0], [-3.0, -4.0]),
        ([3.0, 4.0], [0.0, 0.0], [3.0, 4.0]),
        ([], [], []),
        ([3.0, 4.0], [0.0, 0.5], [3.0, -31.0]),
    ):
        with case(param=param, grad=grad):
            assert step(ratio, torch.tensor(param), torch.tensor(grad)).tolist() == want
    at_least = chain(scale_by_trust_ratio(min_norm=2.0, max_ratio=3.0), descend(1.0))
    assert step(at_least, torch.zeros(1), torch.ones(1)).item() == -2.0
    assert step(at_least, torch.zeros(1), torch.ones(1) / 4).item() == -0.75


def test_the_ratio_of_nothing_has_a_derivative() -> None:
    ratio = chain(scale_by_trust_ratio(), descend(1.0))
    for param, grad in ((torch.zeros(2), torch.ones(2)), (torch.ones(2), torch.zeros(2))):
        leaves = [one.double().requires_grad_() for one in (param, grad)]
        after = ratio.update(*leaves, ratio.init(leaves[0]))[0]
        with case(param=param, grad=grad):
            for one in torch.autograd.grad(after.sum(), leaves):
                assert bool(one.isfinite().all())


def test_norms_neither_overflow_nor_vanish() -> None:
    """Norms are in double precision, where these squares neither overflow nor vanish."""
    ratio = chain(scale_by_trust_ratio(), descend(1.0))
    for scale in (1e-30, 1e30):
        with case(scale=scale):
            given = torch.tensor([3.0, 4.0]) * scale
            assert_same(step(ratio, given, given), torch.zeros(2))


def test_some_leaves_may_be_left_out_of_it() -> None:
    ratio = masked(scale_by_trust_ratio(), lambda path: path[-1] != "bias")
    params = {"bias": torch.tensor([3.0, 4.0]), "weight": torch.tensor([3.0, 4.0])}
    grads = {"bias": torch.tensor([0.0, 1.0]), "weight": torch.tensor([0.0, 1.0])}
    made = step(chain(ratio, descend(1.0)), params, grads)
    assert {name: one.tolist() for name, one in made.items()} == {
        "bias": [3.0, 3.0],
        "weight": [3.0, -1.0],
    }
