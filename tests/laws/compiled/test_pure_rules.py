"""The law "pure" checks the rule itself, whatever executor runs the rule."""

from dataclasses import replace

import pytest
from torch import Tensor

from functional_optim import Optimizer, chain
from functional_optim.algorithms.adam import ADAM, AdamCoefficients, AdamState, adam_rule
from functional_optim.testing import LawBroken, check_optimizer


def writes_its_state(
    param: Tensor, grad: Tensor, state: AdamState, c: AdamCoefficients
) -> tuple[Tensor, AdamState]:
    new_param, new_state = adam_rule(param, grad, state, c)
    state.exp_avg.lerp_(grad, c.weight_1)
    return new_param, new_state._replace(exp_avg=state.exp_avg)


WRITING = replace(ADAM, name="writing", rule=writes_its_state)


def writing() -> Optimizer:
    return chain(WRITING(lr=0.1, betas=(0.9, 0.999), eps=1e-8, amsgrad=False))


def test_a_write_that_a_compiled_loop_hides_is_found() -> None:
    """The law finds that a rule writes to its arguments, though its compiled loop does not."""
    with pytest.raises(LawBroken, match="update wrote to one of its inputs"):
        check_optimizer(writing, laws=["pure"])
