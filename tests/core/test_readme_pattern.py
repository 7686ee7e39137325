"""State that ``init`` makes while autograd records, and that later steps change in place."""

import copy
from typing import Any

import pytest
import torch

from functional_optim import (
    accumulate,
    chain,
    ema,
    lookahead,
    sam,
    schedule_free_sgd,
    sgd,
)
from functional_optim.testing.inputs import fed
from tests.cases import CASES, CHAINS, INPUT_CASES
from tests.choices import each_value

from .stages import BALL
from .support import assert_same

TABLE = {**CASES, **CHAINS, **INPUT_CASES}


def model_of(name: str) -> dict[str, Any]:
    """Return parameters that require gradients: only matrices, if the optimizer needs them."""
    shapes = [(4, 3), (3, 2)] if TABLE[name].subject().matrices else [(4, 3), (3,)]
    generator = torch.Generator().manual_seed(31)
    return {
        place: torch.nn.Parameter(torch.randn(*shape, generator=generator))
        for place, shape in zip("ab", shapes, strict=True)
    }


@pytest.mark.parametrize("name", TABLE)
def test_readme_s_first_pattern(name: str) -> None:
    """Fault 31: ``init`` runs outside of ``no_grad``, and ``update_`` under ``no_grad``."""
    params = model_of(name)
    optimizer = fed(TABLE[name].factory())
    state = optimizer.init(params)
    with torch.no_grad():
        want = {place: one.detach().clone() for place, one in params.items()}
        kept = optimizer.init(want)
        for step in range(4):
            grads = {place: torch.full_like(one, 0.1 * step + 0.1) for place, one in want.items()}
            optimizer.update_(params, grads, state)
            want, kept = optimizer.update(want, grads, kept)
    assert_same((dict(params), state), (want, kept))
    copy.deepcopy(state)  # deepcopy refuses a tensor with a history


ANCHORED = chain(BALL(lr=0.1, decay=0.9, slow=True))
"""Optimizer whose state holds a copy of the parameter."""


@each_value(
    optimizer=[
        chain(sgd(0.1), lookahead(2)),
        chain(accumulate(2), schedule_free_sgd(0.1)),
        chain(sam(0.1), sgd(0.1), ema(0.9)),
        ANCHORED,
    ],
    dtype=[torch.float32, torch.complex64],
)
def test_wrappers_and_complex_parameters(optimizer: Any, dtype: torch.dtype) -> None:
    """Fault 31: state behind gates, and state of complex parameters, step in place, too."""
    param = torch.ones(3, dtype=dtype, requires_grad=True)
    state = optimizer.init(param)
    want, kept = param.detach().clone(), optimizer.init(param.detach())
    for _ in range(5):
        grad = torch.full((3,), 0.5, dtype=dtype)
        optimizer.update_(param, grad, state)
        want, kept = optimizer.update(want, grad, kept)
    assert_same((param, state), (want, kept))


def test_what_a_refused_step_leaves() -> None:
    """A refused step keeps the history, and so the derivative through ``init``."""
    param = torch.ones(3, requires_grad=True)
    state = ANCHORED.init(param)
    with pytest.raises(ValueError, match="has shape"):
        ANCHORED.update_(param, torch.ones(2), state)
    after, _ = ANCHORED.update(param, torch.ones(3), state)
    (found,) = torch.autograd.grad(after.sum(), param)
    assert_same(found, torch.ones(3))


def test_a_state_that_has_been_stepped_under_autograd_is_refused() -> None:
    """The gate holds the step back, so the step count is still zero."""
    optimizer = chain(accumulate(2), ANCHORED)
    param = torch.ones(3, requires_grad=True)
    grad = torch.ones(3, requires_grad=True) * 2.0
    _, state = optimizer.update(param, grad, optimizer.init(param))
    assert int(state.leaves.step) == 0
    with pytest.raises(ValueError, match="is not a leaf of autograd"):
        optimizer.update_(param, torch.ones(3), state)
