"""Directions before a descent, compared with the algorithms that they form."""

import torch

from functional_optim import (
    Optimizer,
    adam,
    chain,
    descend,
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

from ..choices import case
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
    for index in range(10):
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


def test_signs_are_lion_without_memory() -> None:
    for name, made in (("plain", scale_by_sign()), ("lion", scale_by_lion((0.0, 0.0)))):
        with case(name=name):
            moved = step(chain(made, descend(0.25)), torch.zeros(3), torch.tensor([2.0, -1e-30, 0]))
            assert moved.tolist() == [-0.25, 0.25, 0.0]


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
