"""A hyper-parameter out of bounds in a group: refused before anything is changed."""

from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, adamw, as_functional_optim, chain, clip_by_value, sgd

from .support import CLASSES, assert_same_tensors, parameters, params_of, set_grads

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
}
LR: list[dict[str, Any]] = [{"lr": -0.1}, {"lr": NAN}, {"lr": float("inf")}]

ALL = [(cls, bad) for cls in CLASSES for bad in [*BAD[cls], *LR]]
every_bad = pytest.mark.parametrize(("cls", "bad"), ALL)


def grouped(cls: type) -> TorchOptimizer:
    params = parameters(1)
    return TorchOptimizer(
        [{"params": params[:2]}, {"params": params[2:]}], as_functional_optim(cls)
    )


@every_bad
def test_it_is_refused_where_torch_s_constructor_or_ours_refuses_it(
    cls: type, bad: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="must|needs"):
        as_functional_optim(cls, **bad)
    with pytest.raises(ValueError, match="must|needs"):
        TorchOptimizer([{"params": parameters(1), **bad}], as_functional_optim(cls))


@every_bad
def test_a_step_with_it_changes_nothing(cls: type, bad: dict[str, Any]) -> None:
    optimizer, twin = grouped(cls), grouped(cls)
    for one in (optimizer, twin):
        set_grads(params_of(one), 0)
        one.step()
        set_grads(params_of(one), 1)
    good = {key: optimizer.param_groups[1][key] for key in bad}
    optimizer.param_groups[1].update(bad)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}|needs"):
            optimizer.step()
    assert_same_tensors(params_of(optimizer), params_of(twin))
    assert repr(optimizer.state) == repr(twin.state)
    optimizer.param_groups[1].update(good)
    for one in (optimizer, twin):
        one.step()
    assert_same_tensors(params_of(optimizer), params_of(twin))


@every_bad
def test_a_group_with_it_is_not_added(cls: type, bad: dict[str, Any]) -> None:
    optimizer = grouped(cls)
    with pytest.raises(ValueError, match="must|needs"):
        optimizer.add_param_group({"params": parameters(2), **bad})
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("wrong", ["0.1", None, [0.1], 1j, (0.1,)])
def test_a_value_that_is_no_number(wrong: Any) -> None:
    optimizer = grouped(torch.optim.AdamW)
    set_grads(params_of(optimizer), 0)
    before = [param.detach().clone() for param in params_of(optimizer)]
    optimizer.param_groups[1]["lr"] = wrong
    with pytest.raises(TypeError, match="lr must be a number"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_a_tensor_that_became_bad_in_place() -> None:
    optimizer = TorchOptimizer(parameters(1), adamw(torch.tensor(0.1)))
    set_grads(params_of(optimizer), 0)
    optimizer.step()
    before = [param.detach().clone() for param in params_of(optimizer)]
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_a_missing_option_is_named() -> None:
    optimizer = grouped(torch.optim.AdamW)
    set_grads(params_of(optimizer), 0)
    before = [param.detach().clone() for param in params_of(optimizer)]
    del optimizer.param_groups[1]["eps"]
    with pytest.raises(KeyError, match="eps"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_an_option_that_needs_another_state_is_refused_before_anything_changes() -> None:
    # In mid-run, as torch.optim.Adam, which has no such buffer then either.
    optimizer = grouped(torch.optim.AdamW)
    set_grads(params_of(optimizer), 0)
    optimizer.step()
    before = [param.detach().clone() for param in params_of(optimizer)]
    optimizer.param_groups[1]["amsgrad"] = True
    with pytest.raises((KeyError, ValueError), match="max_exp_avg_sq"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_an_option_under_a_name_of_two_stages_is_not_taken_silently() -> None:
    # Both decays have a weight_decay: its plain name means neither.
    both = chain(adamw(0.1).links[1], sgd(0.1, weight_decay=0.2))
    assert "weight_decay" not in both.hyper
    with pytest.raises((TypeError, ValueError), match="weight_decay"):
        TorchOptimizer([{"params": parameters(1), "weight_decay": 0.0}], both)


def test_options_that_others_put_into_a_group_are_left_there() -> None:
    optimizer = TorchOptimizer(
        [{"params": parameters(1), "initial_lr": 0.1, "name": "all"}],
        chain(clip_by_value(1.0), sgd(0.1)),
    )
    set_grads(params_of(optimizer), 0)
    optimizer.step()
    assert optimizer.param_groups[0]["name"] == "all"
