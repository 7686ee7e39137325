"""Step counts of leaves that step together."""

import torch

from functional_optim.plan.counts import Counts, beside, is_count


def test_counts_are_read_and_advanced_together_wherever_they_lie() -> None:
    apart = [torch.tensor(k) for k in (3, 3, 3)]
    together = beside(apart)
    turned = together[::-1]
    for steps in (apart, together, turned, together[1:]):
        counts = Counts(steps)
        assert counts.common() == int(steps[0])
        counts.advance()
        assert len({int(one) for one in steps}) == 1
    assert [int(one) for one in together] == [5, 6, 6]
    assert Counts(together).common() is None


def test_what_is_a_count() -> None:
    assert is_count(torch.tensor(2))
    for other in (2, torch.tensor(2.0), torch.tensor([2]), None):
        assert not is_count(other)
