"""Project that uses the installed packages, to be checked by strict type checkers and to be run."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    State,
    TorchOptimizer,
    accumulate,
    adamw,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    cosine,
    describe,
    ema,
    labels,
    matching,
    muon,
    partition,
    register_functional_optim,
    state_field,
    stored,
    to_torch_state_dict,
    warmup,
    with_shape,
)
from hooks import (
    AveragingSchedule,
    OptimizerState,
    PostLocalSGDOptimizer,
    step_hook,
    zero_step_hook,
)
from hooks import PeriodicModelAverager as Averager
from sharding import RangeCopy, ShardPlan, ZeroRedundancyOptimizer, plan, reshard


class Hyper(NamedTuple):
    lr: float


def rule(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return torch.add(param, grad.sign(), alpha=-c.lr), state


SIGN = Rule(name="sign", hyper=Hyper, rule=rule)


def sign_sgd(lr: float = 1e-3) -> Optimizer:
    return chain(SIGN(lr=lr))


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params: list[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})


def composed() -> Optimizer:
    lr = warmup(10, then=cosine(1e-3, steps=90))
    split = labels({"muon": with_shape(ndim=2)}, default="adamw")
    both = partition({"muon": muon(lr=0.02), "adamw": adamw(lr=lr)}, split)
    return chain(accumulate(2), clip_by_global_norm(1.0), both, ema(0.9))


def pure(params: Mapping[str, Tensor]) -> tuple[State, dict[str, object]]:
    optimizer = adamw(lr=1e-2).override(matching("bias"), weight_decay=0.0)
    state: State = optimizer.init(params)
    grads = {name: torch.ones_like(one) for name, one in params.items()}
    _, state = optimizer.update(params, grads, state)
    print(state_field(optimizer, state, "exp_avg"))
    return state, dict(to_torch_state_dict(optimizer, params, state))


def train(model: torch.nn.Module) -> float:
    optimizer = TorchOptimizer(model.named_parameters(), composed())
    loss = torch.zeros(())
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
    with optimizer.averaged(model):
        print(model(torch.ones(4, 8)))
    return loss.item()


def planned(model: torch.nn.Module, folder: Path) -> list[RangeCopy]:
    before: ShardPlan = plan(model, world_size=4, policy="elements", optimizer=adamw())
    after = plan(model, world_size=2, policy="largest_first", optimizer=adamw())
    (folder / "plan.json").write_text(before.to_json())
    return list(reshard(before, after))


def on_ranks(ddp: DistributedDataParallel) -> None:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), adamw(lr=1e-3), overlap_with_ddp=True)
    ddp.register_comm_hook(None, zero_step_hook(ddp, zero))


def averaged(model: torch.nn.Module) -> PostLocalSGDOptimizer:
    schedule = AveragingSchedule(periods=(4,), group_sizes=(None,), warmup=2)
    print(schedule)
    return PostLocalSGDOptimizer(TorchOptimizer(model.parameters(), adamw()), Averager(period=4))


def in_backward(ddp: DistributedDataParallel) -> OptimizerState:
    optimizer = step_hook(ddp, stored(adamw(lr=1e-3), state="int8"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scheduler.step()
    return optimizer


if __name__ == "__main__":
    register_functional_optim(SignSGD, sign_sgd)
    print(as_functional_optim(SignSGD, lr=0.1))
    module = torch.nn.Linear(8, 1)
    print(describe(composed(), dict(module.named_parameters())))
    print(train(module), len(planned(module, Path())), pure({"bias": torch.ones(3)})[0])
