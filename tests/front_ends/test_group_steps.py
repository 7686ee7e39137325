"""Classes with their step count in the parameter group, like many classes outside of torch."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from functional_optim import (
    TorchOptimizer,
    adam,
    from_torch,
    lion,
    register_functional_optim,
    stored,
    to_torch_state_dict,
)
from sharding import ZeroRedundancyOptimizer
from tests.choices import each

from .runs import Functional
from .support import Params, assert_same_tensors, noise, parameters, set_grads


class GroupAdam(torch.optim.Optimizer):
    """Adam that counts its steps in the group."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "amsgrad": amsgrad, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                rate = group["lr"] / (1 - beta1 ** group["step"])
                root = (1 - beta2 ** group["step"]) ** 0.5
                denominator = (state["exp_avg_sq"].sqrt() / root).add_(group["eps"])
                param.addcdiv_(state["exp_avg"], denominator, value=-rate)


class Uncounted(GroupAdam):
    """Adam with its step count under a name that no front-end reads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.pop("k", 0)
        super().step()
        for group in self.param_groups:
            group["k"] = group.pop("step")


class PlainLion(torch.optim.Optimizer):
    """Lion, whose step depends on no step count, so that it has none."""

    def __init__(self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (one for one in group["params"] if one.grad is not None):
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                beta1, beta2 = group["betas"]
                param.sub_(state["exp_avg"].lerp(param.grad, 1 - beta1).sign(), alpha=group["lr"])
                state["exp_avg"].lerp_(param.grad, 1 - beta2)


@pytest.fixture(autouse=True)
def registered(registry_as_it_was: None) -> None:
    register_functional_optim(GroupAdam, adam)
    register_functional_optim(Uncounted, adam)
    register_functional_optim(PlainLion, lion)


def run(params: Params, optimizer: Any, *seeds: int, without: Any = ()) -> None:
    for seed in seeds:
        set_grads(params, seed, without)
        optimizer.step()


def stepped(cls: Callable[..., Any], steps: int, without: Any = ()) -> tuple[Params, Any]:
    params = parameters()
    optimizer = cls(params)
    run(params, optimizer, *range(steps), without=without)
    return params, optimizer


def copies(params: Params) -> Params:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def assert_close(got: Sequence[Any], want: Sequence[Any]) -> None:
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-6, atol=1e-6)


def continued(params: Params, live: Any, others: Params, other: Any) -> None:
    """Check that both optimizers make the same next steps."""
    for seed in range(50, 53):
        run(params, live, seed)
        run(others, other, seed)
        assert_close(others, params)


def loaded(params: Params, state_dict: Any, optimizer: Any = None) -> tuple[Params, TorchOptimizer]:
    """Return copies of the parameters, and a TorchOptimizer over them that loaded the state."""
    others = copies(params)
    made = TorchOptimizer(others, optimizer or adam(0.1))
    made.load_state_dict(state_dict)
    return others, made


@each(steps=[0, 1, 4], without=[(), (1,)])
def test_from_torch_takes_the_count_of_the_group(steps: int, without: Any) -> None:
    """Every parameter gets the group's step count, even if it never had a gradient."""
    params, live = stepped(GroupAdam, steps, without)
    made = Functional(live)
    assert {int(leaf.step) for leaf in made.state.leaves[0].values()} == {steps}
    for seed in range(50, 53):
        run(params, live, seed)
        made.step(seed)
        assert_close(made.params, params)


@each(steps=[0, 1, 4])
def test_there_and_back(steps: int) -> None:
    """TorchOptimizer loads the group's step count, continues the run, and writes the count back."""
    params, live = stepped(GroupAdam, steps, without=(1,))
    others, optimizer = loaded(params, live.state_dict())
    assert {int(optimizer.state[one]["step"]) for one in others} == {steps}
    continued(params, live, others, optimizer)
    if steps:
        written = optimizer.state_dict()
        assert [group["step"] for group in written["param_groups"]] == [steps + 3]
        again = copies(others)
        back = GroupAdam(again)
        back.load_state_dict(copy.deepcopy(written))
        continued(again, back, others, optimizer)


