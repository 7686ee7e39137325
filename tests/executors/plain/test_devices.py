"""Leaves on a device that stands for an accelerator: what is kept of them, what is refused."""

import pytest
import torch

from functional_optim import adamw
from functional_optim.core.leaf import Leaf
from functional_optim.kernels.blocked import BlockedKernel
from functional_optim.kernels.cache_key import key_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.scratch import scratch

META = torch.device("meta")


def test_on_a_device_no_scratch_is_kept() -> None:
    """A thread may step in two streams, and one of them may still read it."""
    one, other = (scratch("of a test", 5, torch.float32, META) for _ in range(2))
    assert one._base is None or one._base is not other._base
    host = [scratch("of a test", 5, torch.float32, torch.device("cpu")) for _ in range(2)]
    assert host[0].data_ptr() == host[1].data_ptr()


def test_tensors_on_several_devices_are_no_chunk() -> None:
    """Such as ``stored(..., state_device="cpu")`` gives: a kernel would mix them."""
    optimizer, param = adamw(lr=0.1), torch.ones(3)
    stages = optimizer.stages
    states = tuple(optimizer.init(param).leaves.stages)
    coefficients = tuple(link.stage.coefficients(1.0, link.hyper) for link in optimizer.links)
    together = Leaf(param, param, states, coefficients, "x")
    key_of(stages, together)
    apart = together._replace(param=param.to(META), grad=param.to(META))
    with pytest.raises(UntraceableError, match=r"on several devices \(cpu, meta\)"):
        key_of(stages, apart)
    assert "several devices" in str(BlockedKernel().supports(stages, apart))
