"""Parameters that share a part of their memory, which each front-end refuses before any change."""

import copy
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from functional_optim import (
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    export_step,
    lbfgs,
    partition,
    sgd,
)
from functional_optim.frontends.local_optimizer import local_optimizer
from functional_optim.remote import DistributedOptimizer
from hooks import step_hook
from hooks.in_backward import apply_optimizer_in_backward
from sharding import MatrixOwnerOptimizer, ZeroRedundancyOptimizer
from tests.choices import case, each_value

pytestmark = pytest.mark.usefixtures("world_of_one")

Named = Mapping[str, nn.Parameter]


def overlapping() -> dict[str, nn.Parameter]:
    """Return a separate matrix, and a matrix and a vector that share two elements."""
    memory = torch.arange(12.0)
    parts = {"first": memory[8:].view(2, 2), "second": memory[:6].view(2, 3), "third": memory[4:8]}
    return {name: nn.Parameter(one) for name, one in parts.items()}


SHARED = r"parameters '{}' of shape \(2, 3\) and '{}' of shape \(4,\) share a part of their memory"


class Holder(nn.Module):
    """Module with given parameters."""

    def __init__(self, params: Named) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)


class Unknown(torch.optim.SGD):
    """Class without a functional equivalent."""


def own_matrices(params: Named) -> Any:
    """Own a sharded matrix and these parameters."""
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return MatrixOwnerOptimizer([*model.named_parameters(), *params.items()], adamw())


def two_parts() -> Any:
    return partition(
        {"matrices": sgd(0.1), "rest": adamw()},
        lambda path, shape: "matrices" if len(shape) == 2 else "rest",
    )


DOORS: dict[str, Callable[[Named], Any]] = {
    "TorchOptimizer": lambda params: TorchOptimizer(params.items(), adamw()),
    "TorchOptimizer of parts": lambda params: TorchOptimizer(params.items(), two_parts()),
    "TorchOptimizer with closures": lambda params: TorchOptimizer(params.items(), lbfgs()),
    "local_optimizer": lambda params: local_optimizer(adamw(), params.items()),
    "local_optimizer of a class": lambda params: local_optimizer(torch.optim.SGD, params.items()),
    "bind": lambda params: adamw().bind(dict(params)),
    "script": lambda params: adamw().script(dict(params)),
    "export": lambda params: export_step(adamw(), dict(params)),
    "ZeRO": lambda params: ZeroRedundancyOptimizer(params.items(), adamw()),
    "ZeRO in buffers": lambda params: ZeroRedundancyOptimizer(
        params.items(), adamw(), parameters_as_bucket_view=True
    ),
    "step_hook": lambda params: step_hook(DistributedDataParallel(Holder(params)), adamw()),
    "MatrixOwnerOptimizer": own_matrices,
    "threads": lambda params: DistributedOptimizer.over_threads(
        adamw(), params.items(), {name: name for name in params}
    ),
    "in backward": lambda params: apply_optimizer_in_backward(
        adamw(), params.items(), {}, ddp=False
    ),
}


@each_value(door=DOORS)
def test_each_front_end_refuses_them_by_name_and_changes_nothing(door: Any) -> None:
    params = overlapping()
    before = {name: (one.data_ptr(), one.tolist()) for name, one in params.items()}
    with pytest.raises(ValueError, match=SHARED.format("second", "third") + ".*clone()"):
        door(params)
    assert {name: (one.data_ptr(), one.tolist()) for name, one in params.items()} == before
    assert not any(vars(one) for one in params.values())


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_a_class_of_the_caller_is_not_built() -> None:
    with pytest.raises(ValueError, match="share a part of their memory"):
        local_optimizer(Unknown, overlapping().values(), lr=0.1)


GROUPED: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "TorchOptimizer": lambda groups: TorchOptimizer(groups, adamw()),
    "local_optimizer": lambda groups: local_optimizer(adamw(), groups),
    "ZeRO": lambda groups: ZeroRedundancyOptimizer(groups, adamw()),
}


