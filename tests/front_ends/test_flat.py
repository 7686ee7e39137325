"""Flat parameters: where they lie, what is noticed between steps, and what is made anew then."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, engine, sgd
from functional_optim import TorchOptimizer as Ours
from functional_optim.flat_layout import FlatLayout
from tests.choices import each

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


def both(optimizer: Optimizer = CHAIN, groups: Callable[[Any], Any] = list) -> tuple[Ours, Ours]:
    """Flat and apart, over parameters of the same values."""
    return (
        Ours(groups(parameters(1)), optimizer, flat=True),
        Ours(groups(parameters(1)), optimizer),
    )


def step(pair: tuple[Ours, Ours], seed: int) -> None:
    for one in pair:
        run(one, seed)


def assert_alike(pair: tuple[Ours, Ours]) -> None:
    flat, apart = pair
    assert_same_params(flat, apart)
    for one, other in zip(params_of(flat), params_of(apart), strict=True):
        assert flat.state[one].keys() == apart.state[other].keys()
        for key, value in flat.state[one].items():
            assert same_bits(value, apart.state[other][key]), key


def in_one_buffer(tensors: list[Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def layouts_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each layout from now on."""
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
    update = engine.update_
    monkeypatch.setattr(engine, "update_", lambda *args: steps.append(update(*args)))
    flat, _ = pair
    set_grads(params_of(flat), 1)
    flat.step()
    assert steps == []


@each(measured=[False, True])
def test_schedules_bind_nothing_anew(measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = both(chain(clip_by_global_norm(0.1), CHAIN) if measured else CHAIN)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in pair]
    made = layouts_made(monkeypatch)
    for seed in range(3):
        step(pair, seed)
        for schedule in schedules:
            schedule.step()
        assert_alike(pair)
    assert made == []


def test_a_group_keeps_what_the_others_have_learned() -> None:
    pair = both()
    step(pair, 0)
    for one in pair:
        one.add_param_group({"params": parameters(2), "lr": 0.01})
    for seed in (1, 2):
        step(pair, seed)
        assert_alike(pair)
    assert pair[0].layout is not None
    assert [len(buffer.segments) for buffer in pair[0].layout.buffers] == [4, 4]


def test_parameters_that_change_groups_by_hand() -> None:
    pair = both(groups=lambda params: [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}])
    step(pair, 0)
    for one in pair:
        first, second = one.param_groups
        first["params"].append(second["params"].pop(0))
    step(pair, 1)
    assert_alike(pair)


def other_memory(one: Ours) -> None:
    param = params_of(one)[1]
    param.data = param.data.clone()


def another_dtype(one: Ours) -> None:
    for param in params_of(one):
        param.data = param.data.double()
        one.state[param] = {
            key: value if key == "step" else value.double()
            for key, value in one.state[param].items()
        }


def another_average(one: Ours) -> None:
    param = params_of(one)[0]
    one.state[param]["exp_avg"] = torch.full_like(param, 0.25)


def average_elsewhere(one: Ours) -> None:
    average = one.state[params_of(one)[0]]["exp_avg"]
    average.data = torch.full_like(average, 0.25)


def values_in_place(one: Ours) -> None:
    entries = one.state[params_of(one)[2]]
    entries["exp_avg"].fill_(0.5)
    entries["step"].fill_(7)


def no_state(one: Ours) -> None:
    one.state.clear()


def no_state_of_one(one: Ours) -> None:
    del one.state[params_of(one)[1]]


def back_to_the_first_step(one: Ours) -> None:
    one.state[params_of(one)[0]]["step"].zero_()


def amsgrad_where_nothing_is_known(one: Ours) -> None:
    one.state.clear()
    one.param_groups[0]["amsgrad"] = True


CHANGES = [
    other_memory,
    another_dtype,
    another_average,
    average_elsewhere,
    values_in_place,
    no_state,
    no_state_of_one,
    back_to_the_first_step,
    amsgrad_where_nothing_is_known,
]


@each(change=CHANGES)
def test_what_is_changed_between_steps_counts(change: Callable[[Ours], None]) -> None:
    pair = both()
    step(pair, 0)
    step(pair, 1)
    for one in pair:
        change(one)
    for seed in (2, 3):
        step(pair, seed)
        assert_alike(pair)
    assert in_one_buffer(params_of(pair[0]))


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
    assert_alike(pair)


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
    assert_alike(pair)
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
