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
    adadelta,
    adagrad,
    adam,
    adamax,
    adamw,
    algorithms,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    lion,
    qhm,
    rmsprop,
    rprop,
    sgd,
    weight_decay,
)

Make = Callable[..., Optimizer | Link]
TWINS: dict[Make, type[torch.optim.Optimizer]] = {
    sgd: torch.optim.SGD,
    adam: torch.optim.Adam,
    adamw: torch.optim.AdamW,
    adamax: torch.optim.Adamax,
    adadelta: torch.optim.Adadelta,
    adagrad: torch.optim.Adagrad,
    rmsprop: torch.optim.RMSprop,
    rprop: torch.optim.Rprop,
}
VALUES = [
    *(-math.inf, -1.0, -1e-300, -0.0, 0.0, 5e-324, 0.5, math.nextafter(1.0, 0.0)),
    *(1.0, math.nextafter(1.0, 2.0), 1.5, 1e300, math.inf),
]


def _arguments(make: Make, kind: type) -> list[str]:
    """The names of a constructor's arguments whose default is of a kind."""
    parameters = inspect.signature(make).parameters.values()
    return [one.name for one in parameters if type(one.default) is kind]


def _refuses(make: Callable[..., Any], **hyper: Any) -> bool:
    try:
        make(**hyper)
    except ValueError:
        return True
    return False


def _torch_refuses(make: Make, **hyper: Any) -> bool:
    return _refuses(lambda **k: TWINS[make]([nn.Parameter(torch.ones(1).double())], **k), **hyper)


NUMBERS = [
    (make, name)
    for make in TWINS
    for name in _arguments(make, float)
    if name != "eps_root"  # which torch has not: see OWN
]
PAIRS = [(make, name) for make in TWINS for name in _arguments(make, tuple)]
CHOICES = [
    (make, name)
    for make in (*TWINS, lion, qhm)
    for name in _arguments(make, bool)
    if name != "decoupled_weight_decay"  # chooses a stage; it is no hyper-parameter
]


@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_numbers_are_refused_as_by_torch(make: Make, name: str) -> None:
    refused = {value for value in VALUES if _refuses(make, **{name: value})}
    wanted = {value for value in VALUES if _torch_refuses(make, **{name: value})}
    if name == "lr":
        wanted |= {math.inf, -math.inf}
    assert refused == wanted


@pytest.mark.parametrize(("make", "name"), PAIRS)
def test_pairs_are_refused_as_by_torch(make: Make, name: str) -> None:
    pairs = [(a, b) for a in VALUES for b in VALUES]
    refused = {pair for pair in pairs if _refuses(make, **{name: pair})}
    assert refused == {pair for pair in pairs if _torch_refuses(make, **{name: pair})}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dampening", [0.0, -0.5, 0.5])
def test_nesterov_is_refused_as_by_torch(momentum: float, dampening: float) -> None:
    hyper: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": True}
    assert _refuses(sgd, **hyper) == _torch_refuses(sgd, **hyper)


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


def test_every_algorithm_has_its_bounds_tested() -> None:
    tested = {make.__name__ for make in (*TWINS, *OWN)}
    assert set(algorithms.__all__) <= tested


@pytest.mark.parametrize(("make", "name"), [(m, n) for m, names in OWN.items() for n in names])
def test_numbers_without_a_twin_in_torch(make: Make, name: str) -> None:
    low, high = OWN[make][name]
    refused = {value for value in VALUES if _refuses(make, **{name: value})}
    assert refused == {value for value in VALUES if not low <= value <= high}


EVERY = [*NUMBERS, *((make, name) for make, names in OWN.items() for name in names)]


@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.nan)])
@pytest.mark.parametrize(("make", "name"), EVERY)
def test_nan_is_refused_everywhere(make: Make, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*, got nan"):
        make(**{name: value})


@pytest.mark.parametrize(("make", "name"), [*PAIRS, (lion, "betas")])
def test_nan_is_refused_inside_pairs(make: Make, name: str) -> None:
    default = inspect.signature(make).parameters[name].default
    with pytest.raises(ValueError, match=rf"{name}\[1\] must be .*, got nan"):
        make(**{name: (default[0], math.nan)})
    with pytest.raises(ValueError, match=rf"{name}\[0\] must be .*, got nan"):
        make(**{name: (torch.tensor(math.nan), default[1])})


@pytest.mark.parametrize(("make", "name"), EVERY)
def test_tensors_are_held_to_the_same_bounds(make: Make, name: str) -> None:
    refused = {v for v in VALUES if _refuses(make, **{name: v})}
    as_tensors = {
        v for v in VALUES if _refuses(make, **{name: torch.tensor(v, dtype=torch.float64)})
    }
    assert as_tensors == refused


@pytest.mark.parametrize(("make", "name"), EVERY)
@pytest.mark.parametrize("value", ["0.1", None, [0.1], (0.1,), {}, 1j])
def test_what_is_no_number_is_a_type_error(make: Make, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a number"):
        make(**{name: value})


@pytest.mark.parametrize(("make", "name"), EVERY)
def test_a_tensor_of_several_numbers_is_refused(make: Make, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*shape \(2,\).*vmap"):
        make(**{name: torch.tensor([0.1, 0.2])})
    with pytest.raises(ValueError, match=rf"{name} must be .*shape \(0,\)"):
        make(**{name: torch.tensor([])})


@pytest.mark.parametrize(("make", "name"), [*PAIRS, (lion, "betas")])
@pytest.mark.parametrize("value", [0.9, (0.9,), (0.9, 0.9, 0.9), "ab", torch.tensor([0.9, 0.9])])
def test_a_pair_is_two_numbers(make: Make, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("value", [1, 0, None, "yes", 1.0, torch.tensor(True)])
@pytest.mark.parametrize(("make", "name"), CHOICES)
def test_a_choice_is_true_or_false(make: Make, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        make(**{name: value})


def test_other_names_of_qhm_decays_are_refused() -> None:
    with pytest.raises(ValueError, match='"grad" or "direct", got \'l2\''):
        qhm(weight_decay_type="l2")


def test_a_complex_tensor_is_refused_with_its_name() -> None:
    with pytest.raises(TypeError, match="lr must be a number"):
        sgd(torch.tensor(1j))


def test_an_integer_too_large_for_a_float_is_out_of_bounds() -> None:
    with pytest.raises(ValueError, match="lr must be a finite number"):
        sgd(10**400)
