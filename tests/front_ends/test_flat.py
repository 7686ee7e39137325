"""Flat parameters: their memory, changes between steps, and what a change rebuilds."""

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

from functional_optim import TorchOptimizer as Ours
from functional_optim import (
    adagrad,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    lion,
    matching,
    sgd,
    stored,
)
from functional_optim.core.buffer_memory import buffer_of
from functional_optim.plan import engine
from functional_optim.plan.flat.layout import FlatLayout
from tests.choices import each, examples

from .support import (
    assert_same_params,
    assert_same_tensors,
    parameters,
    params_of,
    run,
    same_bits,
    set_grads,
    values_of,
)

CHAIN = adamw(lr=0.1, weight_decay=0.2)

Pair = tuple[Ours, Ours]


def both(optimizer: Any = CHAIN) -> Pair:
    """Return a flat and an ordinary optimizer, over parameters with equal values."""
    return Ours(parameters(), optimizer, flat=True), Ours(parameters(), optimizer)


def step(pair: Pair, *seeds: int) -> None:
    """Make steps of both optimizers, and check that they stay equal."""
    for seed in seeds:
        for one in pair:
            run(one, seed)
        assert_alike(pair)


def assert_alike(pair: Pair) -> None:
    flat, apart = pair
    assert_same_params(flat, apart)
    for one, other in zip(params_of(flat), params_of(apart), strict=True):
        mine, its = flat.state.get(one, {}), apart.state.get(other, {})
        if mine.get("step", 0) == 0 and its.get("step", 0) == 0:
            continue  # the first step creates this state, if it does not exist yet
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            assert same_bits(value, its[key]), key


def in_one_buffer(tensors: list[Tensor]) -> bool:
    buffers = [buffer_of(tensor) for tensor in tensors]
    whole = [one if own is None else own for one, own in zip(tensors, buffers, strict=True)]
    return len({one.untyped_storage().data_ptr() for one in whole}) == 1


