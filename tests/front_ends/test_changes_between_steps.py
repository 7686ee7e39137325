"""Callers change parameters, state, options and groups between steps, and later steps use that."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from functional_optim import (
    TorchOptimizer,
    adagrad,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    lion,
    sgd,
    stored,
)
from tests.choices import each, examples

from .support import (
    assert_same_params,
    assert_same_tensors,
    parameters,
    params_of,
    run,
    same_bits,
    twins,
    values_of,
)

Torchs = torch.optim.Optimizer


def other_memory(one: Torchs, param: Tensor) -> None:
    param.data = param.data.clone()


def other_values(one: Torchs, param: Tensor) -> None:
    param.data.mul_(2.0)


def other_tensors(one: Torchs, param: Tensor) -> None:
    entries = one.state.get(param, {})
    entries.update({key: value.clone() for key, value in entries.items()})


def tensors_elsewhere(one: Torchs, param: Tensor) -> None:
    for value in one.state.get(param, {}).values():
        value.data = value.data.clone()


def state_in_place(one: Torchs, param: Tensor) -> None:
    for key, value in one.state.get(param, {}).items():
        if key != "step":
            value.copy_(value.flip(0) if value.dim() else value)


def no_state(one: Torchs, param: Tensor) -> None:
    one.state.pop(param, None)


def no_state_at_all(one: Torchs, param: Tensor) -> None:
    one.state.clear()


def back_to_the_first_step(one: Torchs, param: Tensor) -> None:
    entries = one.state.get(param, {})
    if entries and entries["step"] != 0:  # the next step creates missing state
        entries["step"].zero_()


def another_count(one: Torchs, param: Tensor) -> None:
    entries = one.state.get(param, {})
    if entries and entries["step"] != 0:
        entries["step"].fill_(3)


def other_order(one: Torchs, param: Tensor) -> None:
    one.param_groups[0]["params"].reverse()


CHANGES = [
    other_memory,
    other_values,
    other_tensors,
    tensors_elsewhere,
    state_in_place,
    no_state,
    no_state_at_all,
    back_to_the_first_step,
    another_count,
]


def another_dtype(one: Torchs, _: Tensor) -> None:
    for param in params_of(one):
        param.data = param.data.double()
        entries = one.state[param]
        one.state[param] = {k: v if k == "step" else v.double() for k, v in entries.items()}


def amsgrad_where_nothing_is_known(one: Torchs, _: Tensor) -> None:
    one.state.clear()
    one.param_groups[0]["amsgrad"] = True


@each(change=[*CHANGES, other_order, another_dtype, amsgrad_where_nothing_is_known])
def test_later_steps_are_those_of_torch_s_class(change: Callable[[Torchs, Tensor], None]) -> None:
    """After each change, parameters and state have the bits of torch's class."""
    pair = twins("AdamW")
    pair.step(0, 1, 2)
    pair.each(lambda one: change(one, params_of(one)[1]))
    for seed in (3, 4):
        pair.step(seed)
        pair.assert_same()


def test_entries_that_do_not_fit_are_an_error_that_changes_nothing() -> None:
    """The error names the parameter, and the optimizer steps again once the entry fits."""
    optimizer = TorchOptimizer(parameters(), adamw(lr=0.1))
    run(optimizer, 0)
    param = params_of(optimizer)[0]
    optimizer.state[param]["exp_avg"] = torch.zeros(5)
    before = values_of(optimizer)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\[0\].*shape \(5,\)"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)
    optimizer.state[param]["exp_avg"] = torch.zeros_like(param)
    optimizer.step()


def test_the_state_before_a_load_is_freed() -> None:
    """Nothing holds the old state after a load, and the run goes on as that of torch's class."""
    pair = twins("AdamW")
    pair.step(0)
    saved = copy.deepcopy(pair.theirs.state_dict())
    pair.step(1)
    old = weakref.ref(pair.ours.state[params_of(pair.ours)[0]]["exp_avg"])
    pair.each(lambda one: one.load_state_dict(saved))
    gc.collect()
    assert old() is None
    pair.step(2)
    pair.assert_same()


