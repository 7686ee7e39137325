"""Parameters that replace others in ``param_groups``, as tensor parallelism does."""

import copy
from typing import Any

import pytest
from torch import nn

from functional_optim import TorchOptimizer, accumulate, adamw, chain, freeze, sgd
from tests.choices import each

from ..tensors import assert_same, normal

SEVERAL = {
    "adamw": adamw(0.1),
    "accumulate": chain(accumulate(2), adamw(0.1)),
    "composed": chain(freeze(("bias",)), sgd(0.1, momentum=0.9)),
}


def params_of(seed: int) -> dict[str, nn.Parameter]:
    shapes = {"weight": (2, 3), "bias": (2,)}
    return {
        k: nn.Parameter(normal(*one, seed=seed + i)) for i, (k, one) in enumerate(shapes.items())
    }


def step(params: dict[str, nn.Parameter], optimizer: Any, seed: int) -> None:
    for k, param in enumerate(params.values()):
        param.grad = normal(*param.shape, seed=seed + k)
    optimizer.step()


def replace(optimizer: TorchOptimizer, old: Any, new: Any) -> None:
    found = {id(old[name]): new[name] for name in old}
    for group in optimizer.param_groups:
        group["params"] = [found[id(param)] for param in group["params"]]


def replaced(name: str) -> tuple[dict[str, nn.Parameter], TorchOptimizer]:
    before, after = params_of(0), params_of(10)
    optimizer = TorchOptimizer(before.items(), SEVERAL[name])
    replace(optimizer, before, after)
    return after, optimizer


@each(name=SEVERAL, steps=[0, 1, 3])
def test_replaced_before_the_first_step(name: str, steps: int) -> None:
    """Fault 19: the optimizer saves and steps like one made from the new parameters."""
    params, optimizer = replaced(name)
    wanted = params_of(10)
    other = TorchOptimizer(wanted.items(), SEVERAL[name])
    for seed in range(steps):
        step(params, optimizer, seed)
        step(wanted, other, seed)
    assert_same(optimizer.state_dict()["state"], other.state_dict()["state"])
    assert set(optimizer.state) <= set(params.values())
    for seed in range(20, 23):
        step(params, optimizer, seed)
        step(wanted, other, seed)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = TorchOptimizer(params.items(), SEVERAL[name])
        optimizer.load_state_dict(saved)
    assert_same([p.detach() for p in params.values()], [p.detach() for p in wanted.values()])


@each(name=SEVERAL)
def test_replaced_after_a_step(name: str) -> None:
    """Fault 19: the error tells how to move the state, and a run continues after that."""
    before, after = params_of(0), params_of(10)
    optimizer = TorchOptimizer(before.items(), SEVERAL[name])
    step(before, optimizer, 0)
    replace(optimizer, before, after)
    with pytest.raises(ValueError, match=r"optimizer.state\[new\] = optimizer.state.pop\(old\)"):
        optimizer.state_dict()
    for key, old in before.items():
        if old in optimizer.state:
            optimizer.state[after[key]] = optimizer.state.pop(old)
    saved = optimizer.state_dict()
    assert all(int(one.get("step", 1)) in (0, 1) for one in saved["state"].values())
    step(after, optimizer, 1)


def test_a_parameter_that_was_dropped_needs_no_state() -> None:
    """Fault 19: a parameter removed from its group has no entry in the state dict."""
    params = params_of(0)
    optimizer = TorchOptimizer(params.values(), adamw(0.1))
    del optimizer.param_groups[0]["params"][1]
    assert list(optimizer.state_dict()["state"]) == [0]
