"""Bounds of constructors: those of torch.optim, and neither NaN nor an infinite lr."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from functional_optim import (
    Link,
    Optimizer,
    adagrad,
    adahessian,
    adam,
    adam_mini,
    adamw,
    algorithms,
    came,
    clip_by_global_norm,
    clip_by_value,
    dadapt_adam,
    dadapt_sgd,
    decoupled_weight_decay,
    descend,
    dog,
    ftrl,
    galore_adamw,
    kl_soap,
    kron,
    lamb,
    lars,
    ldog,
    lion,
    novograd,
    prodigy,
    qhm,
    rmsprop,
    rowwise_adagrad,
    scale_by_adahessian,
    scale_by_adam,
    scale_by_lion,
    scale_by_rms,
    scale_by_sophia,
    scale_by_trust_ratio,
    schedule_free_adamw,
    schedule_free_sgd,
    sgd,
    shampoo,
    sign_sgd,
    signum,
    soap,
    sophia,
    trace,
    weight_decay,
)
from functional_optim.testing import CASES
from tests.choices import each_value

from . import adaptive, orthogonal
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
OWN: dict[Make, dict[str, tuple[float, float]]] = {
    **{make: {"eps_root": (0.0, math.inf)} for make in (adam, adamw, adagrad, rmsprop)},
    ftrl: dict.fromkeys(("lr", "beta", "l1", "l2"), (0.0, 1e300)),
    lamb: {
        "lr": (0.0, 1e300),
        **dict.fromkeys(("eps", "weight_decay", "min_norm", "max_ratio"), (0.0, math.inf)),
    },
    lars: {
        "lr": (0.0, 1e300),
        **dict.fromkeys(("momentum", "weight_decay", "trust_coefficient"), (0.0, math.inf)),
    },
    lion: {"lr": (0.0, 1e300), "weight_decay": (0.0, math.inf)},
    sign_sgd: {"lr": (0.0, 1e300), "weight_decay": (0.0, math.inf)},
    signum: {
        "lr": (0.0, 1e300),
        "momentum": (0.0, math.nextafter(1.0, 0.0)),
        "weight_decay": (0.0, math.inf),
    },
    **{
        make: {"lr": (0.0, 1e300), "eps": (0.0, math.inf), "weight_decay": (0.0, math.inf)}
        for make in (novograd, adam_mini)
    },
    came: {
        "lr": (0.0, 1e300),
        "clip_threshold": (5e-324, math.inf),
        "weight_decay": (0.0, math.inf),
    },
    **{
        make: {
            "lr": (0.0, 1e300),
            "reps_rel": (5e-324, 1e300),
            "eps": (0.0, math.inf),
            "weight_decay": (0.0, math.inf),
        }
        for make in (dog, ldog)
    },
    dadapt_sgd: {
        "lr": (0.0, 1e300),
        "momentum": (0.0, math.nextafter(1.0, 0.0)),
        "d0": (5e-324, 1e300),
        "weight_decay": (0.0, math.inf),
        "growth_rate": (1.0, math.inf),
    },
    dadapt_adam: {
        **dict.fromkeys(("eps", "d0"), (5e-324, 1e300)),
        "lr": (0.0, 1e300),
        "weight_decay": (0.0, math.inf),
        "growth_rate": (1.0, math.inf),
    },
    prodigy: {
        **dict.fromkeys(("eps", "d0", "d_coef"), (5e-324, 1e300)),
        "lr": (0.0, 1e300),
        "weight_decay": (0.0, math.inf),
        "growth_rate": (1.0, math.inf),
    },
    qhm: {
        "lr": (0.0, 1e300),
        "momentum": (0.0, math.nextafter(1.0, 0.0)),
        "nu": (-math.inf, math.inf),
        "weight_decay": (0.0, math.inf),
    },
    rowwise_adagrad: {
        "lr": (0.0, 1e300),
        "eps": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
    },
    sophia: {
        **dict.fromkeys(("lr", "gamma"), (0.0, 1e300)),
        **dict.fromkeys(("eps", "weight_decay"), (0.0, math.inf)),
    },
    adahessian: {
        "lr": (0.0, 1e300),
        **dict.fromkeys(("eps", "weight_decay"), (0.0, math.inf)),
        "hessian_power": (0.0, 1.0),
    },
    galore_adamw: {
        **dict.fromkeys(("lr", "scale"), (0.0, 1e300)),
        **dict.fromkeys(("eps", "weight_decay"), (0.0, math.inf)),
    },
    kl_soap: {
        "lr": (0.0, 1e300),
        **dict.fromkeys(("eps", "weight_decay"), (0.0, math.inf)),
        "initial_eigenvalue": (5e-324, 1e300),
    },
    kron: {
        **dict.fromkeys(("lr", "precond_lr", "update_decay"), (0.0, 1e300)),
        **dict.fromkeys(("weight_decay", "max_update_rms"), (0.0, math.inf)),
        **dict.fromkeys(("update_probability", "min_update_probability"), (0.0, 1.0)),
        "beta": (0.0, math.nextafter(1.0, 0.0)),
        "precond_init_scale": (5e-324, 1e300),
    },
    shampoo: {
        **dict.fromkeys(("lr", "exponent"), (0.0, 1e300)),
        **dict.fromkeys(("eps", "weight_decay", "graft_eps"), (0.0, math.inf)),
        "graft_beta": (0.0, math.nextafter(1.0, 0.0)),
    },
    soap: {
        "lr": (0.0, 1e300),
        "eps": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
    },
    descend: {"lr": (0.0, 1e300)},
    scale_by_adam: {"eps": (0.0, math.inf)},
    scale_by_adahessian: {"eps": (0.0, math.inf), "hessian_power": (0.0, 1.0)},
    scale_by_sophia: {"eps": (0.0, math.inf), "gamma": (0.0, 1e300)},
    scale_by_rms: dict.fromkeys(("alpha", "eps"), (0.0, math.inf)),
    scale_by_trust_ratio: dict.fromkeys(
        ("min_norm", "max_ratio", "trust_coefficient"), (0.0, math.inf)
    ),
    trace: {"momentum": (0.0, math.inf), "dampening": (-math.inf, math.inf)},
    schedule_free_adamw: {
        **dict.fromkeys(("lr", "weight_lr_power"), (0.0, 1e300)),
        **dict.fromkeys(("eps", "weight_decay"), (0.0, math.inf)),
        "r": (-1.0, 1e300),
    },
    schedule_free_sgd: {
        **dict.fromkeys(("lr", "weight_lr_power"), (0.0, 1e300)),
        "momentum": (5e-324, math.nextafter(1.0, 0.0)),
        "weight_decay": (0.0, math.inf),
        "r": (-1.0, 1e300),
    },
    clip_by_global_norm: {"max_norm": (0.0, math.inf)},
    clip_by_value: {"clip_value": (0.0, math.inf)},
    weight_decay: {"weight_decay": (0.0, math.inf)},
    decoupled_weight_decay: {"weight_decay": (0.0, math.inf)},
    **orthogonal.BOUNDS,
    **adaptive.BOUNDS,
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
CHOOSING = (
    *TWINS,
    *adaptive.BOUNDS,
    adahessian,
    ftrl,
    galore_adamw,
    kl_soap,
    kron,
    lamb,
    lars,
    lion,
    prodigy,
    qhm,
    rowwise_adagrad,
    shampoo,
)
CHOICES = [
    (make, name)
    for make, name in _arguments(bool, CHOOSING)
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


BETAS = (
    *adaptive.BOUNDS,
    galore_adamw,
    kl_soap,
    lamb,
    lion,
    prodigy,
    scale_by_adam,
    scale_by_lion,
    schedule_free_adamw,
    soap,
)


@each_value(place=[*PAIRS, *((make, "betas") for make in BETAS)])
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