def layouts_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each new layout."""
    made: list[int] = []
    construct = FlatLayout.__init__

    def counted(self: FlatLayout, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        construct(self, *args, **kwargs)

    monkeypatch.setattr(FlatLayout, "__init__", counted)
    return made


def test_parameters_and_state_lie_in_one_buffer_for_each_group() -> None:
    given = parameters(1)
    optimizer = Ours([{"params": given[:2]}, {"params": given[2:], "lr": 0.5}], CHAIN, flat=True)
    assert all(a is b for a, b in zip(params_of(optimizer), given, strict=True))
    for members in (given[:2], given[2:]):
        assert in_one_buffer(members)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert in_one_buffer([optimizer.state[param][key] for param in members])
    assert not in_one_buffer(given)
    assert optimizer.layout is not None
    assert [len(buffer.segments) for buffer in optimizer.layout.buffers] == [2, 2]
    assert Ours(parameters(1), CHAIN).layout is None


def test_no_parameter_is_stepped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = both()
    step(pair, 0)
    steps: list[Any] = []
    prepared = engine.prepare

    def noted(*given: Any, **options: Any) -> Any:
        steps.append(given)
        return prepared(*given, **options)

    monkeypatch.setattr(engine, "prepare", noted)
    for optimizer, is_new in zip(pair, (False, True), strict=True):
        if is_new:
            del optimizer.param_groups[0]["params"][0]  # a new list has no plan
        set_grads(params_of(optimizer), 1)
        optimizer.step()
        assert not steps


@each(optimizer=[CHAIN, chain(clip_by_global_norm(0.1), CHAIN)])
def test_schedules_bind_nothing_anew(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = both(optimizer)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in pair]
    made = layouts_made(monkeypatch)
    for seed in range(3):
        step(pair, seed)
        for schedule in schedules:
            schedule.step()
    assert made == []


def other_memory(one: Ours, param: Tensor) -> None:
    param.data = param.data.clone()


def other_values(one: Ours, param: Tensor) -> None:
    param.data.mul_(2.0)


def other_tensors(one: Ours, param: Tensor) -> None:
    entries = one.state.get(param, {})
    entries.update({key: value.clone() for key, value in entries.items()})


def tensors_elsewhere(one: Ours, param: Tensor) -> None:
    for value in one.state.get(param, {}).values():
        value.data = value.data.clone()


def state_in_place(one: Ours, param: Tensor) -> None:
    for key, value in one.state.get(param, {}).items():
        if key != "step":
            value.copy_(value.flip(0) if value.dim() else value)


def no_state(one: Ours, param: Tensor) -> None:
    one.state.pop(param, None)


def no_state_at_all(one: Ours, param: Tensor) -> None:
    one.state.clear()


def back_to_the_first_step(one: Ours, param: Tensor) -> None:
    entries = one.state.get(param, {})
    if entries and entries["step"] != 0:  # the next step creates missing state
        entries["step"].zero_()


def another_count(one: Ours, param: Tensor) -> None:
    entries = one.state.get(param, {})
    if entries and entries["step"] != 0:
        entries["step"].fill_(3)


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


def another_dtype(one: Ours, _: Tensor) -> None:
    for param in params_of(one):
        param.data = param.data.double()
        entries = one.state[param]
        one.state[param] = {k: v if k == "step" else v.double() for k, v in entries.items()}


def amsgrad_where_nothing_is_known(one: Ours, _: Tensor) -> None:
    one.state.clear()
    one.param_groups[0]["amsgrad"] = True


@each(change=[*CHANGES, another_dtype, amsgrad_where_nothing_is_known])
def test_what_is_changed_between_steps_counts(change: Callable[[Ours, Tensor], None]) -> None:
    pair = both()
    step(pair, 0, 1, 2)
    for one in pair:
        change(one, params_of(one)[1])
    step(pair, 3, 4)
    assert in_one_buffer(params_of(pair[0]))


@each(by_name=[("weight",), matching("*weight")])
def test_an_override_by_name_is_one_of_flat_parameters_too(by_name: Any) -> None:
    """Fault 16: an override looked for parameter names among numbers."""
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = adamw(lr=0.1).override(by_name, lr=0.5)
    made = [
        Ours(model.named_parameters(), optimizer, flat=flat)
        for model, flat in zip(models, (True, False), strict=True)
    ]
    for seed in range(3):
        for model, one in zip(models, made, strict=True):
            for param in model.parameters():
                generator = torch.Generator().manual_seed(seed)
                param.grad = torch.randn(param.shape, generator=generator)
            one.step()
    assert_same_tensors(*(list(model.parameters()) for model in models))
    assert [group["lr"] for group in made[0].param_groups] == [0.5, 0.1]
    with pytest.raises(
        ValueError, match="matches no parameter; the parameters are 'weight', 'bias'"
    ):
        Ours(models[0].named_parameters(), adamw().override(("wieght",), lr=0.5), flat=True)


def test_entries_that_do_not_fit_are_an_error_that_changes_nothing() -> None:
    flat, _ = pair = both()
    step(pair, 0)
    param = params_of(flat)[0]
    flat.state[param]["exp_avg"] = torch.zeros(5)
    before = values_of(flat)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\[0\].*shape \(5,\)"):
        flat.step()
    assert_same_tensors(params_of(flat), before)
    flat.state[param]["exp_avg"] = torch.zeros_like(param)
    flat.step()


def test_what_is_loaded_replaces_the_state_of_before() -> None:
    pair = both()
    step(pair, 0)
    saved = copy.deepcopy(pair[1].state_dict())
    step(pair, 1)
    old = weakref.ref(pair[0].state[params_of(pair[0])[0]]["exp_avg"])
    for one in pair:
        one.load_state_dict(saved)
    gc.collect()
    assert old() is None
    assert in_one_buffer([pair[0].state[param]["exp_avg"] for param in params_of(pair[0])])
    step(pair, 2)


def test_a_load_that_fails_binds_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = both()
    step(pair, 0)
    saved = copy.deepcopy(pair[1].state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(5)
    made = layouts_made(monkeypatch)
    for one in pair:
        with pytest.raises(ValueError, match="shape"):
            one.load_state_dict(saved)
    step(pair, 1)
    assert made == []


def test_a_group_without_parameters() -> None:
    optimizer = Ours([{"params": []}], CHAIN, flat=True)
    optimizer.step()
    assert optimizer.layout is None
    assert optimizer.ready()
    optimizer.add_param_group({"params": parameters(1)})
    run(optimizer, 0)
    assert [int(entries["step"]) for entries in optimizer.state.values()] == [1, 1, 1, 1]


@pytest.mark.usefixtures("without_loops")
def test_it_says_what_it_does_and_when_it_is_ready() -> None:
    flat, apart = both(sgd(lr=0.1).using(executor="blocked"))
    assert "param_groups[0][" in flat.explain()
    assert flat.ready()
    assert apart.explain()
    with pytest.raises(RuntimeError, match="flat=True"):
        apart.ready()


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
    """State machine that applies the same changes to a flat and an ordinary optimizer."""

    executor: Any = "reference"
    pair: Any = ()
    saved: Any = None
    steps = 0

    @initialize(name=st.sampled_from(sorted(CHAINS)), split=st.integers(0, 3))
    def construct(self, name: str, split: int) -> None:
        optimizer = CHAINS[name].using(executor=self.executor)
        made = []
        for flat in (True, False):
            params = parameters()
            groups = [{"params": params[:split], "lr": 0.01}, {"params": params[split:]}]
            made.append(Ours(groups, optimizer, flat=flat))
        self.pair = tuple(made)

    @rule(without=st.sets(places, max_size=4), times=st.integers(1, 3))
    def step(self, without: set[int], times: int) -> None:
        self.steps += times
        for one in self.pair:
            run(one, *range(self.steps - times, self.steps), without=without)

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
    def change(self, place: int, change: Callable[[Ours, Tensor], None]) -> None:
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
        if self.pair:
            assert_alike(self.pair)


TestFlatAndApart = FlatAndApart.TestCase
TestFlatAndApart.settings = examples(12, stateful_step_count=25)