def test_a_group_without_parameters() -> None:
    """An optimizer with no parameter makes steps, and a group that is added later is stepped."""
    optimizer = TorchOptimizer([{"params": []}], adamw(lr=0.1))
    optimizer.step()
    optimizer.add_param_group({"params": parameters(1)})
    run(optimizer, 0)
    assert [int(entries["step"]) for entries in optimizer.state.values()] == [1, 1, 1, 1]


CHAINS = {
    "adamw": adamw(lr=0.1),
    "adam": adam(lr=0.1, amsgrad=True),
    "sgd": sgd(lr=0.1, momentum=0.9),
    "adagrad": adagrad(lr=0.1, initial_accumulator_value=0.2),
    "clipped": chain(clip_by_global_norm(0.5), lion(lr=0.1)),
    "stored": stored(adamw(lr=0.1), state="int8"),
}

places = st.integers(0, 20)


class WithAndWithoutPlans(RuleBasedStateMachine):
    """State machine that applies the same changes to two optimizers.

    The first one steps by its plans. The second one deletes its plans before each step.
    """

    pair: Any = ()
    """Both optimizers: none before the first rule."""
    saved: Any = None
    steps = 0

    @initialize(
        name=st.sampled_from(sorted(CHAINS)),
        executor=st.sampled_from(["reference", "blocked"]),
        split=st.integers(0, 3),
    )
    def construct(self, name: str, executor: Any, split: int) -> None:
        optimizer = CHAINS[name].using(executor=executor)
        made = []
        for _ in range(2):
            params = parameters()
            groups = [{"params": params[:split], "lr": 0.01}, {"params": params[split:]}]
            made.append(TorchOptimizer(groups, optimizer))
        self.pair = tuple(made)

    @rule(without=st.sets(places, max_size=4), times=st.integers(1, 3))
    def step(self, without: set[int], times: int) -> None:
        for seed in range(self.steps, self.steps + times):
            self.pair[1]._steps.forget()
            for one in self.pair:
                run(one, seed, without=without)
        self.steps += times

    @rule(lr=st.sampled_from([0.0, 0.02, 0.3]), number=st.integers(0, 1))
    def another_lr(self, lr: float, number: int) -> None:
        for one in self.pair:
            one.param_groups[number]["lr"] = lr

    @rule()
    def another_group(self) -> None:
        if len(self.pair[0].param_groups) < 4:
            for one in self.pair:
                one.add_param_group({"params": parameters(2, shapes=[(5,), (2, 2)])})

    @rule(place=places, change=st.sampled_from(CHANGES))
    def change(self, place: int, change: Callable[[Torchs, Tensor], None]) -> None:
        for one in self.pair:
            params = params_of(one)
            change(one, params[place % len(params)])

    @rule()
    def save(self) -> None:
        self.saved = [copy.deepcopy(one.state_dict()) for one in self.pair]

    @rule()
    def load(self) -> None:
        """Load into each optimizer the state dict of the other."""
        if self.saved is not None:
            sizes = [len(group["params"]) for group in self.saved[0]["param_groups"]]
            if sizes == [len(group["params"]) for group in self.pair[0].param_groups]:
                for one, saved in zip(self.pair, reversed(self.saved), strict=True):
                    one.load_state_dict(saved)

    @rule()
    def copied(self) -> None:
        self.pair = tuple(map(copy.deepcopy, self.pair))

    @rule()
    def moved_between_groups(self) -> None:
        for one in self.pair:
            first, second, *_ = one.param_groups
            if second["params"]:
                first["params"].append(second["params"].pop())

    @invariant()
    def they_are_alike(self) -> None:
        if not self.pair:
            return
        assert_same_params(*self.pair)
        one, two = self.pair
        for first, second in zip(params_of(one), params_of(two), strict=True):
            mine, its = one.state.get(first, {}), two.state.get(second, {})
            assert mine.keys() == its.keys()
            for key, value in mine.items():
                assert same_bits(value, its[key]), key


TestWithAndWithoutPlans = WithAndWithoutPlans.TestCase
TestWithAndWithoutPlans.settings = examples(12, stateful_step_count=25)
