"""How much memory steps take that read gradients where they lie; and which pages."""

import torch

from functional_optim import sgd
from functional_optim.bound import BoundOptimizer
from functional_optim.huge_pages import LEAST_BYTES

from ...choices import case
from ..pages import all_asked, is_asked_for, linux, resident, shown

COUNT = LEAST_BYTES // 4
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


def with_gradients() -> list[torch.nn.Parameter]:
    """Long ones, read where their gradients lie, with short ones between them."""
    lengths = [1 << 19 if k % 2 else 512 for k in range(34)]
    params = [torch.nn.Parameter(torch.ones(length)) for length in lengths]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


@linux
@shown
def test_gradients_are_in_huge_pages_where_all_of_the_buffer_is_used() -> None:
    uses = {
        "step": lambda bound: None,  # by gradients where they lie
        "gradients": lambda bound: bound.gradients,
        "attach": lambda bound: bound.layout.attach_gradients(),
        "zero": lambda bound: bound.layout.zero_gradients(),
    }
    for use, uses_all in uses.items():
        bound = sgd(0.1).using(executor="auto").bind(with_gradients())
        assert bound.ready()
        before = resident()
        bound.step()
        with case(use=use):
            assert resident() - before < LEAST_BYTES // 2  # the short ones alone are in use
            flat = bound.layout.gradient_buffers()[0]
            assert flat.numel() * 4 >= LEAST_BYTES
            uses_all(bound)
            assert all_asked(flat) == (use != "step")
            assert is_asked_for(flat.data_ptr() + LEAST_BYTES // 2) == (use != "step")
