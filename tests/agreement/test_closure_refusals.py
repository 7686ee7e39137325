"""Front-ends that cannot evaluate the loss refuse such optimizers, and say what to use."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import functional_optim as fo
from functional_optim import TorchOptimizer, lbfgs
from functional_optim.commands.objects import optimizer_factory
from functional_optim.frontends.local_optimizer import local_optimizer
from functional_optim.storage import mapped_state
from hooks import apply_optimizer_in_backward, step_hook
from hooks.averaging import OuterModelAverager
from sharding import ZeroRedundancyOptimizer, plan, specs_of

from ..choices import case

TREE = {"b": torch.ones(2), "a": torch.ones(2, 2)}
WAY = r"use update\(.*value_and_grad=f\), or TorchOptimizer\(params, lbfgs\(\.\.\.\)\)\.step\(closu"


def parameters() -> list[Tensor]:
    return [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]


class Mine(TorchOptimizer):
    """A user's subclass of TorchOptimizer."""


WAYS: dict[str, Callable[[], object]] = {
    "chain": lambda: fo.chain(fo.clip_by_global_norm(1.0), lbfgs()),
    "gate": lambda: fo.chain(fo.accumulate(2), lbfgs()),
    "masked": lambda: fo.masked(lbfgs(), ("a",)),
    "partition": lambda: fo.partition({"a": lbfgs()}, lambda path, shape: "a"),
    "stored": lambda: fo.stored(lbfgs(), param="bfloat16"),
    "mapped_state": lambda: mapped_state(lbfgs(), TREE, "."),
    "describe": lambda: fo.describe(lbfgs(), TREE),
    "export_step": lambda: fo.export_step(lbfgs(), TREE, "."),
    "bind": lambda: lbfgs().bind(TREE),
    "capturable": lambda: fo.CapturableOptimizer(lbfgs(), TREE),
    "BoundOptimizer": lambda: fo.BoundOptimizer(lbfgs(), TREE),
    "script": lambda: lbfgs().script(TREE),
    "update_": lambda: lbfgs().update_(TREE, TREE, lbfgs().init(TREE)),
    "override": lambda: lbfgs().override(("a",), lr=0.1),
    "step": lambda: lbfgs().step,
    "subclass": lambda: Mine(parameters(), lbfgs()),
    "DistributedOptimizer": lambda: fo.DistributedOptimizer.over_threads(
        torch.optim.LBFGS, torch.nn.Linear(2, 1), {"weight": "one", "bias": "two"}
    ),
    "workers": lambda: local_optimizer(lbfgs(), parameters()),
    "workers by class": lambda: local_optimizer(torch.optim.LBFGS, parameters(), lr=0.1),
    "workers by constructor": lambda: local_optimizer(lbfgs, parameters(), lr=0.1),
    "in backward": lambda: apply_optimizer_in_backward(lbfgs(), parameters(), {}),
    "in backward by constructor": lambda: apply_optimizer_in_backward(lbfgs, parameters(), {}),
    "outer": lambda: OuterModelAverager(parameters(), lbfgs(), 2),
    "plan": lambda: plan(specs_of(TREE), 2, optimizer=lbfgs()),
    "command": optimizer_factory("torch.optim:LBFGS"),
    "torch's functional map": lambda: fo.register_functional_optim("mine", lbfgs, in_torch=True),
}
ON_RANKS: dict[str, Callable[[], object]] = {
    "ZeRO": lambda: ZeroRedundancyOptimizer(parameters(), lbfgs()),
    "ZeRO by class": lambda: ZeroRedundancyOptimizer(parameters(), torch.optim.LBFGS, lr=0.1),
    "step_hook": lambda: step_hook(DistributedDataParallel(torch.nn.Linear(2, 1)), lbfgs()),
    "step_hook by class": lambda: step_hook(
        DistributedDataParallel(torch.nn.Linear(2, 1)), torch.optim.LBFGS
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_it_says_what_to_use(name: str) -> None:
    before = copy.deepcopy(TREE)
    with pytest.raises((TypeError, AttributeError), match=WAY):
        WAYS[name]()
    assert all(torch.equal(one, before[key]) for key, one in TREE.items())
    assert "mine" not in fo.functional_optim_map


def test_ranks_say_what_to_use(world_of_one: None) -> None:
    for name, run in ON_RANKS.items():
        with case(way=name), pytest.raises(TypeError, match=WAY):
            run()


def test_a_step_says_what_it_needs() -> None:
    optimizer, params = lbfgs(), parameters()
    ours = TorchOptimizer(params, optimizer)
    with pytest.raises(TypeError, match=r"write step\(closure\), with a function"):
        ours.step()
    with pytest.raises(TypeError, match="extra= must be empty"):
        ours.step(params[0].sum, extra={"loss": 1.0})
    state = optimizer.init(TREE)
    with pytest.raises(TypeError, match=r"value_and_grad=f\) a function f\(params\) -> \(loss, gr"):
        optimizer.update(TREE, TREE, state)
    with pytest.raises(TypeError, match=r"must return \(loss, grads\), got"):
        optimizer.update(TREE, None, state, value_and_grad=lambda given: given["a"].sum())
    with pytest.raises(TypeError, match="loops"):
        optimizer.update(TREE, TREE, state, value_and_grad=lambda given: (1.0, given), loops=1)


WRONG_TREES: dict[str, tuple[Any, Any, str]] = {
    "another tree of gradients": (TREE, {"a": torch.ones(2, 2)}, "no gradients at 'b'"),
    "another shape": (TREE, {"a": torch.ones(2), "b": None}, "at 'a' has shape"),
    "another dtype": (TREE, {"a": None, "b": torch.ones(2).double()}, "at 'b' has dtype"),
    "a gradient of none": ({**TREE, "b": None}, TREE, "where params have None"),
    "whole numbers": ({"b": torch.ones(2, dtype=torch.int64)}, None, "must be floating or complex"),
    "no parameter": ({"b": None}, None, "has no tensor"),
    "devices": ({**TREE, "c": torch.ones(1, device="meta")}, None, "on meta, and the one at 'b'"),
    "renamed": ({"b": TREE["b"], "c": TREE["a"]}, None, "of another tree"),
    "in another order": (dict(reversed(TREE.items())), None, "of another tree"),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_what_does_not_fit_is_named(name: str) -> None:
    params, grads, text = WRONG_TREES[name]
    optimizer = lbfgs()
    state = optimizer.init(params if name == "a gradient of none" else TREE)
    with pytest.raises(ValueError, match=text):
        optimizer.update(params, grads, state, value_and_grad=lambda given: (0.0, given))


def test_a_state_of_another_optimizer_is_refused() -> None:
    for state in (fo.sgd().init(TREE), None, ()):
        with pytest.raises(ValueError, match="state must be a LBFGSState"):
            lbfgs().update(TREE, TREE, state, value_and_grad=lambda given: (0.0, given))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr": -1}, ValueError, "lbfgs: lr must be a finite number >= 0, got -1"),
        ({"lr": float("nan")}, ValueError, "lbfgs: lr must be"),
        ({"lr": fo.cosine(0.1, steps=3)}, TypeError, "lbfgs: lr must be a number, got .*scheduler"),
        ({"lr": 0.0, "line_search_fn": "strong_wolfe"}, ValueError, "lr must be > 0"),
        ({"max_iter": -1}, ValueError, "max_iter must be a whole number"),
        ({"max_iter": 2.5}, TypeError, "max_iter must be a whole number"),
        ({"history_size": 0}, ValueError, "history_size must be a whole number"),
        ({"line_search_fn": "armijo"}, ValueError, "must be None or 'strong_wolfe', got 'armijo'"),
        ({"momentum": 0.9}, TypeError, "momentum"),
    ],
)
def test_values_out_of_bounds(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        lbfgs(**options)
    if error is ValueError:
        with pytest.raises(error, match=text):
            lbfgs().replace(**options)


def test_one_parameter_group_as_in_torch() -> None:
    groups: list[Any] = [{"params": [one]} for one in parameters()]
    with pytest.raises(ValueError, match="one parameter group"):
        TorchOptimizer(groups, lbfgs())
    optimizer = TorchOptimizer([{"params": parameters(), "lr": 0.25}], lbfgs())
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match="one parameter group"):
        optimizer.add_param_group({"params": parameters()})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="momentum"):
        TorchOptimizer([{"params": parameters(), "momentum": 0.9}], lbfgs())
    with pytest.raises(ValueError, match="lr must be"):
        TorchOptimizer([{"params": parameters(), "lr": -1.0}], lbfgs())
    tree: Any = tuple({"w": one} for one in parameters())
    with pytest.raises(ValueError, match="one parameter group"):
        fo.to_torch_state_dict(lbfgs(), tree, lbfgs().init(tree))


