"""How much memory steps take that read gradients where they lie."""

import torch

from functional_optim import sgd
from functional_optim.bound import BoundOptimizer

from ..pages import linux, resident

COUNT = 1 << 23
"""Of tensors that have pages of their own, and give them back."""


@linux
def test_who_gives_gradients_of_their_own_has_none_of_ours_in_memory() -> None:
    """But of short ones between long ones: those are copied."""

    def bound_to(param: torch.Tensor) -> BoundOptimizer:
        param.grad = torch.ones_like(param)
        return sgd(0.5).using(executor="auto").bind([param])

    once = bound_to(torch.ones(COUNT))
    once.step()  # what is needed once
    before = resident()
    param = torch.ones(COUNT)
    bound = bound_to(param)
    bound.step()
    held = resident() - before
    # The parameter, copied into its buffer, and its gradient.
    assert held < 2.5 * COUNT * 4
    bound.gradients[0].fill_(2.0)
    assert resident() - before > held + COUNT * 4 // 2
    bound.step(bound.gradients)
    assert torch.equal(param, torch.full((COUNT,), -0.5)) and once is not None
