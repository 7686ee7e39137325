"""Rules that torch lacks, compared with the formulas of their papers, and identities."""

import math
from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, lion, qhm, sgd
from tests.choices import each_value

from ..choices import case, pairs
from .support import assert_same, noise, step, steps

START = noise(0, 6)
GRADS = [noise(index + 1, 6) for index in range(6)]


def _run(optimizer: Optimizer, grads: list[Tensor] = GRADS) -> tuple[Tensor, Tensor]:
    """Return the parameter after all steps, and the only tensor of the rule's state."""
    end, state = steps(optimizer, START, lambda index: grads[index], len(grads))
    return end, state.leaves.stages[-1][0]


def _assert_formula(optimizer: Optimizer, formula: Any, hyper: dict[str, Any]) -> None:
    """Assert that ``formula(start, grads, hyper)`` gives parameter and state of each element."""
    columns = zip(START.tolist(), *(grad.tolist() for grad in GRADS), strict=True)
    ends = [formula(start, grads, hyper) for start, *grads in columns]
    want, average = torch.tensor(ends, dtype=torch.float64).unbind(1)
    end, kept = _run(optimizer)
    torch.testing.assert_close(end - START, want - START, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(kept, average, rtol=1e-12, atol=1e-15)


def test_qhm_is_the_formula() -> None:
    """Equations 3 and 4 of Ma & Yarats give the same numbers."""
    for hyper in pairs(
        momentum=[0.0, 0.5, 0.999],
        nu=[0.0, 0.3, 0.7, 1.0, 1.5],
        weight_decay=[0.0, 0.3],
        weight_decay_type=["grad", "direct"],
        maximize=[False, True],
    ):
        with case(**hyper):
            _assert_formula(qhm(0.1, **hyper), _qhm, hyper)


def _qhm(p: float, grads: list[float], c: dict[str, Any]) -> tuple[float, float]:
    buffer = 0.0
    for one in grads:
        g = -one if c["maximize"] else one
        if c["weight_decay_type"] == "grad":
            g += c["weight_decay"] * p
        else:
            p -= 0.1 * c["weight_decay"] * p
        buffer = c["momentum"] * buffer + (1 - c["momentum"]) * g
        p -= 0.1 * ((1 - c["nu"]) * g + c["nu"] * buffer)
    return p, buffer


def test_lion_is_the_algorithm() -> None:
    """Algorithm 2 of Chen et al. computes update and momentum, both from the old momentum."""
    for hyper in pairs(
        betas=[(0.9, 0.99), (0.0, 0.5), (0.95, 0.0), (0.6, 0.2)],
        weight_decay=[0.0, 0.3],
        maximize=[False, True],
    ):
        with case(**hyper):
            _assert_formula(lion(0.1, **hyper), _lion, hyper)


def _lion(p: float, grads: list[float], c: dict[str, Any]) -> tuple[float, float]:
    (first, second), m = c["betas"], 0.0
    for one in grads:
        g = -one if c["maximize"] else one
        ahead = first * m + (1 - first) * g
        direction = math.copysign(1.0, ahead) if ahead else 0.0
        p = p - 0.1 * (direction + c["weight_decay"] * p)
        m = second * m + (1 - second) * g
    return p, m


def test_lion_moves_every_element_by_lr_or_not_at_all() -> None:
    grad = torch.tensor([1e-30, -5.0, 0.0, 1e30])
    assert_same(step(lion(0.25), torch.zeros(4), grad), torch.tensor([-0.25, 0.25, 0.0, -0.25]))
    assert_same(_run(lion(0.1), [1024.0 * grad for grad in GRADS])[0], _run(lion(0.1))[0])


def test_direct_decay_of_qhm_is_the_decay_of_adamw() -> None:
    zero = torch.zeros_like(START)
    direct = qhm(0.1, weight_decay=0.3, weight_decay_type="direct")
    assert_same(step(direct, START, zero), step(adamw(0.1, weight_decay=0.3), START, zero))
    assert not torch.equal(step(direct, START, zero), START)
    ends = [_run(qhm(0.1, weight_decay=0.3, weight_decay_type=k))[0] for k in ("grad", "direct")]
    assert (ends[0] - ends[1]).abs().min() > 1e-3


def _run_sgd(grads: list[Tensor] = GRADS, **hyper: Any) -> Tensor:
    return steps(sgd(0.1, **hyper), START, lambda index: grads[index], len(grads))[0]


@each_value(momentum=[0.0, 0.9], decay=[0.0, 0.1])
def test_qhm_with_nu_0_or_momentum_0_is_sgd(momentum: float, decay: float) -> None:
    plain = _run_sgd(weight_decay=decay)
    assert_same(_run(qhm(0.1, momentum, 0.0, decay))[0], plain)
    end, _ = _run(qhm(0.1, 0.0, 0.7, decay))
    torch.testing.assert_close(end, plain, rtol=1e-14, atol=1e-15)


@each_value(momentum=[0.5, 0.9])
def test_qhm_with_nu_1_is_momentum_sgd_with_a_damped_first_gradient(momentum: float) -> None:
    """torch does not damp the first gradient in its buffer, so the test damps it."""
    shrunk = [GRADS[0] * (1 - momentum), *GRADS[1:]]
    damped = _run_sgd(shrunk, momentum=momentum, dampening=momentum)
    end, _ = _run(qhm(0.1, momentum, 1.0))
    torch.testing.assert_close(end, damped, rtol=1e-13, atol=1e-14)


def test_qhm_begins_as_its_paper_says() -> None:
    """The state exists before the first step, unlike in the recipe that torch publishes."""
    assert [qhm().hyper[name] for name in ("momentum", "nu", "lr")] == [0.999, 0.7, 1.0]
    state = qhm().init({"a": START, "b": noise(1, 2)})
    for key, size in (("a", 6), ("b", 2)):
        assert_same(state.leaves[key].stages[-1].momentum_buffer, torch.zeros(size).double())
        assert int(state.leaves[key].step) == 0
