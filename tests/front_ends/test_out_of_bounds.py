"""Hyper-parameters out of bounds in a group are refused before anything changes."""

from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, adamw, as_functional_optim, chain, clip_by_value, sgd
from tests.choices import each

from .support import (
    CLASSES,
    assert_same_params,
    assert_same_tensors,
    parameters,
    params_of,
    run,
    set_grads,
    values_of,
)

NAN = float("nan")

BAD: dict[type, list[dict[str, Any]]] = {
    torch.optim.SGD: [{"momentum": -0.1}, {"weight_decay": -1.0}, {"nesterov": True}],
    torch.optim.Adam: [{"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1.0}],
    torch.optim.AdamW: [{"betas": (0.9, 1.0)}, {"weight_decay": -0.1}, {"eps": NAN}],
    torch.optim.Adagrad: [{"lr_decay": -1.0}, {"weight_decay": -1.0}, {"eps": -1.0}],
    torch.optim.Adadelta: [{"rho": 1.5}, {"rho": -0.1}, {"eps": -1.0}, {"weight_decay": -1.0}],
    torch.optim.Adamax: [{"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}],
    torch.optim.RMSprop: [{"alpha": -0.1}, {"momentum": -0.1}, {"eps": -1.0}],
    torch.optim.Rprop: [{"etas": (1.2, 0.5)}, {"etas": (0.5, 1.0)}, {"etas": (0.0, 1.2)}],
    torch.optim.NAdam: [{"betas": (1.0, 0.9)}, {"eps": -1.0}, {"momentum_decay": -1.0}],
    torch.optim.RAdam: [{"betas": (0.9, 1.0)}, {"eps": NAN}, {"weight_decay": -1.0}],
    torch.optim.ASGD: [{"lambd": NAN}, {"t0": NAN}, {"weight_decay": -1.0}],
    torch.optim.Adafactor: [{"beta2_decay": 0.1}, {"eps": (-1.0, 0.1)}, {"d": 0.5}],
}
LR: list[dict[str, Any]] = [{"lr": -0.1}, {"lr": NAN}, {"lr": float("inf")}]

ALL = [(cls, bad) for cls in CLASSES for bad in [*BAD[cls], *LR]]
TOLD = "must|needs"


def grouped(cls: type) -> TorchOptimizer:
    """Return an optimizer with two groups, after one step."""
    groups = [{"params": [param]} for param in parameters()[:2]]
    made = TorchOptimizer(groups, as_functional_optim(cls))
    run(made, 0)
    return made


@each(number=range(len(ALL)))
def test_it_is_refused_before_anything_is_changed(number: int) -> None:
    """Constructors, a new group, and a step refuse the value."""
    cls, bad = ALL[number]
    with pytest.raises(ValueError, match=TOLD):
        as_functional_optim(cls, **bad)
    with pytest.raises(ValueError, match=TOLD):
        TorchOptimizer([{"params": parameters(), **bad}], as_functional_optim(cls))
    optimizer, twin = (grouped(cls) for _ in range(2))
    with pytest.raises(ValueError, match=TOLD):
        optimizer.add_param_group({"params": parameters(2), **bad})
    assert (len(optimizer.param_groups), len(optimizer.state)) == (2, 2)
    good = {key: optimizer.param_groups[1][key] for key in bad}
    optimizer.param_groups[1].update(bad)
    set_grads(params_of(optimizer), 1)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}|needs"):
            optimizer.step()
    assert_same_params(optimizer, twin)
    assert repr(optimizer.state) == repr(twin.state)
    optimizer.param_groups[1].update(good)
    for one in (optimizer, twin):
        run(one, 1)
    assert_same_params(optimizer, twin)


@each(
    wrong=[
        ({"lr": "0.1"}, TypeError, "lr must be a number"),
        ({"lr": None}, TypeError, "lr must be a number"),
        ({"lr": [0.1]}, TypeError, "lr must be a number"),
        ({"lr": 1j}, TypeError, "lr must be a number"),
        ({"lr": (0.1,)}, TypeError, "lr must be a number"),
        # This option needs another state field. torch.optim.Adam also fails in mid-run, because
        # its buffer is missing.
        ({"amsgrad": True}, (KeyError, ValueError), "max_exp_avg_sq"),
        (None, ValueError, "has no eps; it had, so put it back"),
    ],
)
def test_a_value_that_cannot_be_changes_nothing(wrong: Any) -> None:
    options, error, told = wrong
    optimizer = grouped(torch.optim.AdamW)
    before = values_of(optimizer)
    if options is None:
        del optimizer.param_groups[1]["eps"]
    else:
        optimizer.param_groups[1].update(options)
    set_grads(params_of(optimizer), 1)
    with pytest.raises(error, match=told):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_a_tensor_that_became_bad_in_place() -> None:
    optimizer = TorchOptimizer(parameters(), adamw(torch.tensor(0.1)))
    run(optimizer, 0)
    before = values_of(optimizer)
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_a_tensor_in_a_pair_that_became_bad_in_place() -> None:
    made = adamw(0.1, betas=(torch.tensor(0.9), torch.tensor(0.999)))
    optimizer = TorchOptimizer(parameters(), made)
    run(optimizer, 0)
    before = values_of(optimizer)
    optimizer.param_groups[0]["betas"][0].fill_(2.0)
    with pytest.raises(ValueError, match=r"betas\[0\] must be"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_an_option_under_a_name_of_two_stages_is_not_taken_silently() -> None:
    # Both decays have a weight_decay, so the plain name selects neither.
    both = chain(adamw(0.1).links[1], sgd(0.1, weight_decay=0.2))
    assert "weight_decay" not in both.hyper
    with pytest.raises((TypeError, ValueError), match="weight_decay"):
        TorchOptimizer([{"params": parameters(), "weight_decay": 0.0}], both)


def test_options_that_others_put_into_a_group_are_left_there() -> None:
    group = {"params": parameters(), "initial_lr": 0.1, "name": "all"}
    optimizer = TorchOptimizer([group], chain(clip_by_value(1.0), sgd(0.1)))
    run(optimizer, 0)
    assert optimizer.param_groups[0]["name"] == "all"
