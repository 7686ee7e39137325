"""The law "pure" checks the rule itself, whatever executor runs the rule."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, chain
from functional_optim.algorithms.adam import ADAM, AdamCoefficients, AdamState, adam_rule
from functional_optim.kernels.errors import NotPureError
from functional_optim.testing import (
    LAWS,
    LawBroken,
    LeafSpec,
    Run,
    Subject,
    Values,
    check_optimizer,
)


def writes_its_state(
    param: Tensor, grad: Tensor, state: AdamState, c: AdamCoefficients
) -> tuple[Tensor, AdamState]:
    new_param, new_state = adam_rule(param, grad, state, c)
    state.exp_avg.lerp_(grad, c.weight_1)
    return new_param, new_state._replace(exp_avg=state.exp_avg)


WRITING = replace(ADAM, name="writing", rule=writes_its_state)


def writing() -> Optimizer:
    return chain(WRITING(lr=0.1, betas=(0.9, 0.999), eps=1e-8, amsgrad=False))


def test_a_rule_that_writes_to_its_arguments_is_found() -> None:
    with pytest.raises(LawBroken, match="update wrote to one of its inputs"):
        check_optimizer(writing, laws=["pure"])


def test_a_write_is_found_where_a_compiled_loop_would_hide_it(
    with_loops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step raises, also if a compiled loop makes every step, and the law finds the write."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    leaf, grad = LeafSpec((3,), "contiguous", Values((1.0, 2.0, 3.0))), Values((1.0, -1.0, 2.0))
    run = Run((), torch.float32, (leaf,), ((grad,), (grad,)))
    optimizer, params = writing(), run.params()
    state = optimizer.init(params)
    before = state.leaves["a"].stages[0].exp_avg.clone()
    with pytest.raises(NotPureError, match="wrote to the state exp_avg"):
        optimizer.update(params, run.grads()[0], state)
    assert torch.equal(state.leaves["a"].stages[0].exp_avg, before)
    with pytest.raises(AssertionError, match="wrote to one of its inputs"):
        LAWS["pure"].check(Subject(writing), run)
