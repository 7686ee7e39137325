"""Leaves on a simulated accelerator: scratch memory, choice of kernels, and refusals."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_optim import Optimizer, adam, adamw
from functional_optim.core.leaf import Leaf
from functional_optim.core.overrides import LeafChain
from functional_optim.core.state import LeafState
from functional_optim.frontends.recipe import recipe_of
from functional_optim.kernels import EXECUTORS, KernelExecutor
from functional_optim.kernels.cache_key import key_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.foreach import ForeachKernel
from functional_optim.kernels.fused_kernel import FusedKernel
from functional_optim.kernels.scratch import scratch
from functional_optim.plan.step_leaves import StepLeaf, StepLeaves

META = torch.device("meta")


def test_on_a_device_no_scratch_is_kept() -> None:
    """Scratch is not reused on a device, because another stream can still read it."""
    one, other = (scratch("of a test", 5, torch.float32, META) for _ in range(2))
    assert one._base is None or one._base is not other._base
    host = [scratch("of a test", 5, torch.float32, torch.device("cpu")) for _ in range(2)]
    assert host[0].data_ptr() == host[1].data_ptr()


def test_tensors_on_several_devices_are_no_chunk() -> None:
    """A kernel refuses state on another device, as with ``stored(..., state_device="cpu")``."""
    optimizer, param = adamw(lr=0.1), torch.ones(3)
    stages = optimizer.stages
    states = tuple(optimizer.init(param).leaves.stages)
    coefficients = tuple(link.stage.coefficients(1.0, link.hyper) for link in optimizer.links)
    together = Leaf(param, param, states, coefficients, "x")
    key_of(stages, together)
    apart = together._replace(param=param.to(META), grad=param.to(META))
    with pytest.raises(UntraceableError, match=r"on several devices \(cpu, meta\)"):
        key_of(stages, apart)
    assert "several devices" in str(ForeachKernel().supports(stages, apart))


def _on_cuda(optimizer: Optimizer, dtype: torch.dtype = torch.bfloat16) -> Leaf:
    """Return a fake leaf on CUDA, which has a shape and a dtype but no values."""
    with FakeTensorMode():
        param = torch.empty(70_001, dtype=dtype, device="cuda")
        state = optimizer.init(param).leaves.stages
    coefficients = tuple(link.stage.coefficients(1.0, link.hyper) for link in optimizer.links)
    hypers = tuple(link.hyper for link in optimizer.links)
    return Leaf(param, param, tuple(state), coefficients, "x", hypers, 1.0)


def test_auto_rounds_as_the_reference_on_every_device() -> None:
    """On CUDA, ``auto`` uses only kernels that round as the reference does.

    Torch's fused kernels and compiled programs round differently.
    """
    leaf, auto = _on_cuda(adamw(lr=0.1)), EXECUTORS["auto"]
    assert isinstance(auto, KernelExecutor)
    asked = [type(one) for one in auto.kernels if one.is_for(leaf)]
    lists = [type(one) for one in auto._list_kernels if one.is_for(leaf)]
    assert (asked, lists) == ([ForeachKernel], [ForeachKernel])


def test_the_executor_is_that_of_the_devices_when_no_gradient_has_come_yet() -> None:
    optimizer = adamw(lr=0.1)
    leaf = _on_cuda(optimizer)
    param, state = leaf.param, LeafState(torch.zeros(()), leaf.states)
    items = [
        StepLeaf(
            0,
            param,
            state,
            LeafChain(tuple(range(len(optimizer.stages))), optimizer.stages, ()),
            "x",
        )
    ]
    for grad in (None, param):
        leaves = StepLeaves.of(optimizer.links, items, [grad], shares=False)
        assert leaves.executor(optimizer) is EXECUTORS["auto"]


@pytest.mark.parametrize(
    ("options", "on_cuda"),
    [({}, "auto"), ({"fused": True}, "prefer_fused"), ({"foreach": True}, "auto")],
)
def test_an_option_of_a_torch_class_chooses_the_executor(
    options: dict[str, Any], on_cuda: str
) -> None:
    recipe = recipe_of(torch.optim.AdamW, options)
    assert recipe is not None
    made = []
    for device in ("cuda", "cpu"):
        with FakeTensorMode():  # no device is needed
            params = [torch.empty(1, device=device)]
        made.append(recipe.reader(params).chain(recipe.defaults).executor)
    assert made == [on_cuda, "auto"]


@pytest.mark.parametrize(
    ("dtype", "decay", "takes"),
    [
        (torch.float32, 0.1, True),
        (torch.bfloat16, 0.0, True),
        (torch.bfloat16, 0.1, False),
        (torch.float16, 0.0, False),
    ],
)
def test_prefer_fused_takes_what_fused_refuses_by_lists(
    dtype: torch.dtype, decay: float, takes: bool
) -> None:
    """``prefer_fused`` refuses nothing: lists step leaves that the fused kernel does not take."""
    optimizer = adam(lr=0.1, weight_decay=decay)
    leaf, executor = _on_cuda(optimizer, dtype), EXECUTORS["prefer_fused"]
    assert isinstance(executor, KernelExecutor) and not executor.strict
    asked = [one for one in executor._list_kernels if one.is_for(leaf)]
    assert list(map(type, asked)) == [FusedKernel, ForeachKernel]
    fused = executor.kernels[0]
    assert (fused.supports(optimizer.stages, leaf) is None) == takes
