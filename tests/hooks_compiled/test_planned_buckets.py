"""OptimizerState keeps a plan for each bucket: the numbers of update, and nothing planned anew."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw
from functional_optim.executors import auto
from functional_optim.plan import StepPlan
from hooks import OptimizerState
from tests.ddp.models import Tower


@pytest.mark.usefixtures("world_of_one")
def test_buckets_in_turn_have_a_plan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one parameter is stepped more often, and the learning rate is always another."""
    monkeypatch.setattr(auto, "WORTH_COMPILING", 1)
    planned: list[tuple[str, ...]] = []
    before = StepPlan.__init__

    def counted(self: StepPlan, stages: Any, executor: Any, items: Any, groups: Any) -> None:
        planned.append(tuple(item.name for item in items))
        before(self, stages, executor, items, groups)

    monkeypatch.setattr(StepPlan, "__init__", counted)
    optimizer = adamw(lr=0.1)
    state = OptimizerState(optimizer, DistributedDataParallel(Tower()))
    names = sorted(state.params)
    buckets = [names[:3], names[3:]]
    params: Any = {name: one.detach().clone() for name, one in state.params.items()}
    plain = optimizer.init(params)

    def stepped(bucket: list[str], seed: int, lr: float) -> None:
        nonlocal params, plain
        generator = torch.Generator().manual_seed(seed)
        grads: dict[str, Tensor | None] = {
            name: torch.randn(one.shape, generator=generator) if name in bucket else None
            for name, one in params.items()
        }
        state.set_hyper(lr=lr)
        state.step(bucket, [one for name in bucket if (one := grads[name]) is not None])
        params, plain = optimizer.update(params, grads, plain, lr=lr)

    for seed in range(6):
        for bucket in buckets:
            stepped(bucket, seed, 0.1 / (seed + 1))
    assert planned == [tuple(bucket) for bucket in buckets]
    stepped(names[:1], 6, 0.1)
    stepped(buckets[0], 7, 0.1)
    for name in names:
        assert torch.equal(state.params[name], params[name]), name