def test_options_of_the_group_are_checked_before_the_closure_is_called() -> None:
    optimizer = TorchOptimizer(parameters(), lbfgs())
    optimizer.param_groups[0]["lr"] = -1.0

    def closure() -> Any:
        raise AssertionError

    with pytest.raises(ValueError, match="lr must be"):
        optimizer.step(closure)


def test_checkpoints_that_do_not_fit_change_nothing() -> None:
    params = parameters()
    optimizer = TorchOptimizer(params, lbfgs(lr=0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((one.square().sum() for one in params), torch.zeros(()))
        loss.backward()
        return loss

    optimizer.step(closure)
    kept = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(kept)
    wrong["state"][0]["d"] = torch.ones(4)
    missing = copy.deepcopy(kept)
    del missing["state"][0]["ro"]
    negative = copy.deepcopy(kept)
    negative["param_groups"][0]["lr"] = -1.0
    for given, text in ((wrong, "vectors of 4"), (missing, "has no ro"), (negative, "lr must be")):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(given)
        now = optimizer.state_dict()
        assert now["param_groups"] == kept["param_groups"]
        assert torch.equal(now["state"][0]["d"], kept["state"][0]["d"])
    named = TorchOptimizer([("a", params[0]), ("b", params[1])], lbfgs())
    other = TorchOptimizer([("b", params[1]), ("a", params[0])], lbfgs())
    with pytest.raises(ValueError, match="in another order"):
        named.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="does not load the state of lbfgs"):
        fo.to_torch_state_dict(lbfgs(), TREE, lbfgs().init(TREE), torch.optim.SGD)
