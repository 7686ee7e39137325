"""Flags that a parameter group lacks count as off, as in checkpoints of other classes."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    Rule,
    TorchOptimizer,
    adamw,
    chain,
    from_torch,
    maximized,
    muon,
    register_functional_optim,
    to_torch_state_dict,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from tests.choices import case


class Hyper(NamedTuple):
    lr: float
    momentum: float


class State(NamedTuple):
    buffer: Tensor


def heavy_rule(param: Tensor, grad: Tensor, state: State, c: Hyper) -> tuple[Tensor, State]:
    buffer = state.buffer * c.momentum + grad
    return param - buffer * c.lr, State(buffer)


def heavy_init(param: Tensor, hyper: Hyper) -> State:
    return State(torch.zeros_like(param))


HEAVY = Rule(name="heavy", hyper=Hyper, state=State, init=heavy_init, rule=heavy_rule)


def heavy(lr: float = 0.1, momentum: float = 0.9, *, maximize: bool = False) -> Optimizer:
    return chain(maximized(maximize), HEAVY(lr=lr, momentum=momentum))


class Heavy(torch.optim.Optimizer):
    """Class without ``maximize``."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                own = self.state[param]
                if not own:
                    own["step"], own["buffer"] = torch.zeros(()), torch.zeros_like(param)
                own["step"] += 1
                own["buffer"].mul_(group["momentum"]).add_(param.grad)
                param.sub_(own["buffer"] * group["lr"])


def stepped(make: Callable[[list[Tensor]], Any]) -> tuple[Tensor, Any]:
    """Return a parameter and its optimizer after one step."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = make([param])
    step(param, optimizer)
    return param, optimizer


def step(param: Tensor, optimizer: Any) -> None:
    param.grad = torch.tensor([1.0, -2.0])
    optimizer.step()


def without(state_dict: dict[str, Any], flag: str = "maximize") -> dict[str, Any]:
    groups = [{k: v for k, v in one.items() if k != flag} for one in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def test_checkpoints_of_a_class_without_maximize_go_both_ways() -> None:
    """Fault 24: a class without ``maximize`` exchanges state with a chain that has the flag."""
    param, live = stepped(Heavy)
    saved = copy.deepcopy(live.state_dict())
    for _ in range(2):
        step(param, live)
    for maximize in (False, True):
        other, _ = stepped(lambda params: TorchOptimizer(params, heavy()))
        again = TorchOptimizer([other], heavy(maximize=maximize))
        again.load_state_dict(saved)
        assert again.param_groups[0]["maximize"] is False
        step(other, again)
        back = Heavy([other])
        back.load_state_dict(again.state_dict())
        step(other, back)
        assert torch.equal(param, other)


def test_state_dicts_are_written_for_a_class_without_maximize() -> None:
    """Fault 24: the written dict has no ``maximize``, and ``maximize=True`` is refused."""
    register_functional_optim(Heavy, heavy)
    param, live = stepped(Heavy)
    optimizer, params, state = from_torch(live)
    written = to_torch_state_dict(optimizer, params, state, Heavy)
    assert "maximize" not in written["param_groups"][0]
    Heavy([param]).load_state_dict(written)
    with pytest.raises(ValueError, match="the class has no maximize"):
        to_torch_state_dict(heavy(maximize=True), params, state, Heavy)


def test_checkpoints_older_than_a_flag_are_loaded() -> None:
    """Fault 24: a missing flag is loaded as off, as torch.optim does, even if the flag was on."""
    old = without(stepped(torch.optim.AdamW)[1].state_dict())
    for maximize in (False, True):
        with case(maximize=maximize):
            param = torch.nn.Parameter(torch.ones(2))
            torchs = torch.optim.AdamW([param], maximize=maximize)
            torchs.load_state_dict(old)
            assert torchs.param_groups[0]["maximize"] is False
            ours = TorchOptimizer([param], adamw(maximize=maximize))
            ours.load_state_dict(old)
            assert ours.param_groups[0]["maximize"] is False
            local = local_optimizer(adamw(maximize=maximize), [param])
            local.load_state_dict(old)
            assert local.param_groups[0]["maximize"] is False
            remote = DistributedOptimizer.over_threads(
                adamw, {"w": param}, {"w": "a"}, maximize=maximize
            )
            remote.load_state_dict(old)
            assert remote.param_groups[0]["maximize"] is False
            remote.close()


def test_a_flag_that_decides_something_here_is_not_turned_off() -> None:
    """Fault 24: a missing flag is refused if it is on here and adds state, such as ``amsgrad``."""
    optimizer = TorchOptimizer([torch.ones(2)], adamw(amsgrad=True))
    with pytest.raises(ValueError, match="has no amsgrad"):
        optimizer.load_state_dict(without(optimizer.state_dict(), "amsgrad"))
    plain = TorchOptimizer([torch.ones(2)], adamw())
    plain.load_state_dict(without(plain.state_dict(), "amsgrad"))
    assert plain.param_groups[0]["amsgrad"] is False


def test_ascent_is_not_lost() -> None:
    """Fault 24: an optimizer without ``maximize`` refuses a checkpoint with ``maximize=True``."""
    optimizer = TorchOptimizer([torch.ones(2, 2)], muon())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["maximize"] = True
    with pytest.raises(ValueError, match=r"maximize=True.*maximized\(\)"):
        optimizer.load_state_dict(saved)
