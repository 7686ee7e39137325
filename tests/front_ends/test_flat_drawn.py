"""Whatever is done between steps: flat parameters are those that lie apart, to the last bit."""

import copy
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from functional_optim import TorchOptimizer as Ours
from functional_optim import adagrad, adam, adamw, chain, clip_by_global_norm, lion, sgd, stored
from tests.choices import examples

from .support import noise, parameters, params_of, same_bits

CHAINS = {
    "adamw": adamw(lr=0.1),
    "adam": adam(lr=0.1, amsgrad=True),
    "sgd": sgd(lr=0.1, momentum=0.9),
    "adagrad": adagrad(lr=0.1, initial_accumulator_value=0.2),
    "clipped": chain(clip_by_global_norm(0.5), lion(lr=0.1)),
    "stored": stored(adamw(lr=0.1), state="int8"),
}

places = st.integers(0, 20)


class FlatAndApart(RuleBasedStateMachine):
    """Two optimizers to which the same is done."""

    executor: Any = "reference"
    pair: tuple[Ours, ...] = ()
    saved: Any = None
    steps = 0

    @initialize(name=st.sampled_from(sorted(CHAINS)), split=st.integers(0, 3))
    def construct(self, name: str, split: int) -> None:
        takes = name != "stored" or self.executor != "script"  # TorchScript takes no methods
        optimizer = CHAINS[name].using(executor=self.executor if takes else "blocked")
        self.pair = tuple(
            Ours(
                [{"params": params[:split], "lr": 0.01}, {"params": params[split:]}],
                optimizer,
                flat=flat,
            )
            for flat in (True, False)
            for params in [parameters(1)]
        )

    @rule(without=st.sets(places, max_size=4))
    def step(self, without: set[int]) -> None:
        self.steps += 1
        for one in self.pair:
            for i, param in enumerate(params_of(one)):
                grad = noise(1000 * self.steps + i, *param.shape)
                param.grad = None if i in without else grad
            one.step()

    @rule(lr=st.sampled_from([0.0, 0.02, 0.3]), number=st.integers(0, 1))
    def another_lr(self, lr: float, number: int) -> None:
        for one in self.pair:
            one.param_groups[number]["lr"] = lr

    @rule()
    def another_group(self) -> None:
        if len(self.pair[0].param_groups) < 4:
            for one in self.pair:
                one.add_param_group({"params": parameters(2, shapes=[(5,), (2, 2)])})

    @rule(place=places)
    def another_place(self, place: int) -> None:
        self.each(place, lambda one, param: setattr(param, "data", param.data.clone()))

    @rule(place=places)
    def other_values(self, place: int) -> None:
        def double(one: Ours, param: Tensor) -> None:
            with torch.no_grad():
                param.mul_(2.0)

        self.each(place, double)

    @rule(place=places, count=st.sampled_from([0, 3]))
    def another_count(self, place: int, count: int) -> None:
        both = [(one, params_of(one)) for one in self.pair]
        entries = [one.state.get(params[place % len(params)]) for one, params in both]
        if all(one and one["step"] != 0 for one in entries):  # otherwise it is made anew
            for one in entries:
                one["step"].fill_(count)

    @rule(place=places)
    def no_state(self, place: int) -> None:
        self.each(place, lambda one, param: one.state.pop(param, None))

    @rule(place=places)
    def another_tensor(self, place: int) -> None:
        def replace(one: Ours, param: Tensor) -> None:
            entries = one.state.get(param, {})
            for key, value in entries.items():
                entries[key] = value.clone()

        self.each(place, replace)

    @rule()
    def save(self) -> None:
        self.saved = [copy.deepcopy(one.state_dict()) for one in self.pair]

    @rule()
    def load(self) -> None:
        if self.saved is not None:
            sizes = [len(group["params"]) for group in self.saved[0]["param_groups"]]
            if sizes != [len(group["params"]) for group in self.pair[0].param_groups]:
                return
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

    def each(self, place: int, change: Any) -> None:
        for one in self.pair:
            params = params_of(one)
            change(one, params[place % len(params)])

    @invariant()
    def they_are_alike(self) -> None:
        if not self.pair:
            return
        flat, apart = self.pair
        for one, other in zip(params_of(flat), params_of(apart), strict=True):
            assert same_bits(one, other)
            mine, its = flat.state.get(one, {}), apart.state.get(other, {})
            if mine.get("step", 0) == 0 and its.get("step", 0) == 0:
                continue  # made anew in the first step, if not before
            assert mine.keys() == its.keys()
            for key, value in mine.items():
                assert same_bits(value, its[key]), key


TestFlatAndApart = FlatAndApart.TestCase
TestFlatAndApart.settings = examples(20, stateful_step_count=25)
