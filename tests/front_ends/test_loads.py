"""Loads: failures change nothing, odd checkpoints load as in torch's classes, and hooks run."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adam,
    adamw,
    chain,
    lookahead,
    prodigy,
    rmsprop,
    schedule_free_adamw,
    sgd,
    weight_decay,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from tests.choices import case, each

from .support import (
    Params,
    Twins,
    assert_same_params,
    assert_same_tensors,
    assert_same_written,
    parameters,
    params_of,
    run,
    twins,
)


def in_groups(params: Params) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]


def started(optimizer: Any = None) -> TorchOptimizer:
    made = TorchOptimizer(in_groups(parameters()), optimizer or adamw(0.1))
    run(made, 0, 1)
    return made


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no second group": (
        lambda saved: saved["param_groups"].pop(),
        "a different number of parameter groups",
    ),
    "a shorter group": (
        lambda saved: saved["param_groups"][1]["params"].pop(),
        "a parameter group that doesn't match the size",
    ),
    "a missing field": (
        lambda saved: saved["state"][2].pop("exp_avg"),
        r"'params\[1\]' does not fit this optimizer: .*\(differing: exp_avg\)",
    ),
    "an unknown field": (
        lambda saved: saved["state"][3].update(cube=torch.ones(2, 3)),
        r"'params\[2\]' does not fit this optimizer: .*\(differing: cube\)",
    ),
    "another shape": (
        lambda saved: saved["state"][1].update(exp_avg_sq=torch.zeros(2)),
        r"at 'params\[0\]' is of another tree: exp_avg_sq has shape \(2,\), .*\(37,\)",
    ),
    "out of bounds": (
        lambda saved: saved["param_groups"][1].update(betas=(0.9, 1.5)),
        r"adamw: betas\[1\] must be a number >= 0 and < 1, got 1\.5",
    ),
    "other options": (
        lambda saved: saved["param_groups"][0].update(amsgrad=True),
        r"'params\[0\]' does not fit this optimizer: .*\(differing: max_exp_avg_sq\)",
    ),
    "no lr": (
        lambda saved: saved["param_groups"][1].pop("lr"),
        r"a parameter group has no lr: it is of another optimizer than adamw\(",
    ),
}
"""Faults of a checkpoint, and the messages of their errors."""


@each(what=["text", 3.5, [1, 2]], loaded=[True, False])
def test_an_entry_of_state_that_is_no_tensor_is_named(what: Any, loaded: bool) -> None:
    """The entry is named, if it replaces a tensor of the state, or if its name is unknown."""
    for key, error, match in (
        ("exp_avg", TypeError, r"has .* as 'exp_avg', but must have a tensor"),
        ("mine", ValueError, r"does not fit this optimizer: .*\(differing: mine\)"),
    ):
        ours = started()
        saved = ours.state_dict()
        saved["state"][1] = {**saved["state"][1], key: what}
        if not loaded:
            ours.state[params_of(ours)[1]][key] = what
        with case(key=key), pytest.raises(error, match=match):
            ours.load_state_dict(saved) if loaded else run(ours, 2)


@each(name=BROKEN)
def test_a_broken_checkpoint_is_a_value_error_and_changes_nothing(name: str) -> None:
    ours, twin, other = (started() for _ in range(3))
    run(other, 9)
    saved = copy.deepcopy(other.state_dict())
    spoil, message = BROKEN[name]
    spoil(saved)
    before = repr(saved)
    state, groups = ours.state, ours.param_groups
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(saved)
    assert repr(saved) == before
    assert ours.state is state
    assert ours.param_groups is groups
    assert repr(ours.state_dict()) == repr(twin.state_dict())
    for one in (ours, twin):
        run(one, 5)
    assert_same_params(ours, twin)


@each(wrong=[{}, {"state": {}}, {"param_groups": []}, [], None, 3])
def test_what_is_no_checkpoint_changes_nothing(wrong: Any) -> None:
    ours, twin = started(), started()
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        ours.load_state_dict(wrong)
    assert repr(ours.state_dict()) == repr(twin.state_dict())
    run(ours, 5)


@each(optimizer=[rmsprop(0.1), sgd(0.1, momentum=0.9)], torchs=[False, True])
def test_a_checkpoint_of_another_class_is_a_value_error(optimizer: Optimizer, torchs: bool) -> None:
    ours = started(optimizer)
    before = repr(ours.state_dict())
    other = twins("AdamW", groups=in_groups).theirs if torchs else started()
    run(other, 0)
    with pytest.raises(ValueError, match="decoupled weight decay, and the chain has not"):
        ours.load_state_dict(other.state_dict())
    assert repr(ours.state_dict()) == before
    run(ours, 5)


@each(decay=[0.0, 0.1])
def test_another_weight_decay_is_found_in_options_with_names_of_parts(decay: float) -> None:
    ours = started(chain(weight_decay(decay), adam(0.1, weight_decay=decay)))
    saved = copy.deepcopy(ours.state_dict())
    for group in saved["param_groups"]:
        assert "weight_decay" not in group
        group["decoupled_weight_decay"] = True
    if decay:
        with pytest.raises(ValueError, match="decoupled weight decay, and the chain has not"):
            ours.load_state_dict(saved)
    else:
        ours.load_state_dict(saved)
    assert "decoupled_weight_decay" not in ours.param_groups[0]
    run(ours, 5)


def emptied(saved: dict[str, Any]) -> None:
    """Remove all state, as before the first step."""
    saved["state"] = {}


def with_numbers(saved: dict[str, Any]) -> None:
    """Replace step counts by plain numbers, as in old checkpoints."""
    for entries in saved["state"].values():
        entries["step"] = 1


def with_nones(saved: dict[str, Any]) -> None:
    """Replace the state by SGD's missing buffers."""
    saved["state"] = {number: {"momentum_buffer": None} for number in range(4)}


