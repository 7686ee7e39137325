"""Tests of the scalars of exported steps: inputs, fixed values, and their effect."""

from typing import Any

import pytest
import torch

from functional_optim import adagrad, adamw, chain, clip_by_global_norm, lion, rprop, sgd
from functional_optim.algorithms.sgd import SGD
from functional_optim.export import export_step
from functional_optim.transforms.decoupled_weight_decay import DECOUPLED_WEIGHT_DECAY
from tests.choices import each

from .stages import FED_CHOICE, HALVED, SIGNED
from .support import assert_same, grads_of, run_in_place, stepped, tree


def test_a_schedule_is_fed_step_by_step() -> None:
    optimizer, params = chain(clip_by_global_norm(1.0), adamw(lr=0.3)), tree()
    state = optimizer.init(params)
    exported = export_step(optimizer, params)
    feeds = [{"lr": 0.3 / (made + 1), "max_norm": 1.0 + made} for made in range(4)]
    found = run_in_place(exported, exported.program.module(), params, state, feeds)
    assert_same(found, stepped(optimizer, params, state, feeds))
    scheduled = optimizer.replace(
        lr=lambda made: 0.3 / (made + 1), max_norm=lambda made: 1.0 + made
    )
    assert_same(found, stepped(scheduled, params, state))


def test_each_number_of_a_pair_is_an_input() -> None:
    optimizer, params = lion(lr=0.1), tree()
    state = optimizer.init(params)
    exported = export_step(optimizer, params)
    assert list(exported.manifest["hyper"]) == ["lr", "betas[0]", "betas[1]"]
    feeds = [{"betas[0]": 0.5, "betas[1]": 0.25}] * 2
    found = run_in_place(exported, exported.program.module(), params, state, feeds)
    wanted = stepped(optimizer.replace(betas=(0.5, 0.25)), params, state, [{}] * 2)
    assert_same(found, wanted)


def test_an_override_is_an_input_of_its_own() -> None:
    optimizer = adamw(lr=0.1).override(("bias",), lr=0.2, weight_decay=0.5, amsgrad=True)
    optimizer = optimizer.override(lambda path: path[-1] == "scale", lr=0.4)
    params = tree()
    state = optimizer.init(params)
    exported = export_step(optimizer, params)
    assert exported.manifest["hyper"]["override_0.lr"] == 0.2
    assert exported.manifest["hyper"]["override_1.lr"] == 0.4
    assert exported.manifest["fixed"]["override_0.amsgrad"] is True
    assert exported.manifest["overrides"] == {"override_0": ["bias"], "override_1": ["scale"]}
    run = exported.program.module()
    found = run_in_place(exported, run, params, state, [{"lr": 0.7}] * 2)
    assert_same(found, stepped(optimizer, params, state, [{"lr": 0.7}] * 2))
    found = run_in_place(exported, run, params, state, [{"override_0.lr": 0.6}] * 2)
    wanted = stepped(optimizer.override(("bias",), lr=0.6), params, state, [{}] * 2)
    assert_same(found, wanted)


def test_a_stage_with_an_lr_of_its_own_keeps_it() -> None:
    decay = DECOUPLED_WEIGHT_DECAY(lr=0.5, weight_decay=0.1)
    optimizer, params = (
        chain(decay, SGD(lr=0.1, momentum=0.9, dampening=0.0, nesterov=False)),
        tree(),
    )
    state = optimizer.init(params)
    exported = export_step(optimizer, params)
    assert exported.manifest["hyper"]["lr"] == 0.1
    assert exported.manifest["hyper"]["decoupled_weight_decay.lr"] == 0.5
    found = run_in_place(exported, exported.program.module(), params, state)
    assert_same(found, stepped(optimizer, params, state))


def test_numbers_that_decide_a_choice_are_fixed() -> None:
    made = export_step(sgd(lr=0.1), tree()).manifest
    assert list(made["hyper"]) == ["lr"]
    assert made["fixed"]["momentum"] == 0.0
    assert made["fixed"]["nesterov"] is False
    made = export_step(sgd(lr=0.1, momentum=0.9), tree()).manifest
    assert list(made["hyper"]) == ["lr", "momentum", "dampening"]
    made = export_step(chain(FED_CHOICE(lr=0.1, beta=0.9)), tree()).manifest
    assert (list(made["hyper"]), made["fixed"]) == (["lr"], {"beta": 0.9})
    made = export_step(chain(HALVED(lr=0.1, beta=0.05)), tree()).manifest
    assert (list(made["hyper"]), made["fixed"]) == (["lr"], {"beta": 0.05})


def test_numbers_that_only_init_reads_are_fixed() -> None:
    assert export_step(rprop(lr=0.3), tree()).manifest["fixed"]["lr"] == 0.3
    fixed = export_step(adagrad(initial_accumulator_value=0.5), tree()).manifest["fixed"]
    assert fixed["initial_accumulator_value"] == 0.5


def test_only_the_inputs_asked_for() -> None:
    optimizer, params = adamw(lr=0.1), tree()
    exported = export_step(optimizer, params, inputs=["lr"])
    assert exported.manifest["hyper"] == {"lr": 0.1}
    assert exported.manifest["fixed"]["betas[1]"] == 0.999
    none = export_step(optimizer, params, inputs=[])
    assert none.manifest["hyper"] == {}
    state = optimizer.init(params)
    wanted = stepped(optimizer, params, state)
    for one in (exported, none):
        assert_same(run_in_place(one, one.program.module(), params, state), wanted)


@each(
    refused=[
        (adamw(), ["learning_rate"], r"no number 'learning_rate'; it has lr, .*betas\[0\]"),
        (adamw(), ["amsgrad"], "no number 'amsgrad'"),
        (sgd(), ["momentum"], "momentum cannot be fed, since sgd decides by it"),
        (sgd(), ["lr", "dampening"], "dampening cannot be fed, since no step .* reads it"),
        (chain(FED_CHOICE(lr=0.1, beta=0.9)), ["beta"], "fed_choice decides by it"),
    ]
)
def test_inputs_that_cannot_be(refused: Any) -> None:
    optimizer, inputs, said = refused
    with pytest.raises(ValueError, match=said):
        export_step(optimizer, {"w": torch.ones(2)}, inputs=inputs)


def test_tensors_are_taken_as_their_numbers() -> None:
    number = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    exported = export_step(adamw(lr=number), tree())
    assert exported.manifest["hyper"]["lr"] == 0.1


def test_arguments_are_checked() -> None:
    optimizer, params = chain(SIGNED(lr=0.1, beta=0.5)), tree()
    state, grads = optimizer.init(params), grads_of(params, 0)
    exported = export_step(optimizer, params)
    with pytest.raises(TypeError, match="'decay' is not an input of this program; .* lr, beta"):
        exported.arguments(params, grads, state, decay=0.1)
    with pytest.raises(TypeError, match="grads: bias must be a tensor, got NoneType"):
        exported.arguments(params, {**grads, "bias": None}, state)
    with pytest.raises(ValueError, match=r"grads: bias has shape \(2,\), .* exported for \(9,\)"):
        exported.arguments(params, {**grads, "bias": torch.ones(2)}, state)
    with pytest.raises(ValueError, match=r"params: bias has dtype torch.float64"):
        exported.arguments({**params, "bias": torch.ones(9).double()}, grads, state)
    with pytest.raises(ValueError, match="params: 1 tensors, the program was exported for 3"):
        exported.arguments(
            {"weight": params["weight"]},
            {"weight": grads["weight"]},
            optimizer.init({"weight": params["weight"]}),
        )
