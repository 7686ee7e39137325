"""Memory of steps that read gradients where they are stored."""

from collections.abc import Callable

import torch

from functional_optim import sgd
from functional_optim.optimizer.bound import BoundOptimizer

from ...choices import case
from ..pages import linux, resident

COUNT = 1 << 23
"""Length of tensors that own their pages, and return them to the system when freed."""


@linux
def test_who_gives_gradients_of_their_own_has_none_of_ours_in_memory() -> None:
    """A step that reads gradients where they are stored takes no memory for a gradient buffer."""

    def bound_to(param: torch.Tensor) -> BoundOptimizer:
        param.grad = torch.ones_like(param)
        return sgd(0.5).using(executor="auto").bind([param])

    once = bound_to(torch.ones(COUNT))
    once.step()  # the first step also allocates what all later steps share
    before = resident()
    param = torch.ones(COUNT)
    bound = bound_to(param)
    bound.step()
    held = resident() - before
    # This memory holds the parameter in its buffer, and its gradient.
    assert held < 2.5 * COUNT * 4
    bound.gradients[0].fill_(2.0)
    assert resident() - before > held + COUNT * 4 // 2
    bound.step(bound.gradients)
    assert torch.equal(param, torch.full((COUNT,), -0.5)) and once is not None


@linux
def test_short_gradients_between_long_ones_cost_no_memory_of_the_long_ones() -> None:
    """Copies of short gradients take no memory for the long gradients between them.

    The long gradients take memory in the buffer only when the caller writes to them.
    """
    lengths = [1 << 19 if k % 2 else 512 for k in range(34)]
    uses: dict[str, Callable[[BoundOptimizer], object]] = {
        "gradients": lambda bound: bound.gradients[1].fill_(2.0),
        "zero": lambda bound: bound.layout.zero_gradients(),
    }
    for use, uses_some in uses.items():
        params = [torch.nn.Parameter(torch.ones(length)) for length in lengths]
        for param in params:
            param.grad = torch.ones_like(param)
        bound = sgd(0.1).using(executor="auto").bind(params)
        assert bound.ready()
        before = resident()
        for _ in range(2):
            bound.step()
        with case(use=use):
            assert resident() - before < sum(lengths) * 4 // 2
            assert torch.equal(params[0], torch.ones(512) - 0.1 - 0.1)
            uses_some(bound)
            least = lengths[1] if use == "gradients" else sum(lengths)
            assert resident() - before > least * 4 // 2
