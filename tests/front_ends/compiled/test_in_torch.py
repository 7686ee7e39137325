"""Registration in torch's own functional map, in one process.

The tests in ../ranks use several processes.
"""

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from functional_optim import (
    as_functional_optim,
    chain,
    clip_by_global_norm,
    functional_optim_map,
    qhm,
    register_functional_optim,
    sgd,
)
from tests.choices import each
from tests.front_ends.support import CLASSES, assert_same_tensors, parameters, set_grads

with warnings.catch_warnings():
    # torch deprecates its own TorchScript, which it uses to build this package on import.
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    from torch.distributed.optim import DistributedOptimizer, utils
    from torch.distributed.optim import optimizer as torch_distributed_optimizer


class QHM(torch.optim.Optimizer):
    """Class that torch does not know, as in torch's recipe. Its defaults differ from qhm's."""

    def __init__(self, params: Any, lr: float = 0.25, momentum: float = 0.5, nu: float = 0.7):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nu": nu})


@pytest.fixture(autouse=True)
def torch_s_map_as_it_was(registry_as_it_was: None) -> Iterator[None]:
    before = dict(utils.functional_optim_map)
    yield
    utils.functional_optim_map.clear()
    utils.functional_optim_map.update(before)


def test_the_recipe_s_attribute_does_not_exist_and_ours_is_found_without_it() -> None:
    # The recipe says: DistributedOptimizer.functional_optim_map[QHM] = FunctionalQHM.
    assert not hasattr(DistributedOptimizer, "functional_optim_map")
    assert QHM not in torch_distributed_optimizer.functional_optim_map
    register_functional_optim(QHM, qhm, in_torch=True)
    assert QHM in torch_distributed_optimizer.functional_optim_map
    assert as_functional_optim(QHM, lr=0.1) == qhm(0.1, 0.5, 0.7)
    assert isinstance(utils.as_functional_optim(QHM, lr=0.1), torch.jit.ScriptModule)


@each(key=[QHM, "QHM", ("QHM", 2)])
def test_what_torch_gets_steps_bit_for_bit(key: Any) -> None:
    register_functional_optim(key, qhm, in_torch=True)
    theirs, ours = parameters(), parameters()
    module = utils.functional_optim_map[key](theirs, lr=0.1, momentum=0.9, nu=0.6)
    optimizer = qhm(0.1, 0.9, 0.6)
    state = optimizer.init(ours)
    for seed in range(4):
        set_grads(ours, seed, without={seed % 3})
        grads = [param.grad for param in ours]
        module.step(grads)
        optimizer.update_(ours, grads, state)
    module.step_param(theirs[0], torch.ones(3, 4))
    optimizer.update_(ours, [torch.ones(3, 4), None, None, None], state)
    assert_same_tensors(theirs, ours)


def test_what_torch_gets_has_a_param_group() -> None:
    register_functional_optim("qhm", qhm, in_torch=True)
    params = parameters()
    group = utils.functional_optim_map["qhm"](params, lr=0.1).param_group
    assert all(one is two for one, two in zip(group["params"], params, strict=True))
    assert {key: group[key] for key in ("lr", "momentum", "nu")} == {
        "lr": 0.1,
        "momentum": 0.999,
        "nu": 0.7,
    }


def test_no_parameters_only_where_torch_allows_it() -> None:
    register_functional_optim(QHM, qhm, in_torch=True)
    with pytest.raises(ValueError, match="empty"):
        utils.functional_optim_map[QHM]([])
    module = utils.functional_optim_map[QHM]([], _allow_empty_param_list=True)
    module.step([])
    module.step(gradients=[])
    assert module.param_group["params"] == []


OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"betas": (0.9, 0.99), "eps": 1e-6},
    "AdamW": {"betas": (0.9, 0.99), "eps": 1e-6},
    "RMSprop": {"momentum": 0.5},
}


@each(cls=CLASSES, made=["the map", "as_functional_optim"])
def test_what_is_made_without_parameters_steps_any(cls: Any, made: str) -> None:
    """Modules made without parameters step any parameter with the bits of torch's class."""
    register_functional_optim(cls, functional_optim_map[cls], replace=True, in_torch=True)
    options = {"lr": 0.1, **OPTIONS.get(cls.__name__, {})}
    if made == "the map":
        module = utils.functional_optim_map[cls]([], **options, _allow_empty_param_list=True)
    else:
        module = utils.as_functional_optim(cls, **options)
    assert isinstance(module, torch.jit.ScriptModule)
    assert hasattr(module, "step_param")
    theirs, ours = parameters(), parameters()
    optimizer = cls(theirs, foreach=False, **options)
    for seed in range(5):
        for params in (theirs, ours):
            set_grads(params, seed, without={seed % 3})
        optimizer.step()
        for param in reversed(ours):  # the order does not matter
            module.step_param(param, param.grad)
        assert_same_tensors(ours, theirs)


