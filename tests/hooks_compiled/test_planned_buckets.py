"""Plans of OptimizerState: one for each bucket, with the numbers of ``update``."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import Optimizer, adamw, sgd
from functional_optim.plan import StepPlan
from hooks import OptimizerState
from tests.ddp.models import Tower
from tests.steady import NOTHING, made_by


@pytest.mark.usefixtures("world_of_one")
def test_buckets_in_turn_have_a_plan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket has one plan, although one parameter steps more often and the rate changes."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    planned: list[tuple[str, ...]] = []
    before = StepPlan.__init__

    def counted(
        self: StepPlan, stages: Any, by: Any, groups: Any, rows: Any, *a: Any, **k: Any
    ) -> None:
        planned.append(tuple(row.name for row in rows))
        before(self, stages, by, groups, rows, *a, **k)

    monkeypatch.setattr(StepPlan, "__init__", counted)
    optimizer = adamw(lr=0.1)
    reference = optimizer.using(executor="reference")
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
        state.step_some(bucket, [one for name in bucket if (one := grads[name]) is not None])
        params, plain = reference.update(params, grads, plain, lr=lr)

    for seed in range(6):
        for bucket in buckets:
            stepped(bucket, seed, 0.1 / (seed + 1))
    assert planned == [tuple(bucket) for bucket in buckets]
    stepped(names[:1], 6, 0.1)
    stepped(buckets[0], 7, 0.1)
    for name in names:
        assert torch.equal(state.params[name], params[name]), name


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("optimizer", [adamw(lr=0.1), sgd(lr=0.1, momentum=0.9)])
def test_twelve_buckets_in_turn_make_nothing_once_all_is_found_out(
    optimizer: Optimizer, with_loops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step makes no plan, no program, and no memory; a large model has as many buckets."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    model = nn.ModuleList([nn.Linear(7, 5 + k) for k in range(12)])
    state = OptimizerState(optimizer, DistributedDataParallel(model))
    buckets = [[f"{k}.bias", f"{k}.weight"] for k in reversed(range(12))]
    grads = {name: torch.full_like(one, 0.5).detach() for name, one in state.params.items()}

    def iteration(seed: int) -> None:
        state.set_hyper(lr=0.1 / (seed + 1))
        for bucket in buckets:
            state.step_some(bucket, [grads[name] for name in bucket])

    for seed in range(3):
        iteration(seed)
    assert made_by(*(partial(iteration, seed) for seed in range(3, 6))) == NOTHING