def test_a_stored_chain_loads_it_too() -> None:
    """A chain with stored state loads the group's step count."""
    params, live = stepped(GroupAdam, 4)
    chain = stored(adam(0.1), state="bfloat16")
    others, optimizer = loaded(params, live.state_dict(), chain)
    assert {int(optimizer.state[one]["step"]) for one in others} == {4}


def test_to_torch_state_dict_counts_in_the_group() -> None:
    params, live = stepped(GroupAdam, 4)
    made = to_torch_state_dict(*from_torch(live), GroupAdam)
    assert [group["step"] for group in made["param_groups"]] == [4]
    again = copies(params)
    back = GroupAdam(again)
    back.load_state_dict(made)
    continued(params, live, again, back)


def test_parameters_at_different_steps_have_no_common_count() -> None:
    """A class with one count per group cannot continue from different counts, so it is refused."""
    optimizer = adam(0.1)
    params = {"a": noise(0, 3), "b": noise(1, 3)}
    state = optimizer.init(params)
    for grads in ({"a": noise(2, 3), "b": None}, {"a": noise(3, 3), "b": noise(4, 3)}):
        params, state = optimizer.update(params, grads, state)
    with pytest.raises(ValueError, match="one step count for a parameter group.*1, 2"):
        to_torch_state_dict(optimizer, params, state, GroupAdam)


@each(count=[None, 0])
def test_filled_state_without_a_count_is_refused(count: int | None) -> None:
    """State without a step count raises an error, and the optimizer does not change."""
    params, live = stepped(Uncounted, 3)
    if count is not None:
        for param in params:
            live.state[param]["step"] = torch.tensor(float(count))
    told = "its step count is 0" if count == 0 else "it has no step count"
    with pytest.raises(ValueError, match=told):
        from_torch(live)
    optimizer = TorchOptimizer(copies(params), adam(0.1))
    before = repr(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"exp_avg, exp_avg_sq is not what .*{told}.*put the"):
        optimizer.load_state_dict(live.state_dict())
    assert repr(optimizer.state_dict()) == before


def test_where_nothing_depends_on_the_step_no_count_is_needed() -> None:
    """The buffers are kept, bit for bit."""
    params, live = stepped(PlainLion, 3)
    state_dict = live.state_dict()
    state_dict["param_groups"][0].update(weight_decay=0.0, maximize=False)
    others, optimizer = loaded(params, state_dict, lion(0.1))
    run(params, live, 60, 61)
    run(others, optimizer, 60, 61)
    assert_same_tensors(others, params)


def zero_of(params: Params, made: Any) -> Any:
    named = [(f"p{number}", param) for number, param in enumerate(params)]
    return ZeroRedundancyOptimizer(named, made, lr=0.1)


@pytest.mark.usefixtures("world_of_one")
@each(made=[GroupAdam, adam])
def test_zero_takes_and_writes_the_count_of_the_group(made: Any) -> None:
    params, live = stepped(GroupAdam, 4, without=(1,))
    others = copies(params)
    zero = zero_of(others, made)
    zero.load_state_dict(live.state_dict())
    continued(params, live, others, zero)
    zero.consolidate_state_dict()
    assert [group["step"] for group in zero.state_dict()["param_groups"]] == [7]


@pytest.mark.usefixtures("world_of_one")
def test_zero_refuses_filled_state_without_a_count() -> None:
    """ZeRO refuses the state dict before it changes any state."""
    params, live = stepped(Uncounted, 3)
    zero = zero_of(copies(params), Uncounted)
    with pytest.raises(ValueError, match="it has no step count"):
        zero.load_state_dict(live.state_dict())
    zero.consolidate_state_dict()
    assert not any(map(len, zero.state_dict()["state"].values()))
