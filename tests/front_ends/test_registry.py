"""as_functional_optim and the registry it looks into."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    as_functional_optim,
    chain,
    clip_by_value,
    functional_optim_map,
    qhm,
    register_functional_optim,
    registry,
    sgd,
)

from .support import CASES, CLASSES, Case

EXECUTION = {"foreach", "fused", "capturable", "differentiable"}


class Unknown(torch.optim.Optimizer):
    """A class that nobody registered."""


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    before = dict(functional_optim_map)
    yield
    for key in list(functional_optim_map):
        del registry._REGISTERED[key]
    registry._REGISTERED.update(before)


def numbers_of(cls: type) -> dict[str, Any]:
    """A torch class's own arguments that change its numbers, with their defaults."""
    return {
        name: one.default
        for name, one in inspect.signature(cls).parameters.items()
        if name != "params" and name not in EXECUTION
    }


def positional_of(cls: type) -> list[str]:
    kinds = inspect.signature(cls).parameters.items()
    return [name for name, one in kinds if one.kind is one.POSITIONAL_OR_KEYWORD][1:]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_default_is_the_class_s_own(cls: type) -> None:
    optimizer = as_functional_optim(cls)
    defaults = numbers_of(cls)
    decoupled = defaults.pop("decoupled_weight_decay", cls is torch.optim.AdamW)
    assert optimizer.hyper == defaults
    assert [s.name == "decoupled_weight_decay" for s in optimizer.stages].count(True) == decoupled


def test_the_defaults_in_which_torch_s_functional_classes_differ() -> None:
    assert as_functional_optim(torch.optim.SGD).hyper["lr"] == 1e-3
    assert as_functional_optim(torch.optim.Adamax).hyper["lr"] == 2e-3


@pytest.mark.parametrize("name", CASES)
def test_arguments_by_name(name: str) -> None:
    cls, options = CASES[name]
    hyper = as_functional_optim(cls, **options).hyper
    options = {key: value for key, value in options.items() if key != "decoupled_weight_decay"}
    assert {key: hyper[key] for key in options} == options


@pytest.mark.parametrize("cls", CLASSES)
def test_arguments_by_position(cls: type) -> None:
    names = [name for name in positional_of(cls) if name not in EXECUTION]
    assert names[0] == "lr"
    instance = cls([torch.zeros(1, requires_grad=True)], 0.25)
    values = [instance.defaults[name] for name in names]
    by_name = as_functional_optim(cls, **dict(zip(names, values, strict=True)))
    leading = positional_of(cls)[: len(names)]
    if leading == names:
        assert as_functional_optim(cls, *values) == by_name
    else:  # an execution option stands between (RMSprop's capturable, for one)
        every = [instance.defaults[name] for name in positional_of(cls)]
        assert as_functional_optim(cls, *every) == by_name


def test_positions_are_torch_s_where_they_mean_different_things() -> None:
    made = as_functional_optim(torch.optim.RMSprop, 0.1, 0.2, 0.3, 0.4, 0.5, True)
    assert made.hyper == {
        "lr": 0.1,
        "alpha": 0.2,
        "eps": 0.3,
        "weight_decay": 0.4,
        "momentum": 0.5,
        "centered": True,
        "maximize": False,
    }


@pytest.mark.parametrize("option", sorted(EXECUTION))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_execution_options_are_taken_without_effect(case: Case, option: str) -> None:
    cls, options = case
    if option not in inspect.signature(cls).parameters:
        with pytest.raises(TypeError, match=option):
            as_functional_optim(cls, **options, **{option: True})
    else:
        with_it = as_functional_optim(cls, **options, **{option: True})
        assert with_it == as_functional_optim(cls, **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_argument_that_the_class_has_not_is_a_type_error(cls: type) -> None:
    for bad in ({"learning_rate": 0.1}, {"params": []}):
        with pytest.raises(TypeError):
            as_functional_optim(cls, **bad)
    with pytest.raises(TypeError):
        as_functional_optim(cls, *range(20))


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adamax])
def test_an_argument_of_a_factory_that_its_class_has_not_is_a_type_error(cls: type) -> None:
    with pytest.raises(TypeError):
        as_functional_optim(cls, decoupled_weight_decay=True)