def with_more(saved: dict[str, Any]) -> None:
    """Add state that belongs to no parameter."""
    saved["state"]["note"] = {"by": "the user"}
    saved["state"]["number"] = 3


@each(
    given=[
        ("Adam", emptied),
        ("SGD momentum", emptied),
        ("Adam", with_numbers),
        ("SGD momentum", with_nones),
        ("Adam", with_more),
    ],
)
def test_an_odd_checkpoint_is_taken_as_torch_takes_it(given: Any) -> None:
    name, change = given
    pair = twins(name)
    pair.step(0)
    saved = copy.deepcopy(pair.theirs.state_dict())
    change(saved)
    pair.each(lambda one: one.load_state_dict(copy.deepcopy(saved)))
    if change is with_more:
        for one in pair.both:
            assert one.state_dict()["state"]["note"] == {"by": "the user"}
            assert one.state_dict()["state"]["number"] == 3
    for seed in (1, 2):
        pair.step(seed)
        pair.assert_same()


def stepped() -> Twins:
    pair = twins("AdamW")
    pair.step(0)
    return pair


def test_load_hooks_run_as_torch_s_do() -> None:
    def seen_by(one: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []

        def before(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            seen.append(sorted(saved))
            changed = copy.deepcopy(saved)
            changed["param_groups"][0]["lr"] = 0.125
            return changed

        handles = [
            one.register_load_state_dict_pre_hook(before),
            one.register_load_state_dict_post_hook(
                lambda optimizer: seen.append(optimizer.param_groups[0]["lr"])
            ),
            one.register_load_state_dict_post_hook(lambda _: seen.append("second")),
        ]
        saved = one.state_dict()
        one.load_state_dict(saved)
        assert saved["param_groups"][0]["lr"] == 0.1
        for handle in handles:
            handle.remove()
        one.load_state_dict(one.state_dict())
        return seen

    pair = stepped()
    assert seen_by(pair.ours) == seen_by(pair.theirs)
    assert pair.ours.param_groups[0]["lr"] == 0.125
    pair.step(1)
    pair.assert_same()


def test_a_load_pre_hook_that_writes_into_the_dict_does_not_reach_the_caller_s() -> None:
    ours = started()
    saved = copy.deepcopy(ours.state_dict())
    before = repr(saved)

    def hook(_: Any, given: dict[str, Any]) -> None:
        given["param_groups"][0]["lr"] = 0.125
        given["state"][0]["exp_avg"].zero_()

    ours.register_load_state_dict_pre_hook(hook)
    ours.load_state_dict(saved)
    assert repr(saved) == before
    assert ours.param_groups[0]["lr"] == 0.125
    assert not ours.state[params_of(ours)[0]]["exp_avg"].any()


def test_a_load_post_hook_finds_a_complete_state() -> None:
    ours = started()
    found: list[Any] = []
    ours.register_load_state_dict_post_hook(
        lambda one: found.extend(one.state[param]["step"].dtype for param in params_of(one))
    )
    saved = ours.state_dict()
    ours.load_state_dict({"state": {0: saved["state"][0]}, "param_groups": saved["param_groups"]})
    assert found == [torch.int64] * 4


def test_state_dict_hooks_run_as_torch_s_do_and_see_what_is_written() -> None:
    dicts: list[dict[str, Any]] = []

    def written_by(one: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        one.register_state_dict_pre_hook(lambda _: seen.append("pre"))

        def add(_: Any, saved: dict[str, Any]) -> None:
            seen.append(sorted(saved))
            dicts.append(dict(saved))
            saved["extra"] = 1

        handle = one.register_state_dict_post_hook(add)
        seen.append(sorted(one.state_dict()))
        handle.remove()
        instead = {"instead": 2}
        one.register_state_dict_post_hook(lambda *_: instead)
        assert one.state_dict() is instead
        return seen

    pair = stepped()
    assert written_by(pair.ours) == written_by(pair.theirs)
    assert_same_written(*dicts)


BEGIN_AT_PARAMS: dict[str, Callable[[], Optimizer]] = {
    "lookahead": lambda: chain(adamw(0.1), lookahead(2)),
    "prodigy": lambda: prodigy(1.0, d0=1e-2),
    "schedule-free": lambda: schedule_free_adamw(0.1),
}
"""Optimizers whose state starts from the parameters."""


@pytest.mark.parametrize("name", BEGIN_AT_PARAMS)
def test_a_frozen_parameter_may_be_loaded_after_the_state(name: str) -> None:
    """The order of loading the model and the optimizer does not matter for a frozen parameter.

    Its state starts from the parameter at the first step after it is unfrozen.
    """

    def made(scale: float) -> tuple[list[torch.Tensor], TorchOptimizer]:
        params = [scale * one.detach() for one in parameters()]
        params = [one.requires_grad_(k > 0) for k, one in enumerate(params)]
        return params, TorchOptimizer(params, BEGIN_AT_PARAMS[name]())

    def steps(params: list[torch.Tensor], optimizer: TorchOptimizer, *numbers: int) -> None:
        for number in numbers:
            for k, one in enumerate(params):
                one.grad = torch.full_like(one, number / (k + 1)) if one.requires_grad else None
            optimizer.step()

    params, optimizer = made(1.0)
    steps(params, optimizer, 1, 2, 3)
    saved, values = copy.deepcopy(optimizer.state_dict()), [one.detach() for one in params]
    found = []
    for is_model_first in (True, False):
        others, loaded = made(0.5)
        for now in (is_model_first, not is_model_first):
            if now:
                with torch.no_grad():
                    for one, value in zip(others, values, strict=True):
                        one.copy_(value)
            else:
                loaded.load_state_dict(saved)
        steps(others, loaded, 4)
        others[0].requires_grad_(True)
        steps(others, loaded, 5, 6)
        found.append(others)
    assert_same_tensors(*found)


@each(
    name=["step", "accumulate.runs"],
    count=[
        torch.tensor(-3.0),
        torch.tensor(2.5),
        torch.tensor(torch.nan),
        torch.tensor(torch.inf),
        torch.ones(2),
        -1,
    ],
)
def test_a_step_count_that_is_no_whole_number_is_refused(name: str, count: Any) -> None:
    """The error names the parameter and the count. Before, 2.5 was loaded as 2."""
    optimizer = adamw(0.1) if name == "step" else chain(accumulate(2), adamw(0.1))
    one = TorchOptimizer(in_groups(parameters()), optimizer)
    run(one, 0, 1)
    saved, before = copy.deepcopy(one.state_dict()), copy.deepcopy(one.state_dict())
    saved["state"][1][name] = count
    with pytest.raises(ValueError, match=rf"'params\[0\]' has .* as '{name}'; .* whole number"):
        one.load_state_dict(saved)
    assert_same_written(one.state_dict(), before)


def test_what_is_no_state_dict_of_an_optimizer_is_named() -> None:
    """A path, a checkpoint with several parts and a model's state dict are typical mistakes."""
    local = local_optimizer(torch.optim.AdamW, parameters())
    for optimizer in (TorchOptimizer(parameters(), adamw(0.1)), local):
        with pytest.raises(TypeError, match="got 'run.pt'; load the file first"):
            optimizer.load_state_dict("run.pt")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"has 'model', 'optimizer'; .*checkpoint\['optim"):
            optimizer.load_state_dict({"model": {}, "optimizer": {}})


def test_a_hook_may_turn_any_dict_into_a_state_dict() -> None:
    optimizer = TorchOptimizer(parameters(), adamw(0.1))
    run(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda one, given: given["optimizer"])
    optimizer.load_state_dict({"optimizer": saved})
    assert_same_written(optimizer.state_dict(), saved)
