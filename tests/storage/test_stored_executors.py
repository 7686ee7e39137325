"""Executors run a stored rule as they run any: over blocks, and in flat buffers, to the bit."""

import pytest
import torch

from functional_optim.stage import grain_of
from functional_optim.storage import stored

from .support import BASES, CHOICES, assert_same, dtype_of, normal, steps


@pytest.mark.parametrize("name", CHOICES)
def test_blocked_is_reference(name: str) -> None:
    base, arguments = CHOICES[name]
    optimizer, dtype = stored(BASES[base](), **arguments), dtype_of(arguments)
    grain = grain_of(optimizer.stages)
    large = [(70_001,), (20, 30)] if grain == 1 else []
    shapes = [*large, (256,), (12, 20), (), (0, 2), (3,)]
    params = [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    grads = [
        [normal(*shape, seed=100 * step + i).to(dtype) for i, shape in enumerate(shapes)]
        for step in range(3)
    ]
    got, state = steps(optimizer.using(executor="blocked"), params, grads)
    want, wanted = steps(optimizer, params, grads)
    assert_same((got, state), (want, wanted))
    assert not torch.equal(want[0], params[0])
