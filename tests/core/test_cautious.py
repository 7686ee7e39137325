"""``cautious``, and other stages that take the raw gradient of a chain."""

import math

import pytest
import torch

from functional_optim import (
    Optimizer,
    accumulate,
    cautious,
    chain,
    clip_by_global_norm,
    clip_by_value,
    descend,
    maximized,
    scale_by_adam,
    scale_by_lion,
    stored,
    trace,
)
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from ..choices import case
from .raw import CAUTIOUS, RAW, RawCase, assert_cautious, assert_raw
from .support import IN_PYTHON, assert_same, noise, step, steps


@each_value(one=RAW, executor=IN_PYTHON)
def test_the_raw_gradient_is_what_came_in_or_what_the_gate_has_let_through(
    one: RawCase, executor: ExecutorName
) -> None:
    assert_raw(one, executor)


@each_value(optimizer=CAUTIOUS, executor=IN_PYTHON)
def test_caution_is_the_same_in_every_executor(
    optimizer: Optimizer, executor: ExecutorName
) -> None:
    assert_cautious(optimizer, executor)


@each_value(direction={"adam": scale_by_adam(), "lion": scale_by_lion()}, rescale=[False, True])
def test_it_is_the_algorithm(direction: object, rescale: bool) -> None:
    """Algorithm 1 of Liang et al., in plain tensors, gives the same parameters."""
    plain, careful = (
        chain(direction, *more, descend(1.0))  # type: ignore[arg-type]
        for more in ((), (cautious(rescale=rescale),))
    )
    param, state, kept = noise(0, 40), plain.init(noise(0, 40)), careful.init(noise(0, 40))
    left_out = 0
    for index in range(5):
        grad = noise(index + 1, 40)
        zero = torch.zeros(40, dtype=torch.float64)
        update, state = plain.update(zero, grad, state)
        agree = -update * grad > 0
        scale = 40 / (int(agree.sum()) + 1) if rescale else 1.0
        want = param + torch.where(agree, update, 0.0) * scale
        param, kept = careful.update(param, grad, kept)
        torch.testing.assert_close(param, want, rtol=1e-14, atol=1e-15)
        left_out += int((~agree).sum())
    assert left_out > 2


def test_signs_count_and_not_the_size_of_a_product() -> None:
    """The product of two tiny numbers is 0, so only signs are compared.

    An element that is 0 or NaN stays as it is.
    """
    careful = chain(cautious(rescale=False), descend(1.0))
    grad = torch.tensor([1e-30, -1e-30, 0.0, math.inf, math.nan])
    moved = step(careful, torch.zeros(5), grad).tolist()
    assert moved[:4] == [-grad[0].item(), -grad[1].item(), 0.0, -math.inf]
    assert math.isnan(moved[4])


def test_an_infinite_update_that_goes_against_its_gradient_is_left_out() -> None:
    """Multiplication by 0 would turn the infinite update into NaN."""
    careful = chain(trace(1.0), cautious(rescale=False), descend(1.0))
    grads = [torch.tensor([-math.inf, 1.0]), torch.tensor([1.0, 1.0])]
    end, _ = steps(careful, torch.zeros(2), lambda index: grads[index], 2)
    assert end.tolist() == [math.inf, -3.0]


def test_nothing_moves_where_the_gradient_is_0() -> None:
    for rescale in (False, True):
        careful = chain(trace(1.0), cautious(rescale=rescale), descend(1.0))
        start = torch.zeros(3)
        ends = [
            steps(careful, start, lambda index: torch.full((3,), 1.0 - index), k)[0] for k in (1, 2)
        ]
        with case(rescale=rescale):
            assert_same(*ends)
            assert bool((ends[0] < 0).all())


def test_it_goes_up_where_the_chain_does() -> None:
    """The raw gradient is negated for ascent, so no element of the first step goes against it."""
    for rescale, size in ((False, 1.0), (True, 0.75)):
        up = chain(maximized(), cautious(rescale=rescale), descend(1.0))
        with case(rescale=rescale):
            assert step(up, torch.zeros(3), torch.ones(3)).tolist() == [size] * 3


def test_behind_a_gate_it_is_of_the_mean() -> None:
    """The update follows the mean of two gradients, and can go against the second one alone."""
    for gradients, moved in (((3.0, -1.0), -1.0), ((3.0, -5.0), 1.0)):
        careful = chain(accumulate(2), cautious(rescale=False), descend(1.0))
        end, _ = steps(careful, torch.zeros(1), lambda k, g=gradients: torch.tensor([g[k]]), 2)
        with case(gradients=gradients):
            assert end.item() == moved


def test_a_clip_before_it_does_not_change_what_it_compares_with() -> None:
    """The stage compares with the raw gradient, from before the trace and the clip."""
    careful = chain(trace(1.0), clip_by_value(0.5), cautious(rescale=False), descend(1.0))
    grads = [torch.tensor([4.0, 4.0]), torch.tensor([-1.0, 1.0])]
    end, _ = steps(careful, torch.zeros(2), lambda index: grads[index], 2)
    assert end.tolist() == [-0.5, -1.0]


def test_it_is_stored_like_any_stage() -> None:
    """The stored chain keeps a float32 master of the parameters, and gradients have 16 bits."""
    grads = [noise(index + 1, 300, dtype=torch.bfloat16) for index in range(4)]
    start = noise(0, 300, dtype=torch.bfloat16)
    for rescale in (False, True):
        careful = chain(clip_by_value(0.5), trace(0.9), cautious(rescale=rescale), descend(0.1))
        kept = stored(careful, param="bfloat16+master")
        made, _ = steps(kept, start, lambda index: grads[index])
        want, _ = steps(careful, start.float(), lambda index: grads[index].float())
        with case(rescale=rescale):
            assert_same(made, want.bfloat16())


def test_behind_a_sum_it_cannot_be_stored() -> None:
    careful = chain(clip_by_global_norm(1.0), trace(0.9), cautious(), descend(0.1))
    with pytest.raises(ValueError, match=r"cautious reads the gradient .* clip_by_global_norm"):
        stored(careful, state="bfloat16")
    first = chain(trace(0.9), cautious(), clip_by_global_norm(1.0), descend(0.1))
    start, grad = noise(0, 30, dtype=torch.float32), noise(1, 30, dtype=torch.float32)
    kept = stored(first, state={"momentum_buffer": "bfloat16"})
    assert_same(step(kept, start, grad), step(first, start, grad))
