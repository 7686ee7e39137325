"""Classes that keep their step count in the parameter group, as many outside of torch do."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from functional_optim import (
    TorchOptimizer,
    adam,
    from_torch,
    functional_optim_map,
    lion,
    register_functional_optim,
    registry,
    stored,
    to_torch_state_dict,
)
from sharding import ZeroRedundancyOptimizer
from sharding.zero.read import read_state_dict

from .support import assert_same_tensors, noise, parameters, same_bits, set_grads


class GroupAdam(torch.optim.Optimizer):
    """Adam, which counts its steps in the group."""

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
    """Adam that counts where nobody looks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.pop("k", 0)
        super().step()
        for group in self.param_groups:
            group["k"] = group.pop("step")


class PlainLion(torch.optim.Optimizer):
    """Lion, in which nothing depends on the step, and nothing counts it."""

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
def registered() -> Iterator[None]:
    before = dict(functional_optim_map)
    register_functional_optim(GroupAdam, adam)
    register_functional_optim(Uncounted, adam)
    register_functional_optim(PlainLion, lion)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stepped(cls: Callable[..., Any], steps: int, without: Any = ()) -> tuple[list[Any], Any]:
    params = parameters(1)
    optimizer = cls(params)
    run(params, optimizer, range(steps), without)
    return params, optimizer


def run(params: list[Any], optimizer: Any, seeds: range, without: Any = ()) -> None:
    for seed in seeds:
        set_grads(params, seed, without)
        optimizer.step()


