"""Small leaves that lie apart are brought together, in places that are found once."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import TorchOptimizer, adamw, chain, clip_by_global_norm, lion, sgd
from functional_optim.kernels import scratch
from tests.choices import case, each_value
from tests.steady import NOTHING, made_by
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


@pytest.fixture(autouse=True)
def own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())


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


def test_in_a_steady_step_nothing_is_made() -> None:
    for name in ("adamw", "lion"):
        optimizer = trained([normal(70 + k) for k in range(3)], name)
        for seed in range(3):
            step(optimizer, seed)
        with case(name=name):
            assert made_by(optimizer.step, optimizer.step) == NOTHING


def test_optimizers_take_turns_in_memory_that_grows() -> None:
    """Shared memory that one optimizer outgrows is replaced for all optimizers."""
    sizes = (5, 3, 50, 20, 900)
    ours = [trained([normal(size, seed=k) for k in range(3)], "adamw") for size in sizes]
    wanted: list[Any] = [[normal(size, seed=k) for k in range(3)] for size in sizes]
    states = [adamw(0.1).init(one) for one in wanted]
    for seed in range(3):
        for k, size in enumerate(sizes):
            step(ours[k], seed)
            grads = [normal(size, seed=seed + i) for i in range(3)]
            wanted[k], states[k] = adamw(0.1).update(wanted[k], grads, states[k])
            with case(size=size, seed=seed):
                assert_same([one.detach() for one in ours[k].param_groups[0]["params"]], wanted[k])
    kept = scratch._SCRATCH
    pieces = {one.data_ptr() for one in kept.pieces.values()}
    assert {one.chunk.grad.data_ptr() for one in kept.views.values()} <= pieces


def test_what_is_kept_of_a_pack_goes_with_it() -> None:
    params = [normal(9, seed=k) for k in range(3)]
    memory = [weakref.ref(one.untyped_storage()) for one in params]
    optimizer = trained(params, "adamw")
    step(optimizer, 0)
    step(optimizer, 1)
    assert len(scratch._SCRATCH.views) == 1
    del optimizer, params
    assert len(scratch._SCRATCH.views) == 0
    assert [one() for one in memory] == [None] * 3
