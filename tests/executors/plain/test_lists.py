"""Small separate leaves are stepped in lists if no loop is compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, lion, muon, sgd
from functional_optim.kernels import scratch
from tests.choices import case, each_value
from tests.tensors import assert_same, normal

CHAINS = {
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
    "lion": lion(0.1),
}
LAYOUTS: dict[str, Any] = {
    "as they are": lambda one: one,
    "turned": lambda one: one.t().contiguous().t(),
    "with gaps": lambda one: torch.stack([one, one], -1)[..., 0],
}


def trained(params: list[Tensor], name: str) -> TorchOptimizer:
    optimizer = CHAINS[name].using(executor="blocked")
    return TorchOptimizer([torch.nn.Parameter(one) for one in params], optimizer)


def step(optimizer: TorchOptimizer, seed: int, lay: Any = lambda one: one) -> None:
    for k, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = lay(normal(*param.shape, seed=seed + k, dtype=param.dtype))
    optimizer.step()


@each_value(
    name=CHAINS.keys(), params=LAYOUTS, grads=LAYOUTS, dtype=[torch.float32, torch.bfloat16]
)
def test_in_any_layout_steps_are_the_reference_s(
    name: str, params: Any, grads: Any, dtype: torch.dtype
) -> None:
    start = [normal(4, 6, seed=k, dtype=dtype) for k in range(3)]
    own = [one.clone() for one in start]
    ours = trained([own[0], params(own[1]), own[2]], name)
    want, state = start, CHAINS[name].init(start)
    for seed in range(4):
        step(ours, 10 * seed, grads)
        given = [normal(4, 6, seed=10 * seed + k, dtype=dtype) for k in range(3)]
        want, state = CHAINS[name].update(want, given, state)
        got = [one.detach() for one in ours.param_groups[0]["params"]]
        assert_same([one.contiguous() for one in got], want)


def test_small_leaves_are_stepped_by_one_call_for_each_operation() -> None:
    """The number of foreach calls does not depend on the number of leaves."""
    calls = []
    for count in (3, 30):
        optimizer = trained([normal(7 + k, seed=k) for k in range(count)], "adamw")
        step(optimizer, 0)
        step(optimizer, 1)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            optimizer.step()
        names = [event.name for event in seen.events()]
        calls.append(sorted(name for name in names if name.startswith("aten::_foreach")))
    assert calls[0]
    assert calls[0] == calls[1]


def test_optimizers_take_turns_in_memory_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of temporaries that one optimizer outgrows is replaced for all optimizers."""
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())
    sizes, optimizer = (5, 3, 50, 20, 90), muon(0.1)
    reference = optimizer.using(executor="reference")
    ours: list[Any] = [normal(size, 7, seed=size) for size in sizes]
    wanted = [one.clone() for one in ours]
    states = [[optimizer.init(one) for one in ours] for _ in range(2)]
    for seed in range(3):
        for k, size in enumerate(sizes):
            grad = normal(size, 7, seed=seed)
            optimizer.update_(ours[k], grad, states[0][k])
            reference.update_(wanted[k], grad, states[1][k])
            with case(size=size, seed=seed):
                assert_same([ours[k]], [wanted[k]])
    kept = scratch._SCRATCH
    pieces = {one.data_ptr() for one in kept.pieces.values()}
    views = {one.data_ptr() for own in kept.views.values() for one in own if one.numel()}
    assert views
    assert views <= pieces