def continued(params: list[Any], live: Any, others: list[Any], other: Any) -> None:
    """Both make the same next steps."""
    for seed in range(50, 53):
        run(params, live, range(seed, seed + 1))
        run(others, other, range(seed, seed + 1))
        for one, two in zip(others, params, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def copies(params: list[Any]) -> list[Any]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("without", [(), (1,)])
def test_from_torch_takes_the_count_of_the_group(steps: int, without: Any) -> None:
    """Also for a parameter that never had a gradient: in the class it is at that step (fault 3)."""
    _, live = stepped(GroupAdam, steps, without)
    _, _, state = from_torch(live)
    assert {int(leaf.step) for leaf in state.leaves[0].values()} == {steps}


def test_from_torch_makes_the_same_next_steps() -> None:
    """Bias corrections go on from the count of the group (fault 3)."""
    params, live = stepped(GroupAdam, 4, without=(1,))
    optimizer, tree, state = from_torch(live)
    mine = ({name: one.detach().clone() for name, one in tree[0].items()},)
    for seed in range(50, 53):
        run(params, live, range(seed, seed + 1))
        grads = ({name: one.grad for name, one in zip(mine[0], params, strict=True)},)
        mine, state = optimizer.update(mine, grads, state)
        for one, two in zip(mine[0].values(), params, strict=True):
            torch.testing.assert_close(one, two.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_state_dict_with_the_count_in_the_group(steps: int) -> None:
    """TorchOptimizer loads it, and goes on as the class does (fault 3)."""
    params, live = stepped(GroupAdam, steps, without=(1,))
    others = copies(params)
    optimizer = TorchOptimizer(others, adam(0.1))
    optimizer.load_state_dict(live.state_dict())
    assert {int(optimizer.state[one]["step"]) for one in others} == {steps}
    continued(params, live, others, optimizer)


def test_a_stored_chain_loads_it_too() -> None:
    """The count comes along, whatever state is kept as (fault 3)."""
    params, live = stepped(GroupAdam, 4)
    others = copies(params)
    optimizer = TorchOptimizer(others, stored(adam(0.1), state="bfloat16"))
    optimizer.load_state_dict(live.state_dict())
    assert {int(optimizer.state[one]["step"]) for one in others} == {4}


def test_there_and_back() -> None:
    """What is written for such a class has the count in the group again (fault 3)."""
    params, live = stepped(GroupAdam, 4)
    others = copies(params)
    optimizer = TorchOptimizer(others, adam(0.1))
    optimizer.load_state_dict(live.state_dict())
    run(others, optimizer, range(2))
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [6]
    again = copies(others)
    back = GroupAdam(again)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    continued(again, back, others, optimizer)


def test_to_torch_state_dict_counts_in_the_group() -> None:
    """A class that counts there is given the count there (fault 3)."""
    params, live = stepped(GroupAdam, 4)
    made = to_torch_state_dict(*from_torch(live), GroupAdam)
    assert [group["step"] for group in made["param_groups"]] == [4]
    again = copies(params)
    back = GroupAdam(again)
    back.load_state_dict(made)
    continued(params, live, again, back)


def test_parameters_at_different_steps_have_no_common_count() -> None:
    """A class that has one for all cannot go on from them, and it is said (fault 3)."""
    optimizer = adam(0.1)
    params = {"a": noise(0, 3), "b": noise(1, 3)}
    state = optimizer.init(params)
    for grads in ({"a": noise(2, 3), "b": None}, {"a": noise(3, 3), "b": noise(4, 3)}):
        params, state = optimizer.update(params, grads, state)
    with pytest.raises(ValueError, match="one step count for a parameter group.*1, 2"):
        to_torch_state_dict(optimizer, params, state, GroupAdam)


@pytest.mark.parametrize("load", ["from_torch", "TorchOptimizer"])
@pytest.mark.parametrize("count", [None, 0])
def test_filled_state_without_a_count_is_refused(load: str, count: int | None) -> None:
    """Nothing begins anew without a word, and nothing is changed (fault 3)."""
    params, live = stepped(Uncounted, 3)
    if count is not None:
        for param in params:
            live.state[param]["step"] = torch.tensor(float(count))
    told = "its step count is 0" if count == 0 else "it has no step count"
    if load == "from_torch":
        with pytest.raises(ValueError, match=told):
            from_torch(live)
        return
    others = copies(params)
    optimizer = TorchOptimizer(others, adam(0.1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=rf"exp_avg, exp_avg_sq is not what .*{told}.*put the count"
    ):
        optimizer.load_state_dict(live.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entries in before["state"].items():
        assert all(same_bits(after["state"][number][key], value) for key, value in entries.items())


def test_where_nothing_depends_on_the_step_no_count_is_needed() -> None:
    """The buffers are kept, bit for bit (fault 3)."""
    params, live = stepped(PlainLion, 3)
    others = copies(params)
    optimizer = TorchOptimizer(others, lion(0.1))
    state_dict = live.state_dict()
    state_dict["param_groups"][0]["weight_decay"] = 0.0
    state_dict["param_groups"][0]["maximize"] = False
    optimizer.load_state_dict(state_dict)
    run(params, live, range(60, 63))
    run(others, optimizer, range(60, 63))
    assert_same_tensors(others, params)


def zero_of(params: list[Any], made: Any) -> Any:
    named = [(f"p{number}", param) for number, param in enumerate(params)]
    return ZeroRedundancyOptimizer(named, made, lr=0.1)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("made", [GroupAdam, adam], ids=["class", "ours"])
def test_zero_takes_and_writes_the_count_of_the_group(made: Any, tmp_path: Path) -> None:
    """As TorchOptimizer does, into state dicts and out of checkpoints (fault 3)."""
    params, live = stepped(GroupAdam, 4, without=(1,))
    others = copies(params)
    zero = zero_of(others, made)
    zero.load_state_dict(live.state_dict())
    continued(params, live, others, zero)
    zero.consolidate_state_dict()
    zero.save(tmp_path)
    for written in (zero.state_dict(), read_state_dict(tmp_path)):
        assert [group["step"] for group in written["param_groups"]] == [7]


@pytest.mark.usefixtures("world")
def test_zero_refuses_filled_state_without_a_count() -> None:
    """Before anything is changed (fault 3)."""
    params, live = stepped(Uncounted, 3)
    others = copies(params)
    zero = zero_of(others, Uncounted)
    with pytest.raises(ValueError, match="it has no step count"):
        zero.load_state_dict(live.state_dict())
    zero.consolidate_state_dict()
    assert not any(map(len, zero.state_dict()["state"].values()))