@each_value(door=GROUPED)
def test_without_names_the_error_has_the_group_and_the_number(door: Any) -> None:
    first, second, third = overlapping().values()
    told = [re.escape(one) for one in ("param_groups[0][1]", "param_groups[1][0]")]
    with pytest.raises(ValueError, match=SHARED.format(*told)):
        door([{"params": [first, second]}, {"params": (one for one in [third]), "lr": 0.5}])
    told = [re.escape(one) for one in ("param_groups[1][0]", "param_groups[1][1]")]
    with pytest.raises(ValueError, match=SHARED.format(*told)):
        door([{"params": first}, {"params": [second, third]}])


GROWING: dict[str, Callable[[Named], Any]] = {
    "TorchOptimizer": DOORS["TorchOptimizer"],
    "a copy": lambda params: copy.copy(TorchOptimizer(params.items(), adamw())),
    "parts": DOORS["TorchOptimizer of parts"],
    "ZeRO": DOORS["ZeRO"],
    "ZeRO in buffers": DOORS["ZeRO in buffers"],
    "MatrixOwnerOptimizer": own_matrices,
}


@each_value(door=GROWING)
def test_a_group_that_overlaps_another_is_refused_and_changes_nothing(door: Any) -> None:
    params = overlapping()
    third = params.pop("third")
    optimizer = door(params)
    if params["second"].data_ptr() != third.data_ptr() - 16:  # it was moved into a flat buffer
        memory = torch.empty(0).set_(params["second"].untyped_storage())
        start = params["second"].storage_offset() + 4
        third = nn.Parameter(memory[start : start + 4])
    count, held = len(optimizer.param_groups), len(optimizer.state)
    for _ in range(2):
        with pytest.raises(ValueError, match=SHARED.format("second", "third")):
            optimizer.add_param_group({"params": [("third", third)]})
        assert (len(optimizer.param_groups), len(optimizer.state)) == (count, held)
    optimizer.add_param_group({"params": [("third", nn.Parameter(third.detach().clone()))]})
    assert len(optimizer.param_groups) > count


def test_a_group_that_overlaps_itself_is_refused_after_a_copy_too() -> None:
    """A copy and an unpickled optimizer check new groups."""
    optimizer = TorchOptimizer([nn.Parameter(torch.ones(2))], sgd(0.1))
    for own in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(ValueError, match=r"'param_groups\[1\]\[1\]' of shape \(2, 3\)"):
            own.add_param_group({"params": list(overlapping().values())})
        assert len(own.param_groups) == 1


MATRIX = (6, 4)
APART: dict[str, tuple[Callable[[Tensor], list[Tensor]], Callable[[Tensor], list[Tensor]]]] = {
    "flat buffer": (
        lambda m: list(m.view(-1).split(5)),
        lambda m: [*m.view(-1).split(5), m.view(-1)[4:6]],
    ),
    "rows": (lambda m: [m[:3], m[3:]], lambda m: [m[:3], m[2:]]),
    "columns": (lambda m: list(m.unbind(1)), lambda m: [m[:, 0], m[:, 2:], m[:, 1:3]]),
    "blocks": (
        lambda m: [m[:3, :2], m[:3, 2:], m[3:, :2], m[3:, 2:]],
        lambda m: [m[:3, :2], m[3:, :2], m[2:, 1:]],
    ),
    "a row below a block": (lambda m: [m[:2, 1:], m[2], m[3:]], lambda m: [m[:3, 1:], m[2], m[3:]]),
    "every other element": (
        lambda m: [m.view(-1)[::2], m.view(-1)[1::2]],
        lambda m: [m.view(-1)[::2], m.view(-1)[1::3]],
    ),
    "a transposed matrix": (
        lambda m: [m[:4].t(), m[4:].t()],
        lambda m: [m[:4].t(), m[3:].t()],
    ),
    "parts of a complex tensor": (
        lambda m: [torch.view_as_complex(m.view(-1, 2)).real, m.view(-1)[1::2]],
        lambda m: [torch.view_as_complex(m.view(-1, 2))[:3], m.view(-1)[1::2]],
    ),
    "the same elements": (lambda m: [m, m.view(-1)], lambda m: [m, m.view(-1)[:-1]]),
}
"""Views without a common element, or with all elements in common, and views with only some."""


