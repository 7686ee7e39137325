"""Lion against its paper's algorithm, computed here in Python numbers."""

import math
from typing import Any

import pytest
import torch

from functional_optim import lion

from .support import assert_same, noise, steps

GRADS = [noise(index + 1, 6) for index in range(6)]


def _sign(value: float) -> float:
    return math.copysign(1.0, value) if value else 0.0


def _formula(lr: float, betas: tuple[float, float], decay: float, sign: float) -> Any:
    """Chen et al., algorithm 2: the update, then the momentum, each from the old momentum."""
    ends, averages = [], []
    for index, start in enumerate(noise(0, 6).tolist()):
        p, m = start, 0.0
        for grad in GRADS:
            g = sign * grad[index].item()
            direction = _sign(betas[0] * m + (1 - betas[0]) * g)
            p = p - lr * (direction + decay * p)
            m = betas[1] * m + (1 - betas[1]) * g
        ends.append(p)
        averages.append(m)
    return tuple(torch.tensor(values, dtype=torch.float64) for values in (ends, averages))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.5), (0.95, 0.0), (0.6, 0.2)])
def test_it_is_the_algorithm(betas: tuple[float, float], decay: float, maximize: bool) -> None:
    wanted, average = _formula(0.1, betas, decay, -1.0 if maximize else 1.0)
    optimizer = lion(0.1, betas, decay, maximize=maximize)
    end, state = steps(optimizer, noise(0, 6), lambda index: GRADS[index], len(GRADS))
    start = noise(0, 6)
    torch.testing.assert_close(end - start, wanted - start, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(state.leaves.stages[-1].exp_avg, average, rtol=1e-12, atol=1e-15)


def test_every_element_moves_by_lr_or_not_at_all() -> None:
    param, grad = torch.zeros(4), torch.tensor([1e-30, -5.0, 0.0, 1e30])
    new, _ = lion(0.25).update(param, grad, lion().init(param))
    assert_same(new, torch.tensor([-0.25, 0.25, 0.0, -0.25]))


def test_the_direction_looks_ahead_of_the_momentum() -> None:
    """A gradient that outweighs the momentum turns the step before it turns the momentum."""
    optimizer = lion(1.0, (0.9, 0.99))
    param = torch.zeros(1)
    _, state = optimizer.update(param, torch.ones(1), optimizer.init(param))
    new, state = optimizer.update(param, torch.tensor([-0.5]), state)
    assert new.item() == 1.0  # 0.9 * 0.01 - 0.1 * 0.5 < 0
    assert state.leaves.stages[-1].exp_avg.item() == pytest.approx(0.99 * 0.01 - 0.01 * 0.5)


def test_scaling_every_gradient_changes_no_step() -> None:
    plain, _ = steps(lion(0.1), noise(0, 6), lambda index: GRADS[index])
    scaled, _ = steps(lion(0.1), noise(0, 6), lambda index: 1024.0 * GRADS[index])
    assert_same(scaled, plain)
