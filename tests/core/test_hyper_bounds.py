"""Bounds of constructors: those of torch.optim, and neither NaN nor an infinite lr."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import functional_optim
from functional_optim import (
    Link,
    Optimizer,
    algorithms,
    qhm,
    sgd,
)
from tests.cases import CASES
from tests.choices import each_value

from .support import refused

Make = Callable[..., Optimizer | Link]
Place = tuple[Make, str]
"""A constructor, and the name of one of its arguments."""
TWINS: dict[Make, Any] = {
    one.factory: one.oracle for one in CASES.values() if isinstance(one.oracle, type)
}
VALUES = [
    *(-math.inf, -1.0, -1e-300, -0.0, 0.0, 5e-324, 0.5, math.nextafter(1.0, 0.0)),
    *(1.0, math.nextafter(1.0, 2.0), 1.5, 1e300, math.inf),
]
Range = tuple[float, float]
FINITE, AT_LEAST_0, ABOVE_0 = (0.0, 1e300), (0.0, math.inf), (5e-324, 1e300)
BELOW_1, UP_TO_1 = (0.0, math.nextafter(1.0, 0.0)), (0.0, 1.0)
USUAL: dict[str, Range] = {
    "lr": FINITE,
    "eps": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "momentum": BELOW_1,
    "d0": ABOVE_0,
    "growth_rate": (1.0, math.inf),
}


def bounds(usual: str = "", **others: Range) -> dict[str, Range]:
    """Return the usual bounds of the listed numbers, and the bounds of other numbers."""
    return {name: USUAL[name] for name in usual.split()} | others


_BY_NAME: dict[str, dict[str, Range]] = {
    "adam": bounds(eps_root=AT_LEAST_0),
    "adamw": bounds(eps_root=AT_LEAST_0),
    "adagrad": bounds(eps_root=AT_LEAST_0),
    "rmsprop": bounds(eps_root=AT_LEAST_0),
    "ftrl": bounds("lr", beta=FINITE, l1=FINITE, l2=FINITE),
    "lamb": bounds("lr eps weight_decay", min_norm=AT_LEAST_0, max_ratio=AT_LEAST_0),
    "lars": bounds("lr weight_decay", momentum=AT_LEAST_0, trust_coefficient=AT_LEAST_0),
    "lion": bounds("lr weight_decay"),
    "sign_sgd": bounds("lr weight_decay"),
    "signum": bounds("lr momentum weight_decay"),
    "novograd": bounds("lr eps weight_decay"),
    "adam_mini": bounds("lr eps weight_decay"),
    "came": bounds("lr weight_decay", clip_threshold=(5e-324, math.inf)),
    "dog": bounds("lr eps weight_decay", reps_rel=ABOVE_0),
    "ldog": bounds("lr eps weight_decay", reps_rel=ABOVE_0),
    "dadapt_sgd": bounds("lr momentum d0 weight_decay growth_rate"),
    "dadapt_adam": bounds("d0 lr weight_decay growth_rate", eps=ABOVE_0),
    "prodigy": bounds("d0 lr weight_decay growth_rate", eps=ABOVE_0, d_coef=ABOVE_0),
    "qhm": bounds("lr momentum weight_decay", nu=(-math.inf, math.inf)),
    "rowwise_adagrad": bounds("lr eps weight_decay"),
    "sophia": bounds("lr eps weight_decay", gamma=FINITE),
    "adahessian": bounds("lr eps weight_decay", hessian_power=UP_TO_1),
    "galore_adamw": bounds("lr eps weight_decay", scale=FINITE),
    "kl_soap": bounds("lr eps weight_decay", initial_eigenvalue=ABOVE_0),
    "kron": bounds(
        "lr weight_decay",
        precond_lr=FINITE,
        update_decay=FINITE,
        max_update_rms=AT_LEAST_0,
        update_probability=UP_TO_1,
        min_update_probability=UP_TO_1,
        beta=BELOW_1,
        precond_init_scale=ABOVE_0,
    ),
    "shampoo": bounds(
        "lr eps weight_decay", exponent=FINITE, graft_eps=AT_LEAST_0, graft_beta=BELOW_1
    ),
    "soap": bounds("lr eps weight_decay"),
    "descend": bounds("lr"),
    "scale_by_adam": bounds("eps"),
    "scale_by_adahessian": bounds("eps", hessian_power=UP_TO_1),
    "scale_by_sophia": bounds("eps", gamma=FINITE),
    "scale_by_rms": bounds("eps", alpha=AT_LEAST_0),
    "scale_by_trust_ratio": bounds(
        min_norm=AT_LEAST_0, max_ratio=AT_LEAST_0, trust_coefficient=AT_LEAST_0
    ),
    "trace": bounds(momentum=AT_LEAST_0, dampening=(-math.inf, math.inf)),
    "schedule_free_adamw": bounds("lr eps weight_decay", weight_lr_power=FINITE, r=(-1.0, 1e300)),
    "schedule_free_sgd": bounds(
        "lr weight_decay", weight_lr_power=FINITE, momentum=(5e-324, BELOW_1[1]), r=(-1.0, 1e300)
    ),
    "clip_by_global_norm": bounds(max_norm=AT_LEAST_0),
    "clip_by_value": bounds(clip_value=AT_LEAST_0),
    "weight_decay": bounds("weight_decay"),
    "decoupled_weight_decay": bounds("weight_decay"),
    "normuon": bounds("lr weight_decay momentum eps", beta2=BELOW_1),
    "scion": bounds("lr momentum", scale=AT_LEAST_0),
    "dion": bounds("lr weight_decay eps", momentum=UP_TO_1),
    "adabelief": bounds("lr eps weight_decay"),
    "adabound": bounds("lr eps weight_decay", final_lr=FINITE, gamma=(5e-324, BELOW_1[1])),
    "adan": bounds("lr eps weight_decay"),
    "ademamix": bounds("lr eps weight_decay", alpha=FINITE),
    "adopt": bounds("lr eps weight_decay", clip_power=FINITE),
    "laprop": bounds("lr eps weight_decay"),
    "qhadam": bounds("lr eps weight_decay"),
    "stable_adamw": bounds("lr eps weight_decay"),
    "yogi": bounds("lr eps weight_decay", initial_accumulator_value=AT_LEAST_0),
}
OWN: dict[Make, dict[str, Range]] = {
    getattr(functional_optim, name): ranges for name, ranges in _BY_NAME.items()
}
"""Least and greatest accepted values of numbers that torch does not have."""


def _arguments(kind: type, makes: Any = TWINS) -> list[Place]:
    """Return the arguments whose default is of type ``kind``."""
    return [
        (make, one.name)
        for make in makes
        for one in inspect.signature(make).parameters.values()
        if type(one.default) is kind
    ]


NUMBERS = [(make, name) for make, name in _arguments(float) if name != "eps_root"]
OWN_NUMBERS = [(make, name) for make, names in OWN.items() for name in names]
EVERY_NUMBER = [*NUMBERS, *OWN_NUMBERS]
PAIRS = _arguments(tuple)
CHOICES = [
    (make, name)
    for make, name in _arguments(bool, [*TWINS, *OWN])
    if name != "decoupled_weight_decay"  # selects a stage, and is no hyper-parameter
]


def test_every_algorithm_has_its_bounds_tested() -> None:
    assert set(algorithms.__all__) <= {make.__name__ for make in (*TWINS, *OWN)}


def _refuses(make: Callable[..., Any], **hyper: Any) -> bool:
    try:
        make(**hyper)
    except ValueError:
        return True
    return False


def _torch_refuses(make: Make, **hyper: Any) -> bool:
    param = nn.Parameter(torch.ones(1, 1).double())
    return _refuses(lambda **given: TWINS[make]([param], **given), **hyper)


@each_value(place=NUMBERS)
def test_numbers_are_refused_as_by_torch(place: Place) -> None:
    make, name = place
    wanted = {value for value in VALUES if _torch_refuses(make, **{name: value})}
    if name == "lr":
        wanted |= {math.inf, -math.inf}
    assert {value for value in VALUES if _refuses(make, **{name: value})} == wanted


@each_value(place=PAIRS, a=VALUES)
def test_pairs_are_refused_as_by_torch(place: Place, a: float) -> None:
    make, name = place
    rest = inspect.signature(make).parameters[name].default[2:]
    refused = {b for b in VALUES if _refuses(make, **{name: (a, b, *rest)})}
    assert refused == {b for b in VALUES if _torch_refuses(make, **{name: (a, b, *rest)})}


@each_value(momentum=[0.0, 0.9], dampening=[0.0, -0.5, 0.5])
def test_nesterov_is_refused_as_by_torch(**hyper: float) -> None:
    assert _refuses(sgd, nesterov=True, **hyper) == _torch_refuses(sgd, nesterov=True, **hyper)


@each_value(place=OWN_NUMBERS)
def test_numbers_without_a_twin_in_torch(place: Place) -> None:
    make, name = place
    low, high = OWN[make][name]
    refused = {value for value in VALUES if _refuses(make, **{name: value})}
    assert refused == {value for value in VALUES if not low <= value <= high}


@each_value(place=EVERY_NUMBER)
def test_tensors_are_held_to_the_same_bounds(place: Place) -> None:
    make, name = place
    refused = {value for value in VALUES if _refuses(make, **{name: value})}
    tensors = {value: torch.tensor(value, dtype=torch.float64) for value in VALUES}
    assert refused == {value for value in VALUES if _refuses(make, **{name: tensors[value]})}


NO_NUMBERS: list[tuple[Any, type[Exception], str]] = [
    (math.nan, ValueError, "must be .*, got nan"),
    (torch.tensor(math.nan), ValueError, "must be .*, got nan"),
    *[(value, TypeError, "must be a number") for value in ("0.1", None, [0.1], (0.1,), {}, 1j)],
    *[(value, TypeError, "must be a number") for value in (torch.tensor(1j), True)],
    (torch.tensor(True), TypeError, "must be a number"),
    (torch.tensor([0.1, 0.2]), ValueError, r"must be .*shape \(2,\).*vmap"),
    (torch.tensor([]), ValueError, r"must be .*shape \(0,\)"),
]


@each_value(place=EVERY_NUMBER)
def test_what_is_no_number_is_refused_by_name(place: Place) -> None:
    make, name = place
    for value, error, message in NO_NUMBERS:
        with refused(error, f"{name} {message}", value=value):
            make(**{name: value})


BETAS = [(make, "betas") for make in OWN if "betas" in inspect.signature(make).parameters]


@each_value(place=[*PAIRS, *BETAS])
def test_a_pair_is_two_numbers(place: Place) -> None:
    make, name = place
    first, second, *rest = inspect.signature(make).parameters[name].default
    for value in (0.9, (0.9,), (0.9,) * (3 + len(rest)), "ab", torch.tensor([0.9, 0.9])):
        with refused(TypeError, name, value=value):
            make(**{name: value})
    with refused(ValueError, rf"{name}\[1\] must be .*, got nan"):
        make(**{name: (first, math.nan, *rest)})
    with refused(ValueError, rf"{name}\[0\] must be .*, got nan"):
        make(**{name: (torch.tensor(math.nan), second, *rest)})


@each_value(place=CHOICES)
def test_a_choice_is_true_or_false(place: Place) -> None:
    make, name = place
    for value in (1, 0, None, "yes", 1.0, torch.tensor(True), lambda made: False):
        with refused(TypeError, f"{name} must be True or False", value=value):
            make(**{name: value})


def test_other_names_of_qhm_decays_are_refused() -> None:
    with pytest.raises(ValueError, match='"grad" or "direct", got \'l2\''):
        qhm(weight_decay_type="l2")


def test_an_integer_too_large_for_a_float_is_out_of_bounds() -> None:
    with pytest.raises(ValueError, match="lr must be a finite number"):
        sgd(10**400)
