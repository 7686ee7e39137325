"""Averages of parameters ignore the parameters of the steps that they do not average."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import Link, chain, lookahead, outer_nesterov, sgd, swa, tail_ema
from tests.cases import ONE_CHAIN

from ..choices import case, one_in
from ..tensors import assert_same

SHAPE = (4, 6)
OVERFLOWS = 3e38
"""A finite number whose difference to its negative is infinite in float32."""


class Average(NamedTuple):
    """Stage that averages the parameters of some steps, and a step that it does not average."""

    link: Link
    skipped: int


SKIPPING = {
    "lookahead": Average(lookahead(3), 2),
    "outer_nesterov": Average(outer_nesterov(3), 2),
    "outer_nesterov later": Average(outer_nesterov(2), 3),
    "swa": Average(swa(1, 3), 2),
    "swa later": Average(swa(2, 2), 3),
}
RESTARTING = {"swa": swa(3, 2), "tail_ema": tail_ema(0.5, 3)}
"""Averages that equal the parameter until step 3."""


def all_elements(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def one_element(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor(1), value)


NON_FINITE = {
    "nan": all_elements(torch.nan),
    "one nan": one_element(torch.nan),
    "infinity": all_elements(-torch.inf),
    "an overflow": all_elements(OVERFLOWS),
}


def problem(count: int) -> tuple[Tensor, list[Tensor]]:
    """Return a parameter and the gradients of some steps."""
    generator = torch.Generator().manual_seed(1)
    param, *grads = (torch.randn(SHAPE, generator=generator) for _ in range(count + 1))
    return param, grads


@pytest.mark.parametrize("name", one_in(4, ONE_CHAIN))
def test_a_skipped_step_leaves_the_average(name: str) -> None:
    """No gradient and no parameter of a step that is not averaged changes the average."""
    for own, average in SKIPPING.items():
        optimizer = chain(ONE_CHAIN[name].factory(), average.link)
        param, grads = problem(average.skipped)
        state = optimizer.init(param)
        for grad in grads[:-1]:
            param, state = optimizer.update(param, grad, state)
        before = state.leaves.stages[-1]
        for what, fill in NON_FINITE.items():
            given: dict[str, Any] = {
                "gradient": (param, fill(grads[-1])),
                "parameter": (fill(param), grads[-1]),
            }
            for which, (now, grad) in given.items():
                with case(average=own, what=what, which=which):
                    _, after = optimizer.update(now, grad, state)
                    assert_same(after.leaves.stages[-1], before)


@pytest.mark.parametrize("name", RESTARTING)
def test_an_average_that_restarts_does_not_read_its_old_value(name: str) -> None:
    """Until step 3 the average is the parameter, also after a step with other parameters."""
    optimizer = chain(sgd(0.1), RESTARTING[name])
    start, grads = problem(3)
    for what, fill in NON_FINITE.items():
        param, state = start, optimizer.init(start)
        for step, grad in enumerate(grads):
            given = fill(param) if step == 1 else param
            new, state = optimizer.update(given, grad, state)
            with case(what=what, step=step):
                assert_same(optimizer.view(new, state), new)
            param = param if step == 1 else new


def test_a_later_average_does_not_read_a_skipped_step() -> None:
    """A run whose skipped step was not finite goes on as a run in which it was finite."""
    for own, average in SKIPPING.items():
        optimizer = chain(sgd(0.1), average.link)
        start, grads = problem(8)
        ends = []
        for fill in (all_elements(0.5), *NON_FINITE.values()):
            param, state = start, optimizer.init(start)
            for step, grad in enumerate(grads, start=1):
                if step == average.skipped:
                    _, state = optimizer.update(fill(param), grad, state)
                else:
                    param, state = optimizer.update(param, grad, state)
            ends.append((param, state))
        with case(average=own):
            for end in ends[1:]:
                assert_same(end, ends[0])
