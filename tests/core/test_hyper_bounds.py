"""What a constructor refuses: exactly what torch.optim refuses, NaN, and a learning rate of inf."""

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
    adam,
    adamw,
    algorithms,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    lion,
    qhm,
    rmsprop,
    sgd,
    weight_decay,
)
from functional_optim.testing import CASES

from ..choices import case
from .support import refused

Make = Callable[..., Optimizer | Link]
TWINS: dict[Make, Any] = {
    one.factory: one.oracle for one in CASES.values() if isinstance(one.oracle, type)
}
VALUES = [
    *(-math.inf, -1.0, -1e-300, -0.0, 0.0, 5e-324, 0.5, math.nextafter(1.0, 0.0)),
    *(1.0, math.nextafter(1.0, 2.0), 1.5, 1e300, math.inf),
]
OWN: dict[Make, dict[str, tuple[float, float]]] = {
    **{make: {"eps_root": (0.0, math.inf)} for make in (adam, adamw, adagrad, rmsprop)},
    lion: {"lr": (0.0, 1e300), "weight_decay": (0.0, math.inf)},
    qhm: {
        "lr": (0.0, 1e300),
        "momentum": (0.0, math.nextafter(1.0, 0.0)),
        "nu": (-math.inf, math.inf),
        "weight_decay": (0.0, math.inf),
    },
    clip_by_global_norm: {"max_norm": (0.0, math.inf)},
    clip_by_value: {"clip_value": (0.0, math.inf)},
    weight_decay: {"weight_decay": (0.0, math.inf)},
    decoupled_weight_decay: {"weight_decay": (0.0, math.inf)},
}
"""The numbers that torch has not: the least and the greatest that is taken."""


def _arguments(kind: type, makes: Any = TWINS) -> list[tuple[Make, str]]:
    """Constructors, each with the names of its arguments whose default is of a kind."""
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
    for make, name in _arguments(bool, (*TWINS, lion, qhm))
    if name != "decoupled_weight_decay"  # chooses a stage; it is no hyper-parameter
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
    param = nn.Parameter(torch.ones(1).double())
    return _refuses(lambda **given: TWINS[make]([param], **given), **hyper)


def test_numbers_are_refused_as_by_torch() -> None:
    for make, name in NUMBERS:
        wanted = {value for value in VALUES if _torch_refuses(make, **{name: value})}
        if name == "lr":
            wanted |= {math.inf, -math.inf}
        with case(make=make, name=name):
            assert {value for value in VALUES if _refuses(make, **{name: value})} == wanted


def test_pairs_are_refused_as_by_torch() -> None:
    for make, name in PAIRS:
        for pair in [(a, b) for a in VALUES for b in VALUES]:
            with case(make=make, name=name, pair=pair):
                assert _refuses(make, **{name: pair}) == _torch_refuses(make, **{name: pair})


def test_nesterov_is_refused_as_by_torch() -> None:
    for momentum in (0.0, 0.9):
        for dampening in (0.0, -0.5, 0.5):
            hyper = {"momentum": momentum, "dampening": dampening, "nesterov": True}
            with case(**hyper):
                assert _refuses(sgd, **hyper) == _torch_refuses(sgd, **hyper)


def test_numbers_without_a_twin_in_torch() -> None:
    for make, name in OWN_NUMBERS:
        low, high = OWN[make][name]
        refused = {value for value in VALUES if _refuses(make, **{name: value})}
        with case(make=make, name=name):
            assert refused == {value for value in VALUES if not low <= value <= high}


def test_tensors_are_held_to_the_same_bounds() -> None:
    for make, name in EVERY_NUMBER:
        for value in VALUES:
            tensor = torch.tensor(value, dtype=torch.float64)
            with case(make=make, name=name, value=value):
                assert _refuses(make, **{name: tensor}) == _refuses(make, **{name: value})


NO_NUMBERS: list[tuple[Any, type[Exception], str]] = [
    (math.nan, ValueError, "must be .*, got nan"),
    (torch.tensor(math.nan), ValueError, "must be .*, got nan"),
    *[(value, TypeError, "must be a number") for value in ("0.1", None, [0.1], (0.1,), {}, 1j)],
    *[(torch.tensor(value), TypeError, "must be a number") for value in (1j, True)],
    (True, TypeError, "must be a number"),
    (torch.tensor([0.1, 0.2]), ValueError, r"must be .*shape \(2,\).*vmap"),
    (torch.tensor([]), ValueError, r"must be .*shape \(0,\)"),
]


def test_what_is_no_number_is_refused_by_name() -> None:
    for make, name in EVERY_NUMBER:
        for value, error, message in NO_NUMBERS:
            with refused(error, f"{name} {message}", make=make, value=value):
                make(**{name: value})


def test_a_pair_is_two_numbers() -> None:
    for make, name in [*PAIRS, (lion, "betas")]:
        for value in (0.9, (0.9,), (0.9, 0.9, 0.9), "ab", torch.tensor([0.9, 0.9])):
            with refused(TypeError, name, make=make, value=value):
                make(**{name: value})
        first, second = inspect.signature(make).parameters[name].default
        with pytest.raises(ValueError, match=rf"{name}\[1\] must be .*, got nan"):
            make(**{name: (first, math.nan)})
        with pytest.raises(ValueError, match=rf"{name}\[0\] must be .*, got nan"):
            make(**{name: (torch.tensor(math.nan), second)})


def test_a_choice_is_true_or_false() -> None:
    for make, name in CHOICES:
        for value in (1, 0, None, "yes", 1.0, torch.tensor(True), lambda made: False):
            with refused(TypeError, f"{name} must be True or False", make=make, value=value):
                make(**{name: value})


def test_other_names_of_qhm_decays_are_refused() -> None:
    with pytest.raises(ValueError, match='"grad" or "direct", got \'l2\''):
        qhm(weight_decay_type="l2")


def test_an_integer_too_large_for_a_float_is_out_of_bounds() -> None:
    with pytest.raises(ValueError, match="lr must be a finite number"):
        sgd(10**400)
