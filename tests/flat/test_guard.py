"""Guards look at tensors by loops in C, and by slower Python where these loops are missing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim.plan import guard
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.guard import LayoutGuard, MemoryGuard

from .support import GUARDS


@pytest.fixture(params=GUARDS, autouse=True)
def torchs_guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run each test with every kind of torch guards: the answers must be the same.

    The tests in tests/flat/compiled run with the package's own loops.
    """
    monkeypatch.setattr(guard, "TensorGuards", GUARDS[request.param])


def made() -> list[Tensor]:
    return [
        torch.zeros(3, 3),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(0),
        torch.ones(()),
    ]


def test_conjugates_and_negatives_are_seen() -> None:
    ours = made()
    alike = LayoutGuard(ours)
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
