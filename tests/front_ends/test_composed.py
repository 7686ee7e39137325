"""TorchOptimizer over composed optimizers, in which every group has one chain."""

import copy
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    apply_if_finite,
    chain,
    muon,
    partition,
    prodigy,
    sgd,
)

from ..choices import case
from ..composition.test_views import POLYAK
from ..composition.trees import COMPOSED, HOLES, STEPS, grads_at, params_of, run_of, two_parts
from ..tensors import assert_same, normal


def named() -> dict[str, torch.Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


def step_at(
    optimizer: TorchOptimizer, params: Mapping[str, Any], step: int, missing: Any = HOLES
) -> None:
    for name, grad in grads_at(step, missing=missing).items():
        params[name].grad = grad
    optimizer.step()


@pytest.mark.parametrize("name", COMPOSED)
def test_it_is_the_optimizer_itself(name: str) -> None:
    """TorchOptimizer has the parameters, view, scalars and step counts of the pure update."""
    params, chosen = named(), COMPOSED[name]()
    optimizer = TorchOptimizer(params.items(), chosen)
    for step in range(STEPS):
        step_at(optimizer, params, step)
    want, state = run_of(chosen, missing=HOLES)
    assert_same({one: p.detach() for one, p in params.items()}, want)
    seen = optimizer.view()
    assert isinstance(seen, dict)
    assert_same({one: seen[one].clone() for one in want}, chosen.view(want, state))
    assert optimizer.shared == chosen.shared(state)
    for one, param in params.items():
        if optimizer.state[param]:
            assert int(optimizer.state[param]["step"]) == int(state.leaves[one].step)


@pytest.mark.parametrize("name", COMPOSED)
def test_a_checkpoint_goes_on_in_the_middle(name: str) -> None:
    """A run continues bit for bit from a saved checkpoint or a deep copy after any step."""
    params, chosen = named(), COMPOSED[name]()
    optimizer = TorchOptimizer(params.items(), chosen)
    for step in range(STEPS):
        step_at(optimizer, params, step)
        saved = optimizer.state_dict()
        if step % 2:
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file)
            params = {one: p.detach().clone().requires_grad_() for one, p in params.items()}
            optimizer = TorchOptimizer(params.items(), chosen)
            optimizer.load_state_dict(saved)
        else:
            params, optimizer = copy.deepcopy((params, optimizer))
    assert_same({one: p.detach() for one, p in params.items()}, run_of(chosen, missing=HOLES)[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, param in params_of().items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(param))


@pytest.mark.parametrize("name", ["clip over parts", "finite batches", "sam", "global step"])
def test_torchs_distributed_checkpoints_hold_all_of_it(name: str) -> None:
    results = []
    for stops in (False, True):
        model, chosen = Model(), COMPOSED[name]()
        optimizer = TorchOptimizer(model.named_parameters(), chosen)
        for step in range(5):
            for key, param in model.named_parameters():
                grads = grads_at(step)
                param.grad = grads[key if key in grads else key.replace("_", ".")]
            optimizer.step()
            if stops and step == 2:
                for flat in (False, True):
                    options = StateDictOptions(flatten_optimizer_state_dict=flat)
                    saved = get_optimizer_state_dict(model, optimizer, options=options)
                    optimizer = TorchOptimizer(model.named_parameters(), chosen)
                    set_optimizer_state_dict(model, optimizer, saved, options=options)
        results.append([param.detach().clone() for param in model.parameters()])
    assert_same(results[0], results[1])


def test_each_group_has_the_options_of_its_chain() -> None:
    optimizer = TorchOptimizer(named().items(), two_parts())
    groups = {tuple(group["param_names"]): group for group in optimizer.param_groups}
    assert groups["body.weight", "head.weight"]["momentum"] == 0.9
    assert groups["body.bias", "scale"]["betas"] == (0.9, 0.999)
    assert [set(group) & {"momentum", "betas"} for group in optimizer.param_groups] == [
        {"momentum"},
        {"betas"},
    ]


def test_a_scheduler_of_torch_changes_every_part() -> None:
    params = named()
    optimizer = TorchOptimizer(params.items(), two_parts())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step_at(optimizer, params, 0)
    scheduler.step()
    step_at(optimizer, params, 1)
    start: Any = params_of()
    state = two_parts().init(start)
    start, state = two_parts().update(start, grads_at(0, missing=HOLES), state)
    halved = {"matrices.lr": 0.05, "rest.lr": 0.005}
    start, state = two_parts().update(start, grads_at(1, missing=HOLES), state, **halved)
    assert_same({one: p.detach() for one, p in params.items()}, start)


def test_groups_of_the_caller_are_divided_and_keep_their_options() -> None:
    params = named()
    first = [(name, params[name]) for name in ("body.weight", "body.bias")]
    second = [(name, params[name]) for name in ("head.weight", "scale")]
    optimizer = TorchOptimizer([{"params": first, "lr": 0.5}], two_parts())
    optimizer.add_param_group({"params": second, "weight_decay": 0.25})
    found = [(g["param_names"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [
        (["body.weight"], 0.5, 0.0),
        (["body.bias"], 0.5, 0.01),
        (["head.weight"], 0.1, 0.25),
        (["scale"], 0.01, 0.25),
    ]


def test_the_loss_of_a_closure_is_an_input_for_who_needs_it() -> None:
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    optimizer = TorchOptimizer([weight], chain(POLYAK(lr=1.0)))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)  # the step size is loss / |g|^2 = 1/2
    torch.testing.assert_close(weight.detach(), torch.tensor([1.5, 2.0]))
    with pytest.raises(TypeError, match="polyak needs 'loss'"):
        optimizer.step()
    optimizer.step(extra={"loss": 0.0})
    torch.testing.assert_close(weight.detach(), torch.tensor([1.5, 2.0]))


def broken(name: str, saved: dict[str, Any]) -> str:
    groups = saved["param_groups"]
    if name == "a number is missing":
        del groups[0]["accumulate.shared.calls"]
        return r"has no accumulate\.shared\.calls"
    if name == "groups differ":
        groups[1]["accumulate.shared.calls"] = 2.0
        return "groups differ"
    saved["state"][0].pop("accumulated")
    return "does not fit"


def test_shared_numbers_of_steps_in_place_are_no_part_of_a_graph() -> None:
    """Shared scalars hold no graph, if totals come from parameters that require gradients."""
    params, optimizer = named(), TorchOptimizer(named().items(), prodigy())
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    chosen = prodigy()
    state = chosen.init(params_of())
    for _ in range(2):
        optimizer.step()
        chosen.update_(params, {name: torch.ones_like(p) for name, p in params.items()}, state)
    for shared in (optimizer._chains.shared, state.shared):
        assert not any(one.requires_grad for record in shared.stages for one in record)
    assert optimizer.shared == chosen.shared(state)


def test_shared_numbers_of_a_step_without_a_plan_count_in_the_next_one() -> None:
    """In the step without a plan, the parameters share memory."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, own = TorchOptimizer(params, chain(apply_if_finite(1), sgd(0.1))), params[1].data
    for step, value in enumerate((1.0, 1.0, torch.nan, 1.0, torch.nan, 1.0)):
        for param in params:
            param.grad = torch.full((2,), value)
        params[1].data = params[0].data if step == 3 else own
        optimizer.step()
    assert optimizer.shared["apply_if_finite"].skipped == 2.0
    assert optimizer.shared["apply_if_finite"].skipped_in_a_row == 0.0


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    chosen = COMPOSED["batches of parts"]
    for name in ("a number is missing", "groups differ", "a field is missing"):
        with case(name=name):
            params = named()
            optimizer = TorchOptimizer(params.items(), chosen())
            step_at(optimizer, params, 0)
            before = copy.deepcopy(optimizer.state_dict())
            saved = copy.deepcopy(before)
            told = broken(name, saved)
            with pytest.raises(ValueError, match=told):
                optimizer.load_state_dict(saved)
            assert_same(optimizer.state_dict()["state"], before["state"])
            assert optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_of_unnamed_parameters_the_shape_tells() -> None:
    params = params_of()
    leaves = [one.requires_grad_() for one in params.values()]
    optimizer = TorchOptimizer(leaves, two_parts())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def test_a_plain_chain_has_nothing_of_it() -> None:
    optimizer: Optimizer = adamw(0.1)
    made = TorchOptimizer([normal(2).requires_grad_()], optimizer)
    assert made.shared == {} and len(made.view()) == 1
    with pytest.raises(TypeError, match="no stage takes the input 'loss'"):
        TorchOptimizer([normal(2).requires_grad_()], sgd()).step(extra={"loss": 1.0})


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("kind", ["sparse", "kernel"])
def test_a_group_that_is_refused_leaves_every_group_as_it_was(
    fused_on_the_cpu: None, kind: str, steps_before: int
) -> None:
    """A refused group changes no group, at the first step and in a planned step."""
    vector, matrix = (nn.Parameter(normal(*shape)) for shape in ((3,), (4, 2)))
    optimizer = TorchOptimizer(
        [vector, matrix],
        partition({"v": sgd(0.1, momentum=0.9), "m": adamw(0.1)}, two_dimensional),
    )
    for number in range(steps_before):
        vector.grad, matrix.grad = normal(3, seed=number), normal(4, 2, seed=number)
        optimizer.step()
    vector.grad, matrix.grad = normal(3, seed=7), normal(4, 2, seed=7)
    if kind == "sparse":
        matrix.grad = matrix.grad.to_sparse(1)
    else:
        optimizer = TorchOptimizer(
            [vector, matrix],
            partition({"v": sgd(0.1), "m": muon(0.1)}, two_dimensional).using(executor="fused"),
        )
    before = copy.deepcopy([vector, matrix])
    steps = [int(state["step"]) for state in optimizer.state.values()]
    with pytest.raises((RuntimeError, ValueError), match=r"param_groups\[1\]\[0\]"):
        optimizer.step()
    assert_same([vector, matrix], before)
    now = [int(state["step"]) for state in optimizer.state.values()]
    assert now == (steps or [0] * len(now))


def two_dimensional(path: Any, shape: Any) -> str:
    return "m" if len(shape) == 2 else "v"
