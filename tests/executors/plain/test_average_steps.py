"""Kernels leave an average as it is in steps that it does not average."""

from typing import Any

import pytest
import torch

from functional_optim import chain, sgd
from tests.composition.test_average_steps import NON_FINITE, SKIPPING

from ...choices import case
from ...tensors import assert_same, normal


def steps(bound: Any, count: int, fill: Any) -> tuple[Any, Any]:
    """Return the state of the average before and after the last of some steps.

    ``fill`` makes the last gradient from a finite one.
    """
    for step in range(1, count + 1):
        grads = {name: normal(*one.shape, seed=step) for name, one in bound.params.items()}
        if step == count:
            before = [own.stages[-1] for own in bound.state.leaves.values()]
            before = [type(own)(*map(torch.clone, own)) for own in before]
            grads = {name: fill(one) for name, one in grads.items()}
        bound.step(grads)
    return before, [own.stages[-1] for own in bound.state.leaves.values()]


def check(executor: str, name: str, *, capturable: bool = False) -> None:
    """Check that the last step leaves the average, in flat buffers."""
    average = SKIPPING[name]
    optimizer = chain(sgd(0.1), average.link).using(executor=executor)
    for what, fill in NON_FINITE.items():
        params = {"large": normal(30, 40), "small": normal(7)[:, None]}
        bound = optimizer.bind(params, capturable=capturable)
        with case(executor=executor, what=what):
            assert_same(*steps(bound, average.skipped, fill))


@pytest.mark.parametrize("name", SKIPPING)
def test_a_skipped_step_leaves_the_average_in_buffers(
    executors: tuple[str, ...], name: str
) -> None:
    for executor in executors:
        check(executor, name)


@pytest.mark.parametrize("name", [one for one in SKIPPING if one != "lookahead"])
def test_scalars_on_the_device_leave_the_average(name: str) -> None:
    """A captured step is one program, so it selects by a scalar. lookahead decides by a flag."""
    check("reference", name, capturable=True)
