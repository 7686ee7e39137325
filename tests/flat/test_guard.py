"""Guards look at tensors by loops in C, and by slower Python where these loops are missing."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.list_layout import MemoryGuard


def made() -> list[Tensor]:
    return [
        torch.zeros(3, 3),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(0),
        torch.ones(()),
    ]


def test_conjugates_and_negatives_are_seen() -> None:
    ours = made()
    alike = MemoryGuard(ours).layout.hold
    assert alike(made())
    turned = ours[1].conj()
    assert turned.is_conj()
    assert not alike([ours[0], turned, *ours[2:]])
    negative = torch.zeros(3, 3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert not alike([negative.as_strided((3, 3), (3, 1)), *ours[1:]])


def test_who_requires_grad_and_of_what_class_does_not_matter() -> None:
    ours = made()
    there = MemoryGuard(ours)
    params = [Parameter(one) for one in ours]
    for _ in range(3):
        assert there.hold(params)
        for param in params:
            param.requires_grad_(not param.requires_grad)
    with torch.no_grad(), torch.device("meta"):
        assert there.hold(params)


def test_tensors_with_gaps_and_without_memory_are_guarded_too() -> None:
    """Such tensors have no pointers for a kernel, so Python compares them."""
    for ours in ([torch.zeros(2, 6)[:, ::2]], [torch.ones(2, device="meta"), torch.ones(3)]):
        there = MemoryGuard(ours)
        for _ in range(2):
            assert there.hold(list(map(Tensor.detach, ours)))
            assert not there.hold([*ours[:-1], ours[-1].clone()])


def test_views_may_share_memory_but_a_parameter_may_not_become_a_result() -> None:
    flat = torch.zeros(4)
    params = [Parameter(flat[:2].clone()), Parameter(flat[2:].clone())]
    there = MemoryGuard([*params, params[0].detach()], leaves=1)
    assert there.hold([*params, params[0].detach()])
    for place, held in ((1, True), (0, False)):
        params[place].requires_grad_(requires_grad=False)
        params[place].mul_(torch.ones(2, requires_grad=True))
        assert there.hold([*params, params[0].detach()]) is held


def test_memory_that_a_buffer_leaves_stays_with_its_parameters() -> None:
    """Parameters keep their memory if ``share_memory_`` moves the buffer; ``check`` reports it."""
    param = Parameter(torch.ones(2))
    layout = FlatLayout([param, Parameter(torch.ones(3))], ["a", "b"])
    before = param.data_ptr()
    layout.buffers[0].data.share_memory_()
    assert param.data_ptr() == before and param.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=r"flat buffer 0 .* was given other memory"):
        layout.check()
    with pytest.raises(RuntimeError, match="not resizable"):
        param.untyped_storage().resize_(0)