@each_value(views=APART)
def test_views_are_refused_if_and_only_if_they_share_some_elements(views: Any) -> None:
    apart, shared = views
    params = [nn.Parameter(one) for one in apart(torch.zeros(MATRIX))]
    optimizer = TorchOptimizer(params, sgd(1.0))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    is_tied = len({one.data_ptr() for one in params}) < len(params)
    assert all(bool((one == (-2.0 if is_tied else -1.0)).all()) for one in params)
    with pytest.raises(ValueError, match="share a part of their memory"):
        TorchOptimizer([nn.Parameter(one) for one in shared(torch.zeros(MATRIX))], sgd(1.0))


def test_one_parameter_given_twice_is_not_an_overlap() -> None:
    """The error about a third parameter does not name the parameter that is given twice."""
    first, second, third = overlapping().values()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        TorchOptimizer([first, second, first], sgd(0.1))
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match=r"'param_groups\[0\]\[1\]' .* 'param_groups\[0\]\[3\]'"),
    ):
        TorchOptimizer([first, second, first, third], sgd(0.1))


def test_a_pure_step_accepts_them_and_a_step_in_place_does_not() -> None:
    """A step in place could not have the result of the pure step, which has separate values.

    In later rounds, the plan for tensors with these layouts is known.
    """
    optimizers = {
        "one rule": adamw(0.1),
        "a norm": chain(clip_by_global_norm(1.0), adamw(0.1)),
        "a gate": chain(accumulate(2), sgd(0.1)),
        "parts": two_parts(),
    }
    for name, optimizer in optimizers.items():
        with case(optimizer=name), torch.no_grad():
            params = {key: one.detach() for key, one in overlapping().items()}
            grads = {key: torch.ones_like(one) for key, one in params.items()}
            separate = {key: one.clone() for key, one in params.items()}
            state, twin = optimizer.init(params), optimizer.init(separate)
            known = {key: one.clone() for key, one in params.items()}
            for _ in range(3):
                new, _ = optimizer.update(params, grads, state)
                want, _ = optimizer.update(separate, grads, twin)
                assert all(torch.equal(new[key], want[key]) for key in params)
                before = [one.clone() for one in params.values()]
                with pytest.raises(ValueError, match=SHARED.format("second", "third")):
                    optimizer.update_(params, grads, state)
                assert all(map(torch.equal, params.values(), before))
                assert all(int(leaf.step) == 0 for leaf in state.leaves.values())
                optimizer.update_(known, grads, optimizer.init(known))


def test_a_step_in_place_of_one_of_them_is_accepted() -> None:
    """A parameter without a gradient is not written, so only two with gradients are refused."""
    params = {key: one.detach() for key, one in overlapping().items()}
    grads: dict[str, Any] = {key: torch.ones_like(one) for key, one in params.items()}
    optimizer = sgd(1.0)
    state = optimizer.init(params)
    optimizer.update_(params, {**grads, "third": None}, state)
    assert params["third"].tolist() == [3.0, 4.0, 6.0, 7.0]
    with pytest.raises(ValueError, match="share a part of their memory"):
        optimizer.update_(params, grads, state)


def test_parameters_that_get_common_memory_later_are_stepped_one_after_the_other() -> None:
    """Only the constructor checks memory. The next constructor refuses these parameters."""
    memory = torch.zeros(3)
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = TorchOptimizer(params, sgd(1.0))
    for place, param in enumerate(params):
        param.data, param.grad = memory[place : place + 2], torch.ones(2)
    optimizer.step()
    assert memory.tolist() == [-1.0, -2.0, -1.0]
    with pytest.raises(ValueError, match="share a part of their memory"):
        TorchOptimizer(params, sgd(1.0))