@pytest.mark.parametrize("key", [Unknown, torch.optim.Optimizer, int, "qhm", ("a", 1), None])
def test_an_unknown_key_is_a_value_error_that_says_what_is_known(key: Any) -> None:
    with pytest.raises(ValueError, match=r"Adadelta.*register_functional_optim"):
        as_functional_optim(key)


def test_a_subclass_of_a_known_class_is_not_known() -> None:
    class Mine(torch.optim.SGD):
        """Whose step may be another."""

    with pytest.raises(ValueError, match="Mine"):
        as_functional_optim(Mine)


def test_the_map_is_a_read_only_view() -> None:
    assert set(functional_optim_map) == set(CLASSES)
    with pytest.raises(TypeError):
        functional_optim_map["sgd"] = sgd
    with pytest.raises(TypeError):
        del functional_optim_map[torch.optim.SGD]
    assert not hasattr(functional_optim_map, "clear")
    register_functional_optim("later", sgd)
    assert functional_optim_map["later"] is sgd


def test_a_second_registration_raises_and_changes_nothing() -> None:
    register_functional_optim(Unknown, sgd)
    for _ in range(2):
        with pytest.raises(ValueError, match="replace=True"):
            register_functional_optim(Unknown, qhm)
        assert functional_optim_map[Unknown] is sgd
    with pytest.raises(ValueError, match="SGD"):
        register_functional_optim(torch.optim.SGD, qhm)
    register_functional_optim(Unknown, qhm, replace=True)
    assert functional_optim_map[Unknown] is qhm


def test_a_factory_has_to_be_callable() -> None:
    with pytest.raises(TypeError, match="callable"):
        register_functional_optim("x", sgd())
    assert "x" not in functional_optim_map


def test_names_and_other_hashable_keys_hand_their_arguments_on() -> None:
    def clipped(bound: float, *, lr: float = 0.5, fused: bool = False) -> Optimizer:
        return chain(clip_by_value(bound), sgd(lr, maximize=fused))

    for key in ("clipped", ("clipped", 1), clipped):
        register_functional_optim(key, clipped)
        assert as_functional_optim(key, 2.0) == clipped(2.0)
        assert as_functional_optim(key, bound=2.0, lr=0.1) == clipped(2.0, lr=0.1)
        # Whatever a factory without a torch class calls its arguments, they are its own.
        assert as_functional_optim(key, 2.0, fused=True) == clipped(2.0, fused=True)
        with pytest.raises(TypeError):
            as_functional_optim(key, 2.0, momentum=0.9)


def test_a_user_s_class_gives_its_own_defaults_and_order() -> None:
    class QHM(torch.optim.Optimizer):
        def __init__(self, params: Any, nu: float = 0.25, lr: float = 0.5, *, foreach: Any = None):
            super().__init__(params, {"lr": lr, "nu": nu, "foreach": foreach})

    register_functional_optim(QHM, qhm)
    assert as_functional_optim(QHM, 0.75, foreach=True) == qhm(lr=0.5, nu=0.75)
    assert as_functional_optim(QHM) == qhm(lr=0.5, nu=0.25)


def test_a_user_s_class_with_open_arguments() -> None:
    class Open(torch.optim.Optimizer):
        def __init__(self, params: Any, *rest: Any, lr: float = 0.5, **options: Any) -> None:
            super().__init__(params, {"lr": lr, **options})

    register_functional_optim(Open, sgd)
    assert as_functional_optim(Open, momentum=0.9) == sgd(0.5, 0.9)


@pytest.mark.parametrize("option", sorted(EXECUTION))
def test_execution_options_among_open_arguments(option: str) -> None:
    class Keywords(torch.optim.Optimizer):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, options)

    register_functional_optim(Keywords, sgd)
    assert as_functional_optim(Keywords, lr=0.5, **{option: False}) == sgd(0.5)


def test_values_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match="lr must"):
        as_functional_optim(torch.optim.SGD, -0.1)
    with pytest.raises(ValueError, match="one element"):
        as_functional_optim(torch.optim.Adam, torch.zeros(2))
