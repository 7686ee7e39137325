"""Step hook with composed optimizers, equal bit for bit to the optimizer itself."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hooks import OptimizerState, step_hook
from tests.choices import case
from tests.composition.trees import COMPOSED
from tests.tensors import assert_same, normal

pytestmark = pytest.mark.usefixtures("world_of_one")


class Model(nn.Sequential):
    """Model whose parameters have the names that composed optimizers select."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.head = nn.Linear(6, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        with torch.no_grad():
            for k, param in enumerate(self.parameters()):
                param.copy_(normal(*param.shape, seed=k))

    def forward(self, batch: Any) -> Any:
        return self.scale * self.head(self.body(batch)).square().mean()


def losses(step: int) -> Any:
    return normal(3, 5, seed=50 + step)


@pytest.mark.parametrize("name", COMPOSED)
def test_it_is_the_optimizer_itself(name: str) -> None:
    """The step hook equals the optimizer, with several small buckets and with one."""
    for megabytes, executor in ((1e-5, "reference"), (25.0, "auto")):
        with case(megabytes=megabytes, executor=executor):
            ddp = DistributedDataParallel(Model(), bucket_cap_mb=megabytes)
            state = step_hook(ddp, COMPOSED[name](), executor=executor)
            plain, optimizer = Model(), COMPOSED[name]()
            pairs = [(one, p.detach().clone()) for one, p in plain.named_parameters()]
            params: Any = OrderedDict(pairs)  # sums are in this order, as in the hook
            own = optimizer.init(params)
            for step in range(6):
                ddp(losses(step)).backward()
                ddp.zero_grad()
                leaves = {one: p.clone().requires_grad_() for one, p in params.items()}
                loss = torch.func.functional_call(plain, leaves, (losses(step),))
                found = torch.autograd.grad(loss, list(leaves.values()))
                grads = OrderedDict(zip(leaves, found, strict=True))
                params, own = optimizer.update(params, grads, own)
                assert_same({n: p.detach() for n, p in ddp.module.named_parameters()}, dict(params))
            assert_same(state.state, own._replace(leaves=dict(own.leaves)))


def test_it_goes_on_from_a_state() -> None:
    ddp = DistributedDataParallel(Model())
    state = OptimizerState(COMPOSED["accumulate"](), ddp)
    for step in range(3):
        grads = [normal(*one.shape, seed=step + k) for k, one in enumerate(state.params.values())]
        state.step_some(list(state.params), grads)
    there = copy.deepcopy(state.state)
    again = OptimizerState(COMPOSED["accumulate"](), ddp, state=copy.deepcopy(there))
    assert_same(again.state, there)
    with pytest.raises(ValueError, match=r"state\.shared must hold"):
        OptimizerState(COMPOSED["finite"](), ddp, state=there)