def test_each_object_made_without_parameters_has_its_own_state() -> None:
    register_functional_optim(QHM, qhm, in_torch=True)
    one, two = (utils.as_functional_optim(QHM, lr=0.1) for _ in range(2))
    (param,) = parameters(1, shapes=[(3,)])
    other = torch.nn.Parameter(param.detach().clone())
    for seed in range(3):
        set_grads([param, other], seed)
        other.grad = None if param.grad is None else param.grad.clone()
        one.step_param(param, param.grad)
        two.step_param(other, other.grad)
    assert_same_tensors([param], [other])


def test_what_step_param_refuses_without_parameters() -> None:
    """``step_param`` refuses a gradient of another shape, and a chain that needs all parameters.

    A gradient of None makes no step.
    """
    register_functional_optim("sgd", sgd, in_torch=True)
    module = utils.as_functional_optim("sgd", lr=0.5)
    param = torch.ones(3)
    module.step_param(param, None)
    with pytest.raises(ValueError, match="shape"):
        module.step_param(param, torch.ones(2))
    module.step_param(param, torch.ones(3))
    assert param.tolist() == [0.5, 0.5, 0.5]
    register_functional_optim(
        "clipped", lambda lr: chain(clip_by_global_norm(1.0), sgd(lr)), in_torch=True
    )
    with pytest.raises(ValueError, match="all parameters at once: make this optimizer with its"):
        utils.as_functional_optim("clipped", lr=0.5).step_param(param, torch.ones(3))


def test_defaults_in_torch_are_those_here() -> None:
    register_functional_optim(QHM, qhm, in_torch=True)
    here = as_functional_optim(QHM).hyper
    group = utils.functional_optim_map[QHM](parameters()).param_group
    assert {key: group[key] for key in here} == here


def test_arguments_of_a_torch_class_are_taken_in_torch_as_here() -> None:
    register_functional_optim(torch.optim.SGD, sgd, replace=True, in_torch=True)
    assert as_functional_optim(torch.optim.SGD, lr=0.1, foreach=False).hyper["lr"] == 0.1
    module = utils.functional_optim_map[torch.optim.SGD](parameters(), lr=0.1, foreach=False)
    assert module.param_group["lr"] == 0.1


def test_positions_in_torch_are_those_here() -> None:
    class Turned(torch.optim.Optimizer):
        def __init__(self, params: Any, momentum: float = 0.5, lr: float = 0.25) -> None:
            super().__init__(params, {"lr": lr, "momentum": momentum})

    register_functional_optim(Turned, qhm, in_torch=True)
    here = as_functional_optim(Turned, 0.9, 0.1).hyper
    group = utils.functional_optim_map[Turned](parameters(), 0.9, 0.1).param_group
    assert (group["lr"], group["momentum"]) == (here["lr"], here["momentum"]) == (0.1, 0.9)


def test_without_in_torch_torch_is_left_alone() -> None:
    before = dict(utils.functional_optim_map)
    register_functional_optim(QHM, qhm)
    register_functional_optim(torch.optim.SGD, sgd, replace=True)
    assert utils.functional_optim_map == before


def test_a_key_that_torch_has_needs_replace_and_is_then_nowhere_registered() -> None:
    utils.functional_optim_map["theirs"] = object
    with pytest.raises(ValueError, match="replace=True"):
        register_functional_optim("theirs", qhm, in_torch=True)
    assert "theirs" not in functional_optim_map
    assert utils.functional_optim_map["theirs"] is object
    register_functional_optim("theirs", qhm, in_torch=True, replace=True)
    assert functional_optim_map["theirs"] is qhm
    assert utils.functional_optim_map["theirs"] is not object


def test_a_key_that_we_have_is_refused_before_torch_is_changed() -> None:
    register_functional_optim(QHM, qhm)
    with pytest.raises(ValueError, match="replace=True"):
        register_functional_optim(QHM, sgd, in_torch=True)
    assert QHM not in utils.functional_optim_map


def test_what_torch_gets_can_be_sent_to_a_worker() -> None:
    register_functional_optim("qhm", qhm, in_torch=True)
    made = utils.functional_optim_map["qhm"]
    assert pickle.loads(pickle.dumps(made)) == made


@each(options=[{"lr": -0.1}, {"momentum": 1.0}])
def test_values_out_of_bounds_are_refused_in_torch_too(options: dict[str, float]) -> None:
    register_functional_optim("qhm", qhm, in_torch=True, replace=True)
    with pytest.raises(ValueError, match="must be"):
        utils.functional_optim_map["qhm"](parameters(), **options)
