"""Step counts of leaves that step together."""

import pytest
import torch

from functional_optim.native import LOOPS
from functional_optim.plan.python_loops import PYTHON_LOOPS
from functional_optim.plan.step_counts import is_step_count, stack_counts


@pytest.mark.usefixtures("with_loops")
def test_counts_are_read_and_advanced_together_wherever_they_lie() -> None:
    apart = [torch.tensor(k) for k in (3, 3, 3)]
    together = stack_counts(apart)
    whole = torch.full((4,), 3)
    for loops in (LOOPS.loaded, PYTHON_LOOPS):
        for steps in (
            apart,
            together,
            together[::-1],
            together[1:],
            [whole],
            [whole[1:3], whole[:1]],
        ):
            assert loops is not None
            before = loops.common(steps)
            assert before == int(steps[0].reshape(-1)[0])
            loops.advance_each(steps)
            assert loops.common(steps) == before + 1
            whole.fill_(3)
            for one in together:
                one.fill_(3)
        parted = [torch.tensor([3, 3]), torch.tensor([3, 4])]
        assert loops.common(parted) is None
        for odd in (torch.tensor(3.0), torch.tensor([3, 3]).expand(2, 2), torch.ones(4)[::2]):
            assert loops.common([torch.tensor(3), odd]) is False


def test_what_is_a_count() -> None:
    assert is_step_count(torch.tensor(2))
    for other in (2, torch.tensor(2.0), torch.tensor([2]), None):
        assert not is_step_count(other)
